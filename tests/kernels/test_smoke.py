"""The first minute on a GPU, with a library and a worker that stand in for it: facts, whatever breaks."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
import autotune_stage
import torch
from benchmarks import smoke
from cslt import stand_in  # noqa: F401 (a fixture)
from gpu_run import run


def test_smoke(stand_in, tmp_path, monkeypatch):
    behaviour = {"0": 50.0, "1": "wrong", "2": "crash", "3": 40.0, "max_id": 4}
    (tmp_path / "worker").mkdir()
    monkeypatch.setattr(smoke, "WORKER", autotune_stage.StandIn(tmp_path / "worker", behaviour).command)
    monkeypatch.setattr(smoke, "PROBLEMS", (smoke.linear_problem(32, 48, 64, torch.bfloat16),))
    monkeypatch.setattr(smoke, "LAYOUTS", ((64, 128), (48, 80)))
    monkeypatch.setattr(smoke, "SIZE", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(smoke.cusparselt, "is_slow_on", lambda device: True)
    code, result, _ = run(tmp_path / "out", "smoke")
    assert code == 0, result["errors"]
    rows = {name: row["facts"] for name, row in result["sections"]["smoke"]["rows"].items()}
    assert rows["library"]["unsupported"] is None and rows["library"]["known to be slow here"]
    assert rows["a call"]["sparse, host us"] > 0 and rows["a call"]["dense, host us"] > 0
    assert "Error" in rows["a call"]["sparse, us by a graph"]  # a CPU has no graphs
    assert "capture, sparse" in next((tmp_path / "out").glob("*.log")).read_text()
    assert rows["layout of 64 x 128"]["layout found"] and rows["layout of 64 x 128"]["columns"] == 72
    tried = rows["ids of 48 x 32 x 64"]
    assert tried["dense, us"] == 100.0 and tried["id: us"] == "3: 40.0, 0: 50.0"
    assert "1: wrong numbers, 2: Died: it died of SIGSEGV" in tried["id: error"]
    assert tried["id: error"].endswith("4: not supported")
