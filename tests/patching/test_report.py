"""PatchReport: what it counts, and how it is shown."""

import pytest
import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, oneshot, patch_model


def test_report():
    report = patch_model(zoo.build("llama"))
    assert (len(report.patched), len(report.skipped)) == (6, 9)
    assert report.patched_parameters == 6 * 32 * 64
    assert report.sparse_share == pytest.approx(6 * 32 * 32 / report.total_parameters)
    text = str(report)
    assert text.startswith("2:4 sparse by s-ste: 6 of 15 linear layers")
    assert repr(report) == f"<PatchReport: {text.splitlines()[0]}>"
    assert "model.layers.*.mlp.up_proj" in text and "not in target_modules='mlp'" in text
    rows = {row.group: row for row in report.rows}
    assert rows["model.layers.*.mlp.up_proj"].layers == 2 and rows["lm_head"].skipped == "output embedding"


def test_the_report_says_what_runs_the_gemms(faster_from_32):
    for method, gemms in (("t-sr-ste", "18 sparse"), ("fixed-mask", "6 sparse")):
        report = patch_model(zoo.build("llama"), Sparse24Config(method=method))
        assert report.training.startswith(f"GEMMs of 2,048 tokens in torch.float32: {gemms} (from 32 tokens")
        assert "bf16 runs dense" in report.training and report.training in str(report)
    with torch.device("meta"):
        assert not patch_model(zoo.build("llama")).training
    assert not patch_model(zoo.build("llama"), Sparse24Config(backend="dense")).training


def test_titles_name_every_pattern():
    data = [torch.arange(32)[None]]
    for sparse, expected in (
        ({"pattern": "8:16"}, "8:16"),
        ({"layer_patterns": {"up_proj": "8:16"}}, "2:4 in 4 layers, 8:16 in 2 layers"),
        ({"layer_patterns": {"mlp": "8:16"}}, "8:16"),
        ({"layer_patterns": {"layers.0.mlp.up_proj": "1:4"}}, "2:4 in 5 layers, 1:4 in 1 layer"),
    ):
        config = Sparse24Config(method="fixed-mask", **sparse)
        assert str(patch_model(zoo.build("llama"), config)).startswith(
            f"{expected} sparse by fixed-mask: 6 of 15 linear"
        )
        report = str(oneshot(zoo.build("llama"), data, config, reconstruct=None))
        assert report.startswith(f"one-shot {expected} by sparsegpt masks; ")


def test_the_report_counts_weights_and_nothing_else():
    model = zoo.build("bert")  # whose layers have biases
    report = patch_model(model, Sparse24Config(method="own"))
    rows = {row.group: row.weights for row in report.rows}
    assert rows["bert.encoder.layer.*.intermediate.dense"] == 2 * 32 * 64
    assert sum(row.weights for row in report.rows if row.skipped is None) == report.patched_parameters
    tied = patch_model(zoo.build("llama", tie_word_embeddings=True))
    assert tied.total_parameters >= sum(row.weights for row in tied.rows)


def test_the_report_of_a_pretrained_model_advises_to_prune_it_first(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    report = patch_model(model)
    assert report.is_pretrained and "oneshot(model, batches)" in str(report).splitlines()[-1]
    assert not patch_model(model).is_pretrained  # it is sparse by now
    export_model(model, tmp_path / "export")
    from_scratch = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))  # it has the name, too
    for source in (zoo.build("llama"), from_scratch, AutoModelForCausalLM.from_pretrained(tmp_path / "export")):
        assert "oneshot" not in str(patch_model(source))
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "oneshot(" not in str(oneshot(pruned, [torch.arange(32)[None]], reconstruct=None).patch)
    own = Sparse24Config(method="fixed-mask", layer_patterns={"gate_proj": "1:4"})  # the first, of which 2:4 loses half
    assert patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "export"), own).is_pretrained
