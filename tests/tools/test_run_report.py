"""hf-sparse24 report: the page of a real run in a real browser, and of runs that lack what it draws."""

import json
import math
import re
from html import unescape
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import browser
import own_method  # noqa: F401 (registers a method with a metric)
import pytest
import zoo
from training_runs import arguments, dataset
from transformers import Trainer

from hf_sparse24 import DenseFlipRateCallback, Sparse24Config, Sparse24Trainer
from hf_sparse24.charts import Row, heat_map, shown, svg
from hf_sparse24.tools import run_report
from hf_sparse24.tools.run_files import dense_spans, read_run, thinned
from hf_sparse24.tools.run_report import COLUMNS, ROWS, grouped, write_report
from hf_sparse24.training.run_log import RUN_LOG, read_run_log
from hf_sparse24_command import main

STEPS = 8
FLIPPING = 5  # after the sixth step the dense tail begins
CHARTS = ["loss", "difference", "schedule", "flips", "kept", "layers", "speed", "memory"]


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
    callback = DenseFlipRateCallback(Sparse24Config(method="t-sr-ste", mask_interval=1))
    return train(tmp_path_factory.mktemp("dense"), callbacks=[callback])


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
    found = [ElementTree.fromstring(text) for text in re.findall(r'<svg role="img".*?</svg>', page, re.DOTALL)]
    return {chart.get("aria-labelledby"): chart for chart in found}


def tips(page: str, name: str) -> list[str]:
    """What a chart says where the pointer is, from left to right, and row by row."""
    (group,) = charts(page)[name].findall("g[@class='tips']")
    return [box.findtext("title") for box in group]


def cells(page: str) -> list[tuple[str, list[str]]]:
    """The rows of the heat map: the name, and what the cells say."""
    boxes = charts(page)["layers"].find("g[@class='tips']")
    rows = [
        [box.findtext("title").rsplit("\n", 1) for box in row] for _, row in groupby(boxes, lambda box: box.get("y"))
    ]
    return [(row[0][0], [said for _, said in row]) for row in rows]


def lines(page: str, name: str, colour: str) -> list[str]:
    """The paths of a chart's lines of one colour, first those of the plot, then those of the legend."""
    found = [path for path in charts(page)[name].iter("path") if f"stroke: var(--{colour})" in path.get("style", "")]
    return [path.get("d") for path in found if "fill: none" in path.get("style")]


def captions(page: str) -> dict[str, str]:
    found = re.findall(r'<h2 id="([\w-]+)">.*?<figcaption>(.*?)</figcaption>', page, re.DOTALL)
    return {name: unescape(caption) for name, caption in found}


def test_in_a_browser(sparse, dense, tmp_path):
    path = write_report(sparse, dense, tmp_path / "page.html")
    with browser.new_page() as page:
        page.open(path)
        assert page.problems() == [] and page.requests() == [path.as_uri()]
        sizes = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('svg[role=img]')].map(s => "
            "[s.getAttribute('aria-labelledby'), [s.getBoundingClientRect().width, s.getBoundingClientRect().height]]))"
        )
        assert sorted(sizes) == sorted(CHARTS)
        assert all(width > 300 and height > 100 for width, height in sizes.values())
        assert page.evaluate("document.querySelectorAll('[aria-labelledby=layers] .tips rect').length") == 6 * FLIPPING
        flat = "[...document.querySelectorAll('svg path, .tips rect')].filter(e => !e.getBoundingClientRect().width)"
        assert (
            page.evaluate(f"{flat}.filter(e => !e.closest('defs') && !/M(.*)L\\1/.test(e.getAttribute('d'))).length")
            == 0
        )
        titles = "[...document.querySelectorAll('svg[role=img]')].map(s => s.ariaLabelledByElements[0].textContent)"
        assert page.evaluate(f"{titles}.includes('Flip rate by layer')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        page.hover(f"[aria-labelledby=layers] .tips rect:nth-child({FLIPPING + 2})")
        rate = read_run_log(sparse / RUN_LOG)[1][1].flip_rates["model.layers.0.mlp.up_proj"]
        tip = "document.querySelector('.tips rect:hover title').textContent"
        assert page.evaluate(tip) == f"0.mlp.up_proj\n{shown(100 * rate)}%, optimizer step 2"
        page.hover("[aria-labelledby=loss] .tips rect:nth-child(4)")
        said = page.evaluate(tip)
        assert said.startswith("optimizer step 4\n2:4, training: ") and "dense control, evaluation: " in said

        colours = []
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            styles = "[document.body, document.querySelector('path[style*=sparse]')].map(e => getComputedStyle(e))"
            colours.append(page.evaluate(f"{styles}.flatMap(s => [s.backgroundColor, s.color, s.stroke])"))
        assert colours[0][0] == "rgb(255, 255, 254)" and all(
            a != b for a, b in zip(*colours) if a != "none" != b and "0, 0, 0, 0" not in a
        )
        page.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 254)"
        page.call("Emulation.setEmulatedMedia", media="screen")
        page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400  # wide charts scroll by themselves


HOSTILE = "$\\frac</script><script>hacked=1</script><img src=x onerror=hacked=1>\"'&"


def test_nothing_of_the_files_becomes_markup(tmp_path):
    start = {
        "layers": {f"a.{HOSTILE}": 8, f"b.{HOSTILE}": 8},
        "config": {"method": HOSTILE, "pattern": HOSTILE, HOSTILE: [HOSTILE]},
        "arguments": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: "\ud800"},
        "device": HOSTILE,
    }
    lines = [{"step": 10, "flip_rates": [0.5, 0.25], "metrics": {HOSTILE: 1.5}}]
    logs = losses(3.0, **{f"eval_{HOSTILE}_loss": 3.0})
    run = made_up(tmp_path / "run & <b>", logs, start, lines, architectures=[HOSTILE])
    path = write_report(run)
    text = path.read_text()
    assert "<script" not in text and "<img" not in text and "<b>" not in text
    names = [f"{letter}.{HOSTILE}"[-39:].rjust(40, "…") for letter in "ab"]
    assert cells(text) == [(name, [f"{rate}%, optimizer step 10"]) for name, rate in zip(names, (50, 25))]
    with browser.new_page() as page:
        page.open(path)
        assert page.problems() == [] and page.requests() == [path.as_uri()]
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.evaluate("document.title") == f"{HOSTILE} training: run & <b>"
        # And what somebody adds does not run.
        page.evaluate("document.body.appendChild(document.createElement('script')).text = 'hacked = 1'")
        assert page.evaluate("typeof hacked") == "undefined"


def test_the_numbers_are_the_recorded_ones(sparse, dense, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", str(sparse), "--dense", str(dense), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"report  {path}\n"
    page = path.read_text()
    run, control = read_run(sparse), read_run(dense)
    assert set(charts(page)) == set(CHARTS)
    for step, tip in zip(range(1, STEPS + 1), tips(page, "loss"), strict=True):
        expected = [f"optimizer step {step}"]
        for name, one in (("2:4", run), ("dense control", control)):
            for key, kind in (("loss", "training"), ("eval_loss", "evaluation")):
                if key in one.history[step]:
                    expected.append(f"{name}, {kind}: {shown(one.history[step][key])}")
        assert tip.splitlines() == expected and len(expected) == (5 if step % 4 == 0 else 3)
    rates = [line.flip_rates for line in read_run_log(sparse / RUN_LOG)[1]][:FLIPPING]
    assert [said for _, said in cells(page)] == [
        [f"{shown(100 * rate[name])}%, optimizer step {step}" for step, rate in enumerate(rates, 1)]
        for name in rates[0]
    ]
    assert "of dense training, %: " in tips(page, "flips")[0]
    difference = run.history[STEPS]["eval_loss"] - control.history[STEPS]["eval_loss"]
    assert f"difference {difference:+.3g}" in page
    # Its dense tail is the last sixth of 8 steps, rounded up.
    assert dense_spans(run) == [(6, 8)] and "Dense phase: steps 7 to 8" in captions(page)["schedule"]
    for text in ("t-sr-ste", "mask_interval", "LlamaForCausalLM", "transformers", "cpu", "eval_steps"):
        assert f">{text}" in page


def test_metrics_of_a_method_have_a_chart_each(tmp_path):
    config = Sparse24Config(method="own", adapt_last=0.5)
    run = train(tmp_path / "run", Sparse24Trainer, sparse24_config=config)
    page = write_report(run).read_text()
    assert set(charts(page)) == {*CHARTS, "metric-0"} - {"difference"}
    assert '<h2 id="metric-0">adapter_norm</h2>' in page and captions(page)["metric-0"] == "A metric of the method."
    recorded = [line.metrics["adapter_norm"] for line in read_run_log(run / RUN_LOG)[1]]
    assert len(recorded) == STEPS and recorded[0] == 0 < recorded[-1]  # adapters take part in the second half
    expected = [f"optimizer step {step}\nadapter_norm: {shown(norm)}" for step, norm in enumerate(recorded, 1)]
    assert tips(page, "metric-0") == expected
    logs = [{"step": 1, "metrics": {"first": 1.0}}, {"step": 2, "metrics": {"first": 3.0, "second": 5.0}}]
    page = write_report(made_up(tmp_path / "two", losses(4.0), {"layers": {"a": 8}}, logs)).read_text()
    assert tips(page, "metric-0") == ["optimizer step 1\nfirst: 1", "optimizer step 2\nfirst: 3"]
    assert tips(page, "metric-1") == ["optimizer step 2\nsecond: 5"]


def test_tips_lie_on_their_cells():
    rows = [Row("a", [1.0, 4.0, None]), Row("b", [None, 0.25, 2.0])]
    chart = ElementTree.fromstring(svg(heat_map(rows, [0, 10, 20, 100], "step", "%"), "id"))
    drawn = [path for path in chart.iter("path") if "fill: var(--heat)" in path.get("style", "")][:4]  # then the scale
    corners = [tuple(map(float, path.get("d").split()[1:3])) for path in drawn]
    boxes = {box.findtext("title"): box for box in chart.find("g[@class='tips']")}
    assert list(boxes) == ["a\n1%, step 10", "a\n4%, step 20", "b\n0.25%, step 20", "b\n2%, step 100"]
    for (x, y), box in zip(corners, boxes.values(), strict=True):
        assert (float(box.get("x")), float(box.get("y"))) == pytest.approx((x, y), abs=0.1)
    shades = [float(re.search(r"fill-opacity: ([\d.]+)", f"{path.get('style')}; fill-opacity: 1")[1]) for path in drawn]
    assert shades == pytest.approx([0.5, 1, 0.25, 0.7], abs=0.06)  # square roots of the shares of the largest


def test_a_run_without_a_control(sparse):
    assert write_report(sparse) == sparse / "report.html"
    page = (sparse / "report.html").read_text()
    assert set(charts(page)) == set(CHARTS) - {"difference"} and "dense control" not in page


def test_a_run_of_an_earlier_version(tmp_path):
    """Without a log of its own."""
    logs = losses(4.0, 3.0, flip_rate=0.1, kept_magnitude=0.7, sparse_phase=1.0)
    run = made_up(tmp_path / "run", logs, quantization_config={"method": "sr-ste", "pattern": "4:8"})
    page = write_report(run).read_text()
    assert set(charts(page)) == {"loss", "schedule", "flips", "kept"}
    for name in ("layers", "speed", "memory"):
        assert RUN_LOG in captions(page)[name]
    assert "<h1>4:8 training: run</h1>" in page and "sr-ste" in page and "evaluation" not in captions(page)["loss"]


def test_one_log(tmp_path):
    start, line = {"layers": {"a": 8}}, {"step": 10, "flip_rates": [0.5], "steps_per_second": 2.0, "peak_memory": 1e9}
    page = write_report(made_up(tmp_path / "run", losses(4.0), start, [line])).read_text()
    assert set(charts(page)) == {"loss", "schedule", "layers", "speed", "memory"}
    marks = [mark for mark in charts(page)["loss"].iter("use") if "stroke: var(--sparse)" in mark.get("style")]
    assert len(marks) == 1 and cells(page) == [("a", ["50%, optimizer step 10"])]  # no line without two points


def test_losses_that_are_not_finite_are_gaps(tmp_path):
    control = made_up(tmp_path / "control", losses(4.0, 3.0, 2.0, 1.0))
    logs = losses(4.0, 3.0, math.nan, math.inf, 2.0, 1.5)
    run = made_up(tmp_path / "run", logs, method="x")
    page = write_report(run, control).read_text()
    line, *_ = lines(page, "loss", "sparse")
    assert line.count("M") == 2 and line.count("L") == 2
    assert "2:4: loss is not finite (a gap) at 2 logs, first at step 30." in captions(page)["loss"]
    assert "difference" in charts(page)
    never = made_up(tmp_path / "never", losses(*[math.nan] * 8))
    page = write_report(never).read_text()
    assert "at 8 logs, first at step 10" in captions(page)["loss"] and "loss" in charts(page)


def test_a_model_of_many_layers(tmp_path):
    """Experts as modules: a row per block, and every number in it."""
    names = [f"model.layers.{i}.mlp.experts.{j}.{kind}" for i in range(24) for j in range(8) for kind in ("up", "down")]
    sizes = {name: 100 if name.endswith("up") else 300 for name in names}
    logs = 3 * COLUMNS
    logged = [
        {"step": s + 1, "flip_rates": [(s + 1) / 1000 if name.endswith("up") else 0.0 for name in names]}
        for s in range(logs)
    ]
    history = [{"step": s + 1, "loss": 3.0 + s / logs} for s in range(logs)]
    path = write_report(made_up(tmp_path / "run", history, {"layers": sizes}, logged))
    page = path.read_text()
    assert [name for name, _ in cells(page)] == [str(i) for i in range(24)]
    # A quarter of the weights flip, and three logs are one cell.
    assert all(
        row[0] == "0.05%, optimizer step 3" and row[-1] == f"{shown((logs - 1) / 40)}%, optimizer step {logs}"
        for _, row in cells(page)
    )
    caption = captions(page)["layers"]
    assert "384 layers of model.layers.*, averaged by block" in caption and "mean of 3 logs" in caption
    assert "each point, here and below, is the mean of 2 logs" in captions(page)["loss"]
    assert path.stat().st_size < 1e6


def test_rows_are_as_few_as_said():
    names = [f"encoder.layer.{i}.mlp.{kind}" for i in range(16) for kind in "abc"]
    rows, rule = grouped(names)
    assert len(rows) == ROWS == len(names) and rule == " of encoder.layer.*"
    assert rows[0] == ("0.mlp.a", ["encoder.layer.0.mlp.a"])
    more = [f"{side}.block.{i}.mlp.{kind}" for side in ("encoder", "decoder") for i in range(50) for kind in "ab"]
    rows, rule = grouped([*more, "head"])
    assert len(rows) == 101 and rule == ", averaged by block"
    assert rows[1] == ("encoder.block.1", more[2:4]) and rows[-1] == ("head", ["head"])


def test_dense_phases(tmp_path):
    def spans(*phases):
        logs = [{"step": 10 * (i + 1), "loss": 1.0, "sparse_phase": phase} for i, phase in enumerate(phases)]
        return dense_spans(read_run(made_up(tmp_path / "run", logs)))

    assert spans(1.0, 1.0, 1.0) == []
    assert spans(0.0, 0.0, 1.0, 1.0) == [(0, 30)]
    assert spans(0.0, 1.0, 0.0, 1.0, 0.0) == [(0, 20), (30, 40)]
    assert spans(1.0, 0.0, 0.0) == [(20, 30)]


def test_thinned_points_are_means():
    points = [(float(x), float(x)) for x in range(10)]
    assert thinned(points, 10) == points
    assert thinned(points, 5) == [(1, 0.5), (3, 2.5), (5, 4.5), (7, 6.5), (9, 8.5)]
    some = thinned([(0, math.nan), (1, 2.0), (2, math.nan), (3, math.inf)], 2)
    assert some[0] == (1, 2.0) and math.isnan(some[1][1])


def test_the_state_of_the_most_steps(sparse, tmp_path):
    for step in (4, 20, 100):
        made_up(tmp_path / f"checkpoint-{step}", [{"step": step, "loss": 1.0}])
    assert read_run(tmp_path).steps == 100
    made_up(tmp_path, [{"step": 100, "loss": 2.0}])
    assert read_run(tmp_path).history[100]["loss"] == 2.0


def test_a_run_without_saved_state_is_reported_from_its_log(sparse, tmp_path):
    """As with save_strategy='no', without trainer.save_state(), or while it trains."""
    (tmp_path / RUN_LOG).write_bytes((sparse / RUN_LOG).read_bytes())
    found, whole = read_run(tmp_path), read_run(sparse)
    for key in ("loss", "learning_rate", "flip_rate", "kept_magnitude", "sparse_phase"):
        assert found.points(key) and found.points(key) == whole.points(key)
    page = write_report(tmp_path).read_text()
    assert set(charts(page)) == set(CHARTS) - {"difference"}
    assert f"There is no trainer_state.json: {RUN_LOG} has no evaluations" in page
    (tmp_path / RUN_LOG).write_text("")
    with pytest.raises(ValueError, match=f"every checkpoint write, nor has it a {RUN_LOG}"):
        read_run(tmp_path)


def test_a_state_that_is_older_than_the_log_is_told(tmp_path):
    run = made_up(tmp_path / "run", losses(4.0), {"layers": {"a": 8}, "time": 4e9})
    assert "trainer_state.json is older than the run" in write_report(run).read_text()
    run = made_up(tmp_path / "run", losses(4.0), {"layers": {"a": 8}, "time": 1e9})
    assert "is older than" not in write_report(run).read_text()


def test_a_dense_run_is_told(dense, tmp_path):
    page = write_report(dense, output=tmp_path / "page.html").read_text()
    assert "says that sparse weights were trained" in page


def test_several_evaluation_sets(tmp_path):
    logs = [*losses(3.0, 2.5), {"step": 20, "eval_code_loss": 2.0}, {"step": 20, "eval_text_loss": 3.0}]
    page = write_report(made_up(tmp_path / "run", logs)).read_text()
    assert "2:4, evaluation code" in page and "2:4, evaluation text" in page


def with_steps(run, global_step, step):
    state = {"global_step": global_step, "log_history": [{"loss": 1.0, "step": step}]}
    (run / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda run: (run / "trainer_state.json").unlink(),
            "is no run: neither it nor a checkpoint-* in it has a trainer_s",
        ),
        (
            lambda run: (run / "trainer_state.json").write_text('{"global_st'),
            "trainer_state.json is cut short or damaged",
        ),
        (
            lambda run: (run / "trainer_state.json").write_text("[]"),
            "trainer_state.json is damaged: it holds no JSON obj",
        ),
        (lambda run: (run / "trainer_state.json").write_text("{}"), "trainer_state.json that is damaged: no Trainer"),
        (
            lambda run: (run / "trainer_state.json").write_text('{"global_step": 1, "log_history": [{"loss": 1}]}'),
            "trainer_state.json that is damaged: no Trainer",
        ),
        (lambda run: with_steps(run, math.inf, 1), "trainer_state.json that is damaged: no Trainer"),
        (lambda run: with_steps(run, 1, math.inf), "trainer_state.json that is damaged: no Trainer"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is cut short or damaged"),
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


def test_a_report_is_replaced_as_a_whole(tmp_path, monkeypatch):
    run = made_up(tmp_path / "run", losses(4.0))
    path = write_report(run)
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(run_report.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_report(run)
    assert path.read_bytes() == before and not list(run.glob("*.part"))


def test_without_a_browser_it_is_skipped_or_fails_in_ci(monkeypatch):
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=r"no browser: none of chromium.* is installed; `apt-get install chromium`"
    ):
        browser.binary()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser.binary()
