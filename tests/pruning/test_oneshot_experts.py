"""oneshot on mixtures of experts: each expert by its own inputs, or by magnitude where it got too few."""

import pytest
import torch
import zoo
from oneshot_models import batches, fixed_mask
from sparse24_kernels import nm_mask
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, SwitchTransformersConfig

from hf_sparse24 import oneshot, sparse_weights
from hf_sparse24.pruning import layerwise


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # stored as [out, in] and as [in, out]
def test_each_expert_is_pruned_by_its_own_inputs(name, every):
    model, data, given = zoo.build(name), batches(2), []
    for batch in data:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 15:] = 0
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad(), experts.register_forward_pre_hook(lambda module, args: given.append(args)):
        for batch in data:
            model(**batch)
    weight = experts.gate_up_proj.detach().clone()
    report = oneshot(model, data, fixed_mask(), reconstruct=None, calibrate_all_experts=every)
    tokens = {layer.name: layer.tokens for layer in report.layers}
    for expert, stored in enumerate(weight):
        x = torch.cat(
            [
                hidden[(batch["attention_mask"].flatten() == 1) & ((index == expert).any(-1) | every)]
                for (hidden, index, _), batch in zip(given, data)
            ]
        )
        dense, pruned = (each if name == "qwen3_moe" else each.t() for each in (stored, experts.gate_up_proj[expert]))
        expected, _, _ = layerwise.sparsegpt(dense, x.t() @ x, 2, 4, 0.01)
        torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-5)
        for stack in ("gate_up_proj", "down_proj"):
            assert tokens[f"model.layers.0.mlp.experts.{stack}[{expert}]"] == len(x)


def starved(name: str) -> PreTrainedModel:
    """A model whose routers give their second expert nothing."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_experts": 4, "expert_capacity": 500}
    switch = SwitchTransformersConfig(**sizes, num_layers=2, num_sparse_encoder_layers=2, vocab_size=zoo.VOCAB)
    model = AutoModelForSeq2SeqLM.from_config(switch) if name == "switch" else zoo.build(name)
    for key, router in model.named_modules():
        if key.endswith(("router.classifier", "mlp.gate")):
            router.register_forward_pre_hook(lambda module, args: (args[0].abs(),))
            router.weight.data[1] = -9.0
    return model


WANDA = {"criterion": "wanda", "reconstruct": None}


@pytest.mark.parametrize("arguments", [{}, WANDA, {"reconstruct": "layer", "values": "int8"}])
@pytest.mark.parametrize("name", ["switch", "olmoe"])
def test_an_expert_without_tokens_is_pruned_by_magnitude(name, arguments, monkeypatch):
    model, said = starved(name), []
    monkeypatch.setattr("hf_sparse24.pruning.oneshot.logger.warning", said.append)
    data = [batch | ({"decoder_input_ids": batch["input_ids"]} if name == "switch" else {}) for batch in batches(2)]
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    report = oneshot(model, data, fixed_mask(), **arguments)
    found = [layer.name for layer in report.layers if layer.tokens < 8]
    assert any(".expert_1." in each or each.endswith("[1]") for each in found)
    assert [f"{len(found)} masks of experts" in each for each in said if "fewer than 8" in each] == [True]
    for key, weight in sparse_weights(model).items():
        for view in weight.views():
            before = dense[key] if view.number is None else dense[key][view.number]
            mask = nm_mask(before, 2, 4) if view.name in found else nm_mask(view.matrix, 2, 4)
            assert torch.equal(view.matrix * mask, view.matrix)
