"""hf-sparse24 report: the page of a real run, and of runs that lack what it draws."""

import base64
import json
import math
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import browser
import own_method  # noqa: F401 (registers a method with a metric)
import pytest
import zoo
from training_runs import arguments, dataset
from transformers import Trainer

from hf_sparse24 import Sparse24Config, Sparse24Trainer
from hf_sparse24.tools.run_charts import shown
from hf_sparse24.tools.run_files import COLUMNS, layer_map, read_run
from hf_sparse24.tools.run_report import write_report
from hf_sparse24.training.run_log import RUN_LOG
from hf_sparse24_command import main

STEPS = 8
FLIPPING = 5  # after the sixth step the dense tail begins
CHARTS = ["loss", "difference", "schedule", "flips", "kept", "layers", "metric-0", "speed", "memory"]


def train(directory, trainer=Trainer, **settings) -> Path:
    args = arguments(directory, max_steps=STEPS, learning_rate=0.05, eval_strategy="steps", eval_steps=4)
    run = trainer(zoo.build("llama"), args, train_dataset=dataset(), eval_dataset=dataset(4), **settings)
    run.train()
    run.save_model()
    run.save_state()
    return Path(directory)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    config = Sparse24Config(method="t-sr-ste", mask_interval=1)
    return train(tmp_path_factory.mktemp("sparse"), Sparse24Trainer, sparse24_config=config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("dense"))


def made_up(directory: Path, logs: list[dict], start: dict | None = None, lines: list[dict] = [], **config) -> Path:  # noqa: B006
    """A run as its files tell it."""
    directory.mkdir(exist_ok=True)
    state = {"global_step": logs[-1]["step"], "log_history": logs}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    if start is not None:
        entries = [{"step": 0, "time": 0.0, **start}, *lines]
        (directory / RUN_LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def losses(*values: float, **more) -> list[dict]:
    return [{"step": 10 * (i + 1), "loss": value, "learning_rate": 1e-3, **more} for i, value in enumerate(values)]


def charts(page: str) -> dict[str, ElementTree.Element]:
    """The charts of a page, by the id of their titles."""
    found = re.findall(r'<h2 id="([\w-]+)">[^<]*</h2><div class="chart"><img [^>]*base64,([^"]*)">', page)
    return {name: ElementTree.fromstring(base64.b64decode(data)) for name, data in found}


def captions(page: str) -> dict[str, str]:
    found = re.findall(r'<h2 id="([\w-]+)">.*?<figcaption>(.*?)</figcaption>', page, re.DOTALL)
    return {name: unescape(caption) for name, caption in found}


def test_in_a_browser(sparse, dense, tmp_path):
    path = write_report(sparse, dense, tmp_path / "page.html")
    with browser.new_page() as page:
        page.open(path)
        assert page.problems() == []
        assert {address.partition(":")[0] for address in page.requests()} <= {"file", "data"}
        widths = page.evaluate("[...document.querySelectorAll('.chart img')].map(i => i.naturalWidth && i.width)")
        assert len(widths) == len(CHARTS) and min(widths) > 300
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400  # wide charts scroll by themselves


HOSTILE = "$\\frac</script><script>hacked=1</script><img src=x onerror=hacked=1>\"'&"


def test_nothing_of_the_files_becomes_markup(tmp_path):
    start = {
        "layers": {f"a.{HOSTILE}": 8, f"b.{HOSTILE}": 8},
        "config": {"method": HOSTILE, "pattern": HOSTILE, HOSTILE: [HOSTILE]},
        "arguments": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: "\ud800", "device": HOSTILE},
    }
    lines = [{"step": 10, "loss": 3.0, "flip_rates": [0.5, 0.25], HOSTILE: 1.5}]
    logs = losses(3.0, **{f"eval_{HOSTILE}_loss": 3.0})
    run = made_up(tmp_path / "run & <b>", logs, start, lines, architectures=[HOSTILE])
    path = write_report(run)
    text = path.read_text()
    assert "<script" not in text and "<img src=x" not in text and "<b>" not in text
    assert {"loss", "layers", "metric-0"} <= charts(text).keys()
    labels = [f"{letter}.{HOSTILE}"[-39:].rjust(40, "…") for letter in "ab"]
    assert layer_map(read_run(run))[0] == [(label, [rate]) for label, rate in zip(labels, (50, 25))]
    with browser.new_page() as page:
        page.open(path)
        assert page.problems() == [] and page.evaluate("typeof hacked") == "undefined"
        assert page.evaluate("document.title") == f"{HOSTILE} training: run & <b>"
        # And what somebody adds does not run.
        page.evaluate("document.body.appendChild(document.createElement('script')).text = 'hacked = 1'")
        assert page.evaluate("typeof hacked") == "undefined"


def test_the_page_of_a_run(sparse, dense, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", str(sparse), "--dense", str(dense), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"report  {path}\n"
    page, run, control = path.read_text(), read_run(sparse), read_run(dense)
    assert list(charts(page)) == CHARTS
    rows, edges, _ = layer_map(run)
    assert edges == list(range(FLIPPING + 1)) and len(rows) == 6
    assert [cells for _, cells in rows] == [
        [pytest.approx(100 * run.flip_rates[step][name]) for step in range(1, FLIPPING + 1)]
        for name in run.facts["layers"]
    ]
    difference = run.history[STEPS]["eval_loss"] - control.history[STEPS]["eval_loss"]
    assert f"difference {difference:+.3g}" in page
    assert f">{shown(run.history[STEPS]['loss'])}<" in page  # in the table
    # Its dense tail is the last sixth of 8 steps, rounded up.
    assert run.dense_spans() == [(6, 8)] and "Dense phase: steps 7 to 8" in captions(page)["schedule"]
    for text in ("t-sr-ste", "mask_interval", "LlamaForCausalLM", "transformers", "1 x cpu", "eval_steps", "grad_norm"):
        assert f">{text}" in page


def test_metrics_of_a_method_have_a_chart_each(tmp_path):
    run = train(tmp_path / "run", Sparse24Trainer, sparse24_config=Sparse24Config(method="own", adapt_last=0.5))
    assert re.search(r'<h2 id="metric-\d">adapter_norm</h2>', write_report(run).read_text())
    recorded = [value for _, value in read_run(run).points("adapter_norm")]
    assert len(recorded) == STEPS and recorded[0] == 0 < recorded[-1]  # adapters take part in the second half


def test_a_run_without_a_control(sparse):
    assert write_report(sparse) == sparse / "report.html"
    page = (sparse / "report.html").read_text()
    assert set(charts(page)) == set(CHARTS) - {"difference"} and "dense control" not in page


def test_a_run_without_a_log_of_its_own(tmp_path):
    logs = losses(4.0, 3.0, flip_rate=0.1, kept_magnitude=0.7, sparse_phase=1.0)
    run = made_up(tmp_path / "run", logs, quantization_config={"method": "sr-ste", "pattern": "4:8"})
    page = write_report(run).read_text()
    assert set(charts(page)) == {"loss", "schedule", "flips", "kept"}
    for name in ("layers", "speed", "memory"):
        assert RUN_LOG in captions(page)[name]
    assert "<h1>4:8 training: run</h1>" in page and "sr-ste" in page


def test_losses_that_are_not_finite_are_gaps(tmp_path):
    control = made_up(tmp_path / "control", losses(4.0, 3.0, 2.0, 1.0))
    run = made_up(tmp_path / "run", losses(4.0, 3.0, math.nan, math.inf, 2.0, 1.5), method="x")
    page = write_report(run, control).read_text()
    assert "2:4: loss is not finite (a gap) at 2 logs, first at step 30." in captions(page)["loss"]
    assert "difference" in charts(page)
    page = write_report(made_up(tmp_path / "never", losses(*[math.nan] * 8))).read_text()
    assert "at 8 logs, first at step 10" in captions(page)["loss"] and "loss" in charts(page)
    assert "says that sparse weights were trained" in page


def test_a_model_of_many_layers(tmp_path):
    """Experts as modules: a row per block, and every number in it."""
    names = [f"model.layers.{i}.mlp.experts.{j}.{kind}" for i in range(24) for j in range(8) for kind in ("up", "down")]
    sizes = {name: 100 if name.endswith("up") else 300 for name in names}
    logs = 3 * COLUMNS
    logged = [
        {"step": s + 1, "loss": 1.0, "flip_rates": [(s + 1) / 1000 if name.endswith("up") else 0.0 for name in names]}
        for s in range(logs)
    ]
    history = [{"step": s + 1, "loss": 3.0 + s / logs} for s in range(logs)]
    path = write_report(made_up(tmp_path / "run", history, {"layers": sizes}, logged))
    rows, edges, _ = layer_map(read_run(tmp_path / "run"))
    assert [name for name, _ in rows] == [str(i) for i in range(24)] and edges == list(range(0, logs + 1, 3))
    # A quarter of the weights flip, and three logs are one cell.
    assert all(cells[0] == pytest.approx(0.05) and cells[-1] == pytest.approx((logs - 1) / 40) for _, cells in rows)
    caption = captions(path.read_text())
    assert "384 layers of model.layers.*, averaged by block" in caption["layers"]
    assert "mean of 3 logs" in caption["layers"] and "the mean of 2 logs" in caption["loss"]
    assert path.stat().st_size < 1e6


def test_dense_phases(tmp_path):
    def spans(*phases):
        logs = [{"step": 10 * (i + 1), "loss": 1.0, "sparse_phase": phase} for i, phase in enumerate(phases)]
        return read_run(made_up(tmp_path / "run", logs)).dense_spans()

    assert spans(1.0, 1.0, 1.0) == []
    assert spans(0.0, 0.0, 1.0, 1.0) == [(0, 30)]
    assert spans(0.0, 1.0, 0.0, 1.0, 0.0) == [(0, 20), (30, 40)]
    assert spans(1.0, 0.0, 0.0) == [(20, 30)]


def test_the_state_of_the_most_steps(sparse, tmp_path):
    for step in (4, 20, 100):
        made_up(tmp_path / f"checkpoint-{step}", [{"step": step, "loss": 1.0}])
    assert read_run(tmp_path).steps == 100
    made_up(tmp_path, [{"step": 100, "loss": 2.0}])
    assert read_run(tmp_path).history[100]["loss"] == 2.0


def test_a_killed_run_is_reported_from_its_log(sparse, tmp_path):
    """It has saved no state; and one that trains still has not."""
    (tmp_path / RUN_LOG).write_bytes((sparse / RUN_LOG).read_bytes())
    found, whole = read_run(tmp_path), read_run(sparse)
    assert found.history == whole.history and found.flip_rates == whole.flip_rates
    assert set(charts(write_report(tmp_path).read_text())) == set(CHARTS) - {"difference"}


def test_a_state_that_is_older_than_the_log_is_left_out(tmp_path):
    lines = [{"step": 5, "loss": 1.0}]
    run = made_up(tmp_path / "run", losses(4.0), {"layers": {"a": 8}, "time": 4e9}, lines)
    assert list(read_run(run).history) == [5]
    run = made_up(tmp_path / "run", losses(4.0), {"layers": {"a": 8}, "time": 1e9}, lines)
    assert list(read_run(run).history) == [5, 10]


def with_steps(run, global_step, step):
    state = {"global_step": global_step, "log_history": [{"loss": 1.0, "step": step}]}
    (run / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "trainer_state.json").unlink(), "is no run"),
        (lambda run: (run / "trainer_state.json").write_text('{"global_st'), "trainer_state.json is cut short"),
        (lambda run: (run / "trainer_state.json").write_text("[]"), "trainer_state.json is cut short"),
        (lambda run: with_steps(run, math.inf, 1), "trainer_state.json that is damaged"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is cut short"),
        (lambda run: (run / RUN_LOG).mkdir(), RUN_LOG),
        (lambda run: (run / "report.html").mkdir(), "report.html"),
    ],
)
def test_what_cannot_be_reported(tmp_path, damage, message, capsys):
    run = made_up(tmp_path / "run", losses(4.0))
    damage(run)
    before = sorted(run.iterdir())
    assert main(["report", str(run)]) == 2
    assert message in capsys.readouterr().err and sorted(run.iterdir()) == before


def test_a_control_must_be_dense(sparse, dense, tmp_path, capsys):
    assert main(["report", str(sparse), "--dense", str(sparse)]) == 2
    assert "is a run with sparse weights; --dense takes the control run" in capsys.readouterr().err
    assert main(["report", str(sparse), "--dense", str(tmp_path)]) == 2
    assert f"{tmp_path} is no run" in capsys.readouterr().err
    assert main(["report", str(sparse), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
