"""Training at several sizes: the text, the runs, and one that goes on after an interruption."""

import json
import shutil
import zipfile

import compare_methods
import pytest
from paths import ROOT
from transformers import TrainerCallback

from recipes.scaling import corpus, scaling


def wheel(path, **files):
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name.replace("__", "/", 1) + ".py", text)
        file.writestr(f"{path.stem}.dist-info/METADATA", "Name: x\nLicense: MIT\n\nMIT")
    return path


def test_modules_of_wheels(tmp_path):
    long, other = "x = 1\n" * 50, "y = 2\n" * 50
    seen = set()
    first = wheel(tmp_path / "a-1-py3-none-any.whl", a__two=other, a__one=long, a__test_one=other, a__short="x")
    assert list(corpus.modules(first, seen)) == [long.strip(), other.strip()]
    assert list(corpus.modules(wheel(tmp_path / "b-1-py3-none-any.whl", b__copy=long), seen)) == []
    assert corpus.licence(first) == "MIT" and corpus.first(["ab", "cd", "ef"], 3) == ["ab", "cd"]


def test_validation_packages_do_not_train():
    pinned = {line.split("==")[0] for line in corpus.REQUIREMENTS.read_text().splitlines() if "==" in line}
    assert set(corpus.VALIDATION) < pinned


def test_runs(capsys):
    found = list(scaling.runs())
    assert len({run.name for run in found}) == len(found)
    by_name = {run.name: run for run in found}
    assert by_name["0.46M-dense-seed0"].rate == 2.5e-3 and by_name["1.6M-s-ste-seed0"].rate == 2e-3
    assert by_name["1.6M-dense-rate-x1.6-seed0"].rate == 2e-3 and "3M-dense-seed1" not in by_name
    scaling.main(["--list", "--sizes", "5.5M", "--only", "s-ste 16:32", "--results", "absent"])
    assert capsys.readouterr().out == "5.5M-s-ste-16-32-seed0, learning rate 0.001\n"
    with pytest.raises(SystemExit):
        scaling.main(["--steps", "2"])


def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    texts = [path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))]
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
    monkeypatch.setattr(compare_methods, "train_and_save", train_and_save)
    resumed = losses("interrupted")
    shutil.rmtree(tmp_path / "scaling")
    whole = losses("whole")
    assert len(whole) == 2 and whole["0.46M-dense-seed0"]["size"] == "0.46M"
    for name, run in whole.items():
        assert run["eval_loss"] == resumed[name]["eval_loss"]
    assert losses("whole") == whole  # which are not run again


@pytest.mark.slow
def test_a_run_begins_again_as_it_did(tmp_path):
    """The first 250 steps of one, from the packages on: other CPUs round bf16 otherwise, so losses are close."""

    class Stops(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 250

    (run,) = (run for run in scaling.runs() if run.name == "0.46M-s-ste-seed0")
    data = corpus.prepare(tmp_path / "python_sources")
    found = scaling.train(run, data, lambda trainer: trainer.add_callback(Stops()), output_dir=str(tmp_path / "run"))
    committed = json.loads((scaling.RESULTS / f"{run.name}.json").read_text())
    assert found["loss"] == pytest.approx(committed["loss"][:5], abs=0.03) and found["steps"] == committed["steps"][:5]
    assert json.loads((data / "sources.json").read_text()) == json.loads((scaling.RESULTS / "sources.json").read_text())
