"""Training at several sizes: the text, the runs, and one that goes on after an interruption."""

import json
import shutil
import zipfile

import compare_methods
import pytest
import scaling_page
from paths import ROOT
from transformers import TrainerCallback

from recipes.scaling import corpus, scaling


def wheel(path, **files):
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name.replace("__", "/", 1) + ".py", text)
        file.writestr(f"{path.stem}.dist-info/METADATA", "Name: x\nLicense: MIT\n\nMIT")
    return path


def test_validation_packages_do_not_train(tmp_path, monkeypatch):
    pinned = {line.split("==")[0] for line in corpus.REQUIREMENTS.read_text().splitlines() if "==" in line}
    assert set(corpus.VALIDATION) < pinned
    texts = {"train": "x = 1\n" * 50, "validation": "y = 2\n" * 50}
    for name, text in texts.items():
        wheel(tmp_path / f"{name}-1-py3-none-any.whl", **{f"{name}__one": text})
    (tmp_path / "pins").write_text("".join(f"{name}==1\n" for name in texts))
    monkeypatch.setattr(corpus, "REQUIREMENTS", tmp_path / "pins")
    monkeypatch.setattr(corpus, "VALIDATION", ("validation",))
    monkeypatch.setattr(corpus, "VOCABULARY", 300)
    monkeypatch.setattr(corpus, "packages", lambda *_: tmp_path)
    folder = corpus.prepare(tmp_path / "out")
    for part, text in texts.items():
        (line,) = (folder / f"{part}.jsonl").read_text().splitlines()
        assert json.loads(line)["text"] == text.strip()


def test_runs(capsys):
    found = list(scaling.runs())
    assert len({run.name for run in found}) == len(found)
    by_name = {run.name: run for run in found}
    assert by_name["0.46M-dense-seed0"].rate == 2.5e-3 and by_name["1.6M-s-ste-seed0"].rate == 2e-3
    assert by_name["1.6M-dense-rate-x1.6-seed1"].rate == 2e-3 and "3M-dense-seed1" not in by_name
    scaling.main(["--list", "--sizes", "1.6M", "--only", "s-ste 16:32", "--seeds", "1", "--results", "absent"])
    assert capsys.readouterr().out == "1.6M-s-ste-16-32-seed1, learning rate 0.002\n"
    with pytest.raises(SystemExit):
        scaling.main(["--steps", "2"])


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    texts = [path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))[:6]]
    for part in ("train", "validation"):
        (data / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus.train_tokenizer(texts, 300).save_pretrained(data / "tokenizer")
    (data / "sources.json").write_text("{}")
    monkeypatch.setattr(scaling, "SIZES", {"0.46M": scaling.Size(32, 32, 1, 80)})
    flags = scaling.Size.flags.fget
    monkeypatch.setattr(scaling.Size, "flags", property(lambda size: flags(size) | {"torch_compile": False}))  # quicker
    monkeypatch.setattr(scaling, "SAVED_EVERY", 2)

    def losses(name):
        arguments = ["--sizes", "0.46M", "--only", "dense", "sr-ste", "--data", str(data), "--steps", "5"]
        scaling.main([*arguments, "--results", str(tmp_path / name)])
        return {path.stem: json.loads(path.read_text()) for path in (tmp_path / name).glob("*-seed0.json")}

    def stop(trainer, resume):
        trainer.add_callback(Interrupted())
        train_and_save(trainer, resume)

    class Interrupted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    train_and_save = compare_methods.train_and_save
    monkeypatch.setattr(compare_methods, "train_and_save", stop)
    with pytest.raises(KeyboardInterrupt):
        losses("interrupted")
    begun = []
    monkeypatch.setattr(compare_methods, "train_and_save", lambda t, r: begun.append(r) or train_and_save(t, r))
    resumed = losses("interrupted")
    assert begun[0].endswith("checkpoint-2")
    shutil.rmtree(tmp_path / "scaling")
    whole = losses("whole")
    assert len(whole) == 2 and whole["0.46M-dense-seed0"]["size"] == "0.46M"
    for name, run in whole.items():
        assert run["eval_loss"] == resumed[name]["eval_loss"]
    assert losses("whole") == whole  # which are not run again


def a_run(size, variant, loss, seed=0, factor=1.0):
    parameters = {"small": 1_000_000, "large": 4_000_000}[size]
    found = {"size": size, "variant": variant, "eval_loss": loss, "seed": seed, "factor": factor}
    found |= {"parameters": parameters, "tokens": 9 * parameters, "learning_rate": 0.001, "dtype": "bf16"}
    return found | {"versions": {"torch": "2"}, "device": "cpu"}


FP32 = (("sr-ste", 1.0), ("dense", 1.6))


def test_the_page_has_gaps_of_the_same_seed_and_the_dense_model_of_equal_loss(tmp_path):
    runs = [a_run("small", "dense", 4.0), a_run("small", "dense", 4.2, seed=1), a_run("large", "dense", 3.0)]
    runs += [a_run("small", "s-ste", 4.1), a_run("small", "s-ste", 4.4, seed=1), a_run("large", "s-ste", 3.55)]
    runs += [a_run("large", "dense", 3.02, factor=1.6), a_run("large", "sr-ste", 2.9)]
    runs += [a_run("small", name, 4.5, factor=factor) | {"dtype": "fp32"} for name, factor in FP32]
    for i, run in enumerate(runs):
        (tmp_path / f"{i}-seed.json").write_text(json.dumps(run))
    (tmp_path / "sources.json").write_text('{"a": {"wheel": "a.whl", "licence": "MIT", "characters": 2500000}}')
    text = scaling_page.page(tmp_path)
    assert "| 1M | 9M | 4.100 [4.000, 4.200] | 0.150 [0.100, 0.200] |  |" in text
    assert "| 4M | 36M | 3.000 | 0.550 | -0.100 |" in text
    assert "| 1M | 3.7% |  |" in text and "| 4M | 18.3% | -3.3% |" in text
    assert "| 4M | 0.50 |  |" in text, "halfway from 4.1 to 3.0 is twice the small model's parameters"
    assert "; in fp32: small dense seed 0, small sr-ste seed 0." in text and "| small | dense | 0.001 |" not in text
    assert "| large | dense | 0.001 | 1.6 | +0.020 |" in text and "| a.whl | MIT | 2.5 |" in text
