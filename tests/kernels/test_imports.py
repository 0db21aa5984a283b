"""Every module of sparse24_kernels can be imported first. That layers hold, without circles, is import-linter's."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import sparse24_kernels as kernels

ROOT = Path(kernels.__file__).parent


def modules() -> list[str]:
    paths = [path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    """Each in a separate process, its parents without what they import, so that no import order is needed."""
    code = f"""
        import importlib, os, sys, types
        import torch._dynamo, triton  # what all of them import, once
        for name in {modules()!r}:
            if os.fork() == 0:
                parts = name.split(".")
                for i in range(1, len(parts)):
                    parent = types.ModuleType(".".join(parts[:i]))
                    parent.__path__ = [os.path.join({str(ROOT.parent)!r}, *parts[:i])]
                    sys.modules[parent.__name__] = parent
                importlib.import_module(name)
                os._exit(0)
            if os.wait()[1]:
                sys.exit(f"cannot import {{name}} alone")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
