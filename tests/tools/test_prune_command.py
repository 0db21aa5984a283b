"""hf-sparse24 prune: one command from a dense model and text to an export, that Ctrl-C costs nothing."""

import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import stdlib_text
import torch
import zoo
from recipe_runs import TEXTS, jsonl
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertForMaskedLM, BertModel, PreTrainedModel

from hf_sparse24 import Sparse24Config, export_model, pack_model, patch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.tools import prune as module
from hf_sparse24.tools.prune_job import make_blocks
from hf_sparse24_command import main

SMALL = {"vocab_size": 300, "max_position_embeddings": 32, "initializer_range": 0.2}
NUMBERS = {"--tokens": 2048, "--calibration-tokens": 320, "--own-tokens": 160}


@pytest.fixture(autouse=True, scope="module")
def _level():
    """The command logs about its work."""
    logger = logging.getLogger("hf_sparse24")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders of models with a tokenizer."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    found = {"llama": zoo.build("llama", **SMALL).bfloat16(), "bert": zoo.build("bert", **SMALL)}
    found["encoder"] = BertModel(found["bert"].config)
    found["another"] = zoo.build("llama", seed=1, **SMALL).bfloat16()
    found["experts"] = zoo.build("mixtral", **SMALL)
    for name, model in found.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    found["llama"].save_pretrained(directory / "without tokenizer")
    found["bert"].save_pretrained(directory / "with an empty one")
    tokenizer.eos_token = None
    for kind in ("without ends", "too small"):
        model = zoo.build("llama", **SMALL | ({"vocab_size": 200} if kind == "too small" else {}))
        model.save_pretrained(directory / kind)
    tokenizer.save_pretrained(directory / "without ends")
    stdlib_text.train_tokenizer(TEXTS, 300).save_pretrained(directory / "too small")
    for name in ("t5", "vit"):
        AutoConfig.for_model(name).save_pretrained(directory / name)
    write(directory / "gguf" / "a.Q4.GGUF", b"GGUF")
    model = found["llama"]
    patch_model(model, Sparse24Config(method="ste"))
    model.save_pretrained(directory / "checkpoint")
    export_model(model, directory / "export")
    pack_model(model)
    model.save_pretrained(directory / "packed")
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return jsonl(tmp_path_factory.mktemp("text") / "text.jsonl")


def arguments(model: Path, text: str, out: Path, **options) -> list[str]:
    given = NUMBERS | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    named = [str(part) for option, value in given.items() if value is not None for part in (option, value)]
    return ["prune", str(model), "--text", text, "-o", str(out), *named]


def table(printed: str) -> dict[str, list[str]]:
    """The rows of the last table, by their first cell."""
    return {row[0]: row[1:] for row in map(str.split, printed.splitlines()[-9:]) if row}


def load_as_printed(printed: str) -> PreTrainedModel:
    found: dict = {}
    exec(printed[printed.rindex("\n\n") :], found)
    return found["model"]


@pytest.mark.parametrize(
    ("format", "values", "pattern"),
    [
        ("dense", "float", "2:4"),
        pytest.param("packed", "float", "16:32", marks=pytest.mark.slow),
        pytest.param("packed", "int8", "2:4", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_pruned_trained_and_exported(format, values, pattern, models, text, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine\n")
    assert main(arguments(models / "llama", text, out, format=format, values=values, pattern=pattern)) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    losses = {name: float(rows[name][0]) for name in ("dense", "pruned", "trained")}
    assert losses["trained"] < losses["pruned"] - 0.01
    assert float(rows["trained"][1]) == pytest.approx(math.exp(losses["trained"]), rel=1e-3)
    assert "calibration tokens: 320 of the text" in printed and f"verified: all 14 weights are {pattern}" in printed
    assert "is worse" not in printed
    model = load_as_printed(printed)
    assert model.config.use_cache == AutoConfig.from_pretrained(models / "llama").use_cache
    assert type(model.model.layers[0].mlp.up_proj).__name__ == ("Linear" if format == "dense" else "PackedLinear")
    assert model.dtype == torch.bfloat16
    if format == "dense":
        layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
        assert len(layers) == 14 and all(is_nm_sparse(layer.weight) for layer in layers)
    before, after = (AutoTokenizer.from_pretrained(each) for each in (models / "llama", out))
    assert after.eos_token == "<eos>" and before.backend_tokenizer.to_str() == after.backend_tokenizer.to_str()
    card = (out / "README.md").read_text()
    assert "mine" in card and "dense model, not trained on this text" in card and str(tmp_path) not in card
    ours, theirs, _ = (float(cell) for cell in card.partition("| loss | ")[2].splitlines()[0].strip("| ").split(" | "))
    assert (ours, theirs) == pytest.approx((losses["trained"], losses["dense"]), abs=1e-3)
    assert "| loss before training | " in card and "| own tokens | 160 " in card
    assert not (tmp_path / "out-work").exists()


@pytest.mark.parametrize("kind", ["bert", "encoder", "experts"])
def test_other_models(kind, models, text, tmp_path, capsys):
    options = {"own_tokens": 64 if kind == "experts" else None, "tokens": None if kind == "encoder" else 2048}
    assert main(arguments(models / kind, text, tmp_path / "out", **options)) == 0
    printed = capsys.readouterr().out
    rows, model = table(printed), load_as_printed(printed)
    if kind != "encoder":
        assert rows["trained"][0] < rows["pruned"][0]
        return
    assert 0.5 < float(rows["pruned"][0]) < 0.9999 and rows["dense"] == ["1.0000"]
    tokenizer, dense = AutoTokenizer.from_pretrained(models / kind), AutoModel.from_pretrained(models / kind).eval()
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][:, :32]
    ours, theirs = (one(ids).last_hidden_state for one in (model.eval(), dense))
    assert torch.cosine_similarity(ours, theirs, -1).mean().item() == pytest.approx(float(rows["pruned"][0]), abs=0.05)


OWN_CODE = """
from transformers import {0}Config, {1}
class OwnConfig({0}Config):
    model_type = "own"
class OwnModel({1}):
    config_class = OwnConfig
"""


@pytest.mark.parametrize(
    ("base", "parent", "auto"),
    [("llama", ("Llama", "LlamaForCausalLM"), "ForCausalLM"), ("encoder", ("Bert", "BertModel"), "")],
)
def test_code_that_lies_with_a_model_runs_on_request(base, parent, auto, models, text, tmp_path, capsys):
    model = shutil.copytree(models / base, tmp_path / "own")
    write(model / "own_code.py", OWN_CODE.format(*parent))
    own = {"auto_map": {"AutoConfig": "own_code.OwnConfig", f"AutoModel{auto}": "own_code.OwnModel"}}
    own |= {"model_type": "own", "architectures": ["OwnModel"]}
    write(model / "config.json", json.dumps(json.loads((model / "config.json").read_text()) | own))
    own_tokens = None if base == "encoder" else 32
    command = arguments(model, text, tmp_path / "out", tokens=own_tokens and 0, own_tokens=own_tokens)
    assert main(command) == 2 and "--trust-remote-code" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(module, "measure", None)
        main([*command, "--trust-remote-code"])
    assert json.loads((tmp_path / "out-work/run.json").read_text())["trust_remote_code"]
    assert main([*command, "--trust-remote-code"]) == 0
    assert type(load_as_printed(capsys.readouterr().out)).__name__ == "OwnModel"
    assert f"AutoModel{auto}.from_pretrained" in (tmp_path / "out/README.md").read_text()


def test_defaults_fit_a_short_text(models, tmp_path, capsys, monkeypatch):
    """Half of it prunes, the rest trains a few times, and the model writes three times as much as prunes. The training
    of so little may be no gain, which is said."""
    monkeypatch.setattr(module, "measure", lambda job, name, *_: {"loss": float(name == "trained"), "perplexity": 1.0})
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXTS[:4]))
    options = dict.fromkeys(("tokens", "calibration_tokens", "own_tokens"))
    assert main(arguments(models / "llama", str(text), tmp_path / "out", **options)) == 0
    printed = capsys.readouterr().out
    assert "The export is worse than the model before training: give more text" in printed
    lines = dict(line.split(": ", 1) for line in printed.splitlines() if "tokens: " in line)
    counts = {name: int(line.split()[0].replace(",", "").rstrip(":")) for name, line in lines.items()}
    assert counts["own tokens"] == 3 * counts["calibration tokens"]
    assert "4.0 times" in lines["training tokens"]


def read(out: Path) -> dict[str, bytes]:
    """An export's files, but for the card."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "README.md"}


@pytest.mark.slow
def test_a_finished_export_is_replaced_on_request_by_the_same(models, text, tmp_path, capsys):
    assert main(arguments(models / "llama", text, tmp_path / "out")) == 0
    first, card = read(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()
    assert main(arguments(models / "llama", text, tmp_path / "out")) == 2
    assert "holds a finished export: name another output, or give --overwrite" in capsys.readouterr().err
    assert main([*arguments(models / "llama", text, tmp_path / "out"), "--overwrite"]) == 0
    assert read(tmp_path / "out") == first and (tmp_path / "out" / "README.md").read_text() == card


STAGES = {"own text": "own-000000.safetensors", "pruning": "blocks/block-0000.*", "training": "training/checkpoint-*"}


@pytest.fixture(scope="module")
def undisturbed(models, text, tmp_path_factory) -> tuple[Path, list[str]]:
    """An export of a run of some seconds, and its command without an output."""
    model = zoo.build("llama", **SMALL, num_hidden_layers=2)
    directory = tmp_path_factory.mktemp("undisturbed")
    model.save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(models / "llama").save_pretrained(directory / "model")
    command = arguments(directory / "model", text, directory / "out", own_tokens=17 * 32, calibration_tokens=64)
    assert main(command) == 0
    return directory / "out", command


def run_apart(command: list[str], errors: Path) -> None:
    torch.set_num_threads(1)
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(main(command))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_loses_nothing(stage, undisturbed, tmp_path, capsys, monkeypatch):
    expected, command = undisturbed
    command = [str(tmp_path / "out") if part == str(expected) else part for part in command]
    work, errors = tmp_path / "out-work", tmp_path / "errors"
    process = ranks.start(run_apart, command, errors)
    while process.is_alive() and not any(work.glob(STAGES[stage])):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    said = errors.read_text()
    assert process.exitcode == 130 and said.splitlines()[-1].startswith("hf-sparse24: stopped"), said
    kept = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert kept and not (tmp_path / "out").exists()
    if stage == "training":
        (checkpoint,) = (work / "training").glob("checkpoint-*")
        assert 0 < json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] < 32
    for done in {"own text": (), "pruning": ("own_text",), "training": ("own_text", "oneshot")}[stage]:
        monkeypatch.setattr(module, done, None)  # it is not done again
    begun, train = [], module.Trainer.train
    monkeypatch.setattr(module.Trainer, "train", lambda self, start: begun.append(start) or train(self, start))
    assert main(command) == 0
    assert stage != "training" or begun == [str(checkpoint)]
    assert f"going on from {work}" in capsys.readouterr().out
    assert read(tmp_path / "out") == read(expected)


@pytest.mark.slow
def test_ctrl_c_after_the_training_loses_nothing_however_often(undisturbed, tmp_path, monkeypatch):
    expected, command = undisturbed
    command = [str(tmp_path / "out") if part == str(expected) else part for part in command]
    command[command.index("--tokens") + 1] = "4096"  # more than there are: training ends within an epoch

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "export_model", stopped)
        for _ in range(3):
            assert main(command) == 130
            assert [path.name for path in (tmp_path / "out-work/training").glob("checkpoint-*")] == ["checkpoint-64"]
    assert main(command) == 0


def test_two_processes_do_not_work_in_one_folder(models, text, tmp_path, capsys):
    command = arguments(models / "llama", text, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_sparse24.tools.prune._run", lambda job, dense: main(command))
        assert main(command) == 2
    assert "another process works in" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["unexpected pos 64 (inline_container.cc:672)", "I/O error: No space left on device"])
def test_a_full_disk_is_one_line(said, models, text, tmp_path, capsys, monkeypatch):
    """torch.save and safetensors say it in other errors than Python."""

    def full(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(module, "_run", full)
    assert main(arguments(models / "llama", text, tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert "out-work" in printed and "no space" in printed and printed.count("\n") == 1


FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("change", "value", "said"),
    [
        ("model", "another", "model"),
        *(("file", name, "model") for name in FILES),
        ("text", "other.txt", "text"),
        ("tokens", 64, "training tokens"),
        ("seed", 1, "seed"),
    ],
)
def test_the_work_of_another_run_is_not_taken(change, value, said, models, text, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("".join(TEXTS[::-1]))
    (tmp_path / "out-work").mkdir()
    other = {"own_tokens": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_sparse24.tools.prune._prune", None)
        with pytest.raises(TypeError):
            main(arguments(models / "llama", text, tmp_path / "out", **other))
    given = {"model": "llama", "text": text, **other}
    given[change] = value
    given |= {"model": models / given["model"], "text": str(tmp_path / given["text"])}
    if changed := given.pop("file", None):
        given["model"] = shutil.copytree(given["model"], tmp_path / "copy")
        content = (given["model"] / changed).read_bytes()
        other = content + b"\n" if changed.endswith("json") else content[:-1] + bytes([content[-1] ^ 1])
        (given["model"] / changed).write_bytes(other)
    assert main(arguments(out=tmp_path / "out", **given)) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert said in printed and f"{tmp_path / 'out-work'} is of a run that differs in" in printed


def test_blocks_have_the_special_tokens_of_a_text():
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    single, special = "<mask> $A <pad>", [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<mask>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    blocks = make_blocks(["one two"] * 60, tokenizer, 16, most=5, seed=0)
    assert blocks.shape == (5, 16) and (blocks[:, 0] == special[0][1]).all() and (blocks[:, -1] == special[1][1]).all()
    assert (blocks == tokenizer.eos_token_id).any()
    assert torch.equal(make_blocks(["one two"] * 60, tokenizer, 16, most=2, seed=0), blocks[:2])


def test_own_text_stands_between_the_special_tokens_of_a_text(tmp_path, monkeypatch):
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    special = [("<pad>", tokenizer.convert_tokens_to_ids("<pad>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <pad>", special_tokens=special)
    block = make_blocks(["one two"] * 60, tokenizer, 16, most=1, seed=0)
    given = {"tokenizer": tokenizer, "calibration": block, "own": 1, "work": tmp_path}
    job, written = SimpleNamespace(**given, options=SimpleNamespace(seed=0)), torch.full((1, 15), 7)
    monkeypatch.setattr(module, "own_text", lambda model, tokenizer, count, length, seed: written[:, :length])
    (tmp_path / "own-000000.safetensors").write_bytes(b"damaged")
    (found,) = module._own_text(job, None)
    assert found.tolist() == [[7] * 15 + [special[0][1]]]
    monkeypatch.setattr(module, "own_text", None)
    assert torch.equal(next(module._own_text(job, None)), found)  # from its file


@pytest.mark.parametrize(("tokens", "weight"), [(100_000, 1 / 3), (100_001, 2 / 3)])
def test_a_teacher_counts_less_for_few_tokens(tokens, weight, models, tmp_path, monkeypatch):
    long = write(tmp_path / "long.txt", "one two three " * 20_000)
    seen = []
    monkeypatch.setattr(module, "_claim", lambda job: seen.append(job.teacher_weight) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(arguments(models / "llama", long, tmp_path / "out", tokens=tokens))
    assert seen == [weight]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing", None, "there is no such file or directory"),
        ("binary.txt", b"\x80\x81\xff" * 500, "UTF-8"),
        ("zeros.bin", b"\0" * 500, "zero bytes"),
        ("empty.txt", " \n", "no text is there"),
        ("folder/page.html", "text", "no text is there"),
        ("list.json", json.dumps([{"text": "a"}, {"text": "b"}]), "line 1"),
        ("lines.jsonl", '{"text": "a"}\n{"body": "b"}\n', "line 2"),
        ("half.jsonl", '{"text": "\\ud800"}\n', "line 1"),
        ("short.txt", "a few words", "at least 256 are needed"),
    ],
)
def test_texts_that_cannot_be_read(name, content, said, models, tmp_path, capsys):
    if content is not None:
        write(tmp_path / name, content)
    where = tmp_path / Path(name).parts[0]
    assert main(arguments(models / "llama", str(where), tmp_path / "out")) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (tmp_path / "out").exists() and not (tmp_path / "out-work").exists()


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("nowhere", {}, "nowhere' is no directory here"),
        ("checkpoint", {}, "sparse or quantized already"),
        ("export", {}, "sparse or quantized already"),
        ("packed", {}, "sparse or quantized already"),
        ("gguf", {}, "a.Q4.GGUF is a GGUF file, for llama.cpp: give the folder of the dense model"),
        ("gguf/a.Q4.GGUF", {}, "a.Q4.GGUF is a GGUF file"),
        ("t5", {}, "oneshot"),
        ("vit", {}, "oneshot"),
        ("without tokenizer", {}, "no tokenizer"),
        ("with an empty one", {"own_tokens": None}, "no tokenizer"),
        ("without ends", {}, "no tokenizer with eos_token"),
        ("too small", {}, "vocab_size=200"),
        ("llama", {"values": "int8"}, "int8"),
        ("llama", {"calibration_tokens": 10**6}, "--calibration-tokens 1000000"),
        ("llama", {"seed": 2**32}, "eed"),
        ("bert", {}, "--own-tokens"),
        ("encoder", {"own_tokens": None}, "--tokens"),
    ],
)
def test_refusals_before_anything_is_loaded(model, options, said, models, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(models)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    assert main(arguments(Path(model), text, tmp_path / "out", **options)) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (tmp_path / "out").exists() and not (tmp_path / "out-work").exists()


def test_a_card_that_cannot_be_read(models, text, tmp_path, capsys):
    write(tmp_path / "out" / "README.md", "---\na: [\n---\nmine\n")
    assert main(arguments(models / "llama", text, tmp_path / "out")) == 2
    assert "README.md" in capsys.readouterr().err and not (tmp_path / "out-work").exists()


@pytest.mark.parametrize("options", [{"tokens": -1}, {"tokens": "nan"}, {"calibration_tokens": 0}, {"format": "int8"}])
def test_wrong_numbers(options, models, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments(models / "llama", text, tmp_path / "out", **options))
    assert ended.value.code == 2 and str(*options.values()) in capsys.readouterr().err


def test_another_model_in_the_output_stays(models, text, tmp_path, capsys):
    shutil.copytree(models / "bert", tmp_path / "out")
    assert main(arguments(models / "llama", text, tmp_path / "out")) == 2
    assert "another model that is no export" in capsys.readouterr().err
    assert read(tmp_path / "out") == read(models / "bert")


def test_a_block_without_a_hidden_token_counts_for_nothing(models, monkeypatch):
    model = BertForMaskedLM.from_pretrained(models / "bert")
    rows = torch.randint(5, 300, (2, 16))
    labels = torch.where(torch.rand(2, 16) < 0.3, rows, module.IGNORED)
    batches = [
        {"input_ids": rows, "labels": labels},
        {"input_ids": rows, "labels": torch.full_like(rows, module.IGNORED)},
    ]
    job = SimpleNamespace(held_out=rows.repeat(2, 1), batch_size=2, device="cpu", kind="masked")
    found = []
    for number in (1, 2):
        job.held_out, waiting = rows.repeat(number, 1), iter(batches)
        monkeypatch.setattr(module, "_batch", lambda *_, waiting=waiting: next(waiting))
        found.append(module.measure(job, "pruned", model, model)["loss"])
    assert found[0] == found[1] and math.isfinite(found[0])
