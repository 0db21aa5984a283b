"""The command before it imports the package: help, wrong arguments, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest

import hf_sparse24_command


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["--version"], ["export", "x"]])
def test_help_and_usage_import_nothing_large(arguments):
    code = "import sys, hf_sparse24_command as c\ntry:\n    c.main(sys.argv[1:])\nexcept SystemExit as ended:\n"
    code += "    print(ended.code, {'torch', 'transformers', 'hf_sparse24'} & set(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.stderr.endswith("2 set()\n" if arguments[0] == "export" else "0 set()\n")


def test_interrupted_imports_end_without_a_traceback():
    code = "import hf_sparse24_command as c, sys; print('ready', flush=True); sys.exit(c.main(['verify', '.']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    time.sleep(0.5)  # imports take some seconds
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130 and said.startswith("hf-sparse24: stopped; ") and said.count("\n") == 1, said


def test_ctrl_c_that_comes_out_as_another_error(monkeypatch, capsys):
    """As torch raises ValueError where an interrupt meets its conversion of a tensor."""

    def inspect(options):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr("hf_sparse24.tools.checkpoint_commands.inspect", inspect)
    assert hf_sparse24_command.main(["inspect", "x"]) == 130
    assert capsys.readouterr().err.startswith("hf-sparse24: stopped; ")


def test_every_command_is_there():
    """The parser names functions by text."""
    (commands,) = hf_sparse24_command.make_parser()._subparsers._group_actions
    assert {"prune", "export", "verify"} < commands.choices.keys()
    for command in commands.choices.values():
        module, function = command.get_default("run").split(":")
        assert callable(getattr(__import__(f"hf_sparse24.tools.{module}", fromlist=[function]), function))
