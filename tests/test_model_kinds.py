"""Vision models, encoder-decoders and models of two towers: what becomes sparse, and that they live as language models
do: train in Transformers' own trainers, resume, save, reload, export, are pruned in one shot, and have a plan."""

import copy
import math
import re

import model_kinds
import pytest
import torch
from model_kinds import KINDS, collate, outputs
from sparse_models import assert_same_state
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Config,
    export_model,
    make_model_card,
    oneshot,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24_command import main

EVERYTHING = Sparse24Config(target_modules="all-linear")
every_kind = pytest.mark.parametrize("name", KINDS)

STACKS = {
    "vit": ["vit.layers"],
    "deit": ["deit.layers"],
    "clip": ["text_model.encoder.layers", "vision_model.encoder.layers"],
    "clip-vision": ["encoder.layers"],
    "clip-classifier": ["vision_model.encoder.layers"],
    "t5": ["encoder.block", "decoder.block"],
    "bart": ["model.encoder.layers", "model.decoder.layers"],
    "marian": ["model.encoder.layers", "model.decoder.layers"],
    "whisper": ["model.encoder.layers", "model.decoder.layers"],
}


@every_kind
def test_groups_mean_all_stacks_with_cross_attention_and_nothing_outside(name):
    found = {}
    for group in ("mlp", "attention", "all-linear"):
        report = patch_model(model_kinds.build(name), Sparse24Config(target_modules=group))
        found[group] = set(report.patched)
        for stack in STACKS[name]:
            per_block = {"mlp": 2, "attention": 8 if "decoder" in stack else 4}
            expected = sum(per_block.values()) if group == "all-linear" else per_block[group]
            assert sum(layer.startswith(f"{stack}.") for layer in report.patched) == 2 * expected
        assert all(re.match("|".join(STACKS[name]), layer) for layer in report.patched)
    assert all(re.search(r"\.(fc[12]|wi|wo)$", layer) for layer in found["mlp"])
    assert found["mlp"] | found["attention"] == found["all-linear"]
    assert not found["mlp"] & found["attention"]


TOWERS = {
    "siglip": {"text_config": model_kinds.TOWER, "vision_config": model_kinds.VISION},
    "vision-text-dual-encoder": {
        "text_config": model_kinds.TOWER | {"model_type": "bert"},  # which has a class that writes text
        "vision_config": model_kinds.VISION | {"model_type": "vit"},
    },
}


@pytest.mark.parametrize("name", TOWERS)
def test_groups_mean_all_towers_of_a_model_that_writes_no_text(name):
    report = patch_model(AutoModel.from_config(AutoConfig.for_model(name, **TOWERS[name])), EVERYTHING)
    assert sum("text" in layer for layer in report.patched) == sum("vision" in layer for layer in report.patched) == 12


def test_groups_mean_the_text_part_of_a_model_that_transformers_does_not_know():
    class OwnConfig(CLIPConfig):
        model_type = "own_model_of_somebody"

    config = OwnConfig(**KINDS["clip"].config)
    report = patch_model(CLIPModel(config), EVERYTHING)
    assert len(report.patched) == 12 and all(layer.startswith("text_model.") for layer in report.patched)


@every_kind
def test_the_report_counts_linear_layers(name):
    model = model_kinds.build(name)
    report = patch_model(model, EVERYTHING)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert str(report).startswith(f"2:4 sparse by s-ste: {len(report.patched)} of {linear} linear layers")


@pytest.mark.parametrize("format", ["training", "packed"])
def test_a_part_is_not_loaded_dense_from_the_files_of_the_whole(format, tmp_path):
    model = model_kinds.build("clip")
    patch_model(model, Sparse24Config(method="ste"))
    model.save_pretrained(tmp_path) if format == "training" else export_model(model, tmp_path, format=format)
    with pytest.raises(ValueError, match="part_of='CLIPModel'"):
        CLIPVisionModel.from_pretrained(tmp_path)
    whole = CLIPModel.from_pretrained(tmp_path)
    assert torch.equal(outputs(whole, "clip"), outputs(model.eval(), "clip"))
    for loaded in (model, whole):
        assert not hasattr(loaded.config.vision_config, "quantization_config")
    export_model(model, tmp_path / "dense")
    CLIPVisionModel.from_pretrained(tmp_path / "dense")


def trainer(name: str, directory, method: str = "s-ste", **overrides) -> Trainer:
    """Transformers' own, of a patched model that sees the same four rows in each of eight steps."""
    model = model_kinds.build(name)
    interval = {"mask_interval": 2} if method == "t-sr-ste" else {}
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear", **interval))
    is_seq2seq = KINDS[name].labels == "tokens"
    arguments = {
        "max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 4, "learning_rate": 1e-2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    } | overrides  # fmt: skip
    if is_seq2seq:
        arguments |= {"predict_with_generate": True, "generation_max_length": 6}
    args = (Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments)(str(directory), **arguments)
    data = model_kinds.rows(name, 4)
    trainer_class = Seq2SeqTrainer if is_seq2seq else Trainer
    run = trainer_class(model, args, train_dataset=data, eval_dataset=data, data_collator=collate)
    Sparse24Callback.add_to(run)
    return run


LIVES = [
    *(("s-ste", name) for name in KINDS if name != "clip-vision"),  # which has no loss
    *(("t-sr-ste", name) for name in ("deit", "clip", "t5")),  # masks, their refreshes and decay, a dense tail
]
QUICK = [("s-ste", "vit"), ("s-ste", "whisper"), ("t-sr-ste", "t5"), ("t-sr-ste", "clip")]
LIVES = [pytest.param(*life, marks=() if life in QUICK else pytest.mark.slow) for life in LIVES]


@pytest.mark.parametrize(("method", "name"), LIVES)
def test_life_of_a_model(method, name, tmp_path, capsys):
    run = trainer(name, tmp_path, method)
    run.train()
    logged = [log for log in run.state.log_history if "loss" in log]
    assert logged[-1]["loss"] < logged[0]["loss"] and any("flip_rate" in log for log in logged)
    assert math.isfinite(run.evaluate()["eval_loss"])  # where there is a decoder, it generates
    again = trainer(name, tmp_path, method)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_state(again.model, run.model)

    model, model_class = run.model, type(run.model)
    expected = outputs(model, name)
    model.save_pretrained(tmp_path / "saved")
    reloaded, loading = model_class.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded, model)
    assert torch.equal(outputs(reloaded, name), expected)
    for format in ("dense", "packed") if method == "s-ste" else ("dense",):  # a dense tail cannot be packed
        export_model(model, tmp_path / format, format)
        exported, loading = model_class.from_pretrained(tmp_path / format, output_loading_info=True)
        assert not any(loading.values()) and not sparse_weights(exported)
        assert torch.equal(outputs(exported, name), expected)
        assert main(["verify", str(tmp_path / format)]) == (0 if method == "s-ste" else 1)
    if method == "s-ste":
        assert f"all {len(sparse_weights(model))} weights are 2:4" in capsys.readouterr().out
    card = make_model_card(model, model_id="me/model", format="training").text
    assert f"model = {model_class.__name__}.from_pretrained(" in card
    assert f"from transformers import {model_class.__name__}\n" in card
    assert torch.equal(outputs(unpatch_model(model), name), expected)


@pytest.mark.parametrize(
    ("name", "dtype"), [("t5", "float32"), ("t5", "float16"), ("bart", "float16"), ("vit", "float16")]
)
def test_padded_labels_and_fp16_masters(name, dtype, tmp_path, monkeypatch, caplog):
    """They train as the dense model of the same weights; the default eps, which makes NaN of fp16, is warned of."""
    plain, dtype, build = model_kinds.rows, getattr(torch, dtype), model_kinds.build
    kinds = {"pixel_values": dtype, "labels": torch.int64, "input_ids": torch.int64}
    rows = [{key: x.to(kinds[key]) for key, x in row.items()} for row in plain(name, 4)]
    for row in rows[::2] if name != "vit" else ():
        row["labels"][5:] = -100
    monkeypatch.setattr(model_kinds, "rows", lambda *_: rows)
    monkeypatch.setattr(model_kinds, "build", lambda name: build(name).to(dtype))
    run = trainer(name, tmp_path, "fixed-mask", adam_epsilon=1e-4, learning_rate=1e-3, save_strategy="no")
    loss = unpatch_model(copy.deepcopy(run.model))(**collate(rows)).loss
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[0] == pytest.approx(loss.item(), rel=1e-3) and losses[-1] < losses[0]
    assert math.isfinite(run.evaluate()["eval_loss"]) and run.model.dtype == dtype and "is 0 in fp16" not in caplog.text
    export_model(run.model, tmp_path / "export")
    assert type(run.model).from_pretrained(tmp_path / "export").dtype == dtype
    trainer(name, tmp_path, "fixed-mask", max_steps=1, save_strategy="no").train()
    assert ("eps=1e-08 is 0 in fp16" in caplog.text) == (dtype == torch.float16)


@every_kind
def test_gradient_checkpointing_changes_no_gradient(name):
    model, gradients = model_kinds.build(name), []
    patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
    layer, calls = next(iter(sparse_weights(model).values())).module, []
    layer.register_forward_hook(lambda *_: calls.append(1))
    enable = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # of old Transformers
    for is_checkpointed in (False, True):
        if is_checkpointed:
            getattr(model, f"{enable}_checkpointing_enable")()
        found = model.train()(**model_kinds.batch(name))
        (found.pooler_output.square().mean() if name == "clip-vision" else found.loss).backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert len(calls) == 3  # once, then forward and again in the backward pass
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert all(gradients[1][key].any() for key in sparse_weights(model))


@every_kind
def test_oneshot_beats_magnitude_in_every_stack(name):
    data = [model_kinds.batch(name, count=24, seed=seed) for seed in range(4)]
    dense = outputs(model_kinds.build(name), name)
    config = Sparse24Config(method="fixed-mask", target_modules="all-linear")
    layers, error = [], []
    for arguments in ({"criterion": "magnitude", "reconstruct": None}, {"criterion": "sparsegpt", "passes": 2}):
        model = model_kinds.build(name)
        report = oneshot(model, data, config, **arguments)
        layers.append([layer.error for layer in report.layers])
        error.append(((outputs(model, name) - dense).norm() / dense.norm()).item())
    assert all(ours < magnitude for magnitude, ours in zip(*layers))
    assert error[1] < error[0]
    assert {block.name for block in report.blocks} == {f"{stack}.{i}" for stack in STACKS[name] for i in range(2)}
    assert len(report.layers) == len(report.patch.patched)


def test_oneshot_counts_the_tokens_of_both_sequences_and_no_padding():
    batch = model_kinds.batch("t5", count=2)  # 12 tokens in, 8 out
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 9:] = 0
    batch["labels"][0, 5:] = -100
    report = oneshot(model_kinds.build("t5"), [batch], Sparse24Config(method="fixed-mask"), passes=1)
    assert [layer.tokens for layer in report.layers] == [21] * 4 + [13] * 4  # of 24 and 16
    attention = Sparse24Config(method="fixed-mask", target_modules=["EncDecAttention.k", "EncDecAttention.q"])
    report = oneshot(model_kinds.build("t5"), [batch], attention, passes=1)
    assert {layer.name[-1]: layer.tokens for layer in report.layers} == {"k": 21, "q": 13}


@every_kind
def test_the_command_takes_every_kind(name, tmp_path, capsys):
    """Without a class in the config, the whole model, not the decoder that Whisper, BART and Marian have too."""
    config, whole = model_kinds.build(name).config, "clip" if name == "clip-classifier" else name
    for architectures in ([KINDS[name].model_class], None):
        config.architectures = architectures
        config.save_pretrained(tmp_path)
        assert main(["doctor", str(tmp_path)]) == 0
        rows = re.findall(r"^ *(\d+) +\d+ x \d+ ", capsys.readouterr().out, re.MULTILINE)
        assert sum(map(int, rows)) == 2 * 2 * len(STACKS[name if architectures else whole])
