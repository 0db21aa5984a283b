"""Block reconstruction: it lowers the model's error, keeps the zeros, and changes nothing else."""

import copy
import itertools

import model_kinds
import pytest
import torch
import zoo
from oneshot_models import OneLayer, assert_untouched, batches, correlated, fixed_mask
from sparse_models import assert_same_state, snapshot
from torch import nn

from hf_sparse24 import oneshot, sparse_run, sparse_weights, unpatch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.pruning.statistics import counted


def build(name: str = "llama", **overrides) -> nn.Module:
    """With weights and biases large enough that blocks do something."""
    model = zoo.build(name, initializer_range=0.2, **overrides).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def padded(garbage: int, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """The last third of the first two sequences is padding, with random ids."""
    found = batches(count)
    for seed, batch in enumerate(found):
        mask = torch.ones_like(batch["input_ids"])
        mask[:2, 16:] = 0
        other = zoo.batch(seed=garbage + seed, rows=4, length=24)["input_ids"]
        batch["input_ids"] = torch.where(mask.bool(), batch["input_ids"], other)
        batch["attention_mask"] = mask
    return found


def output_error(model: nn.Module, dense: nn.Module, data: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        pairs = [(model(**batch).logits, dense(**batch).logits) for batch in data]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- what it gains ---


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_output_is_closer_to_the_dense_models(name):
    """On text that it was not calibrated on too, by a twentieth at least."""
    dense, data = build(name), batches(24)
    errors = {}
    for reconstruct in (None, "layer", "block"):
        model = copy.deepcopy(dense)
        report = oneshot(model, data[:16], fixed_mask(), criterion="wanda", reconstruct=reconstruct)
        errors[reconstruct] = [output_error(model, dense, part) for part in (data[:16], data[16:])]
    for seen_or_not in (0, 1):
        assert errors["block"][seen_or_not] < 0.95 * min(errors[None][seen_or_not], errors["layer"][seen_or_not])
    assert len(report.blocks) == 2 and all(block.error < block.pruned_error for block in report.blocks)


def test_the_report_has_the_errors_of_the_blocks():
    """Of the last block, that of the hidden states, relative to each token's."""
    dense, model, data = build(), build(), padded(7)
    report = oneshot(model, data, fixed_mask(), passes=2)
    errors = []
    with torch.no_grad():
        for batch in data:
            for each in (dense, model):
                each.model.norm = nn.Identity()  # so that the model returns what its last block does
            ours, theirs = (
                each.model(batch["input_ids"], attention_mask=batch["attention_mask"])[0] for each in (model, dense)
            )
            error = (ours - theirs).square().sum(-1) / theirs.square().sum(-1)
            errors.append(error[batch["attention_mask"].bool()])
    assert [block.name for block in report.blocks] == ["model.layers.0", "model.layers.1"]
    assert report.blocks[1].error == pytest.approx(torch.cat(errors).mean().sqrt().item(), rel=1e-4)


def test_norms_and_biases_train_and_nothing_outside_of_blocks():
    model = zoo.build("gpt2").eval()  # whose biases are zero from the start
    before = parameters(model)
    oneshot(model, batches(), fixed_mask(), passes=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".h." not in name), name


def test_much_data_gets_fewer_passes_by_default(monkeypatch):
    monkeypatch.setattr("hf_sparse24.pruning.oneshot.STEPS", 10)
    models = {count: build() for count in (1, 4, 12)}
    for count, model in models.items():
        oneshot(model, batches(count), fixed_mask())
    assert [sparse_run(model).facts.pruning["passes"] for model in models.values()] == [8, 3, 1]


def test_half_precision_weights_gather_small_steps():
    """Each of which is less than half the distance between two numbers in bf16, and would be lost."""
    rate, model = 1e-4, build().bfloat16()
    pruned = copy.deepcopy(model)
    oneshot(pruned, batches(), fixed_mask(), criterion="magnitude", reconstruct=None)
    oneshot(
        model, batches(), fixed_mask(layers_to_transform=0), criterion="magnitude", passes=40, learning_rate=rate,
    )  # fmt: skip
    (before, after) = (each.model.layers[0].mlp.up_proj.weight for each in (pruned, model))
    assert after.dtype == torch.bfloat16
    size = before[before != 0].float().square().mean().sqrt()
    large = before.abs() > size
    assert torch.equal((before[large].float() + 4 * rate * size).bfloat16(), before[large])  # what a step cannot do
    assert (after[large] != before[large]).float().mean() > 0.1


def test_what_gains_nothing_is_undone(caplog):
    pruned, model = build(), build()
    config = fixed_mask(layers_to_transform=0)
    oneshot(pruned, batches(), config, reconstruct=None)
    (block,) = oneshot(model, batches(), config, learning_rate=0.9, passes=2).blocks
    assert block.name in caplog.text and "learning_rate" in caplog.text and block.error == block.pruned_error
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, pruned.get_parameter(name)), name


def test_a_training_that_ends_in_nan_is_undone(caplog):
    pruned, model = build(), build()
    config = fixed_mask(layers_to_transform=0)
    oneshot(pruned, batches(), config, reconstruct=None)
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, output: output * torch.nan if torch.is_grad_enabled() else None
    )
    (block,) = oneshot(model, batches(), config, passes=1).blocks
    hook.remove()
    assert "then nan" in caplog.text and block.name in caplog.text and block.error == block.pruned_error
    assert_same_state(model, pruned)


def test_a_block_that_overflows_is_refused():
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 3e5  # beyond fp16 in the last block's output
    before = snapshot(model)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"model\.layers\.1.*bf16"):
        oneshot(model, batches(), fixed_mask(), passes=1)
    assert_untouched(model, before, mode=False)
    with torch.autocast("cpu", torch.bfloat16):  # as the message says
        assert all(block.error < block.pruned_error for block in oneshot(model, batches(), fixed_mask()).blocks)


# --- what it leaves as it is ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_kept_values_change(dtype):
    """Zeros stay, and so do modes, dtypes, gradients and what needs them, and the state of the random numbers."""
    model = build().to(dtype)
    model.model.layers[0].train()
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)
    kept = model.model.layers[0].self_attn.q_proj.weight
    kept.grad = torch.ones_like(kept)
    modes = {name: module.training for name, module in model.named_modules()}
    needed = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    oneshot(model, batches(), fixed_mask(exclude_modules=["o_proj"]), passes=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and parameter.requires_grad == needed[name] and parameter.isfinite().all()
        assert parameter.grad is None or (parameter is kept and parameter.grad.eq(1).all())
    assert kept.grad is not None
    for name, weight in sparse_weights(model).items():
        assert is_nm_sparse(weight.parameter) and torch.equal(weight.pruned(), weight.parameter), name
        assert torch.equal(weight.parameter != 0, weight.mask())


@pytest.mark.parametrize("reconstruct", ["block", "layer", None])
def test_batches_of_any_length_with_and_without_masks(reconstruct):
    """They give what the same tokens give in batches that are padded to one length."""
    short, whole, masked = (padded(7)[i] for i in range(3))
    del whole["attention_mask"], whole["labels"]
    short = {"input_ids": short["input_ids"][:2, :16]}
    ids = torch.cat([short["input_ids"], torch.zeros(2, 8, dtype=torch.long)], 1)
    filled = {"input_ids": ids, "attention_mask": (torch.arange(24) < 16).expand(2, 24).long()}
    models = [build() for _ in range(2)]
    mixed, even = (
        oneshot(model, [data, whole, masked], fixed_mask(), criterion="wanda", reconstruct=reconstruct, passes=2)
        for model, data in zip(models, (short, filled))
    )
    assert {layer.tokens for layer in mixed.layers} == {2 * 16 + 4 * 24 + 2 * 16 + 2 * 24}
    assert [layer.tokens for layer in mixed.layers] == [layer.tokens for layer in even.layers]
    for one, two in zip(mixed.layers, even.layers):
        assert one.error == pytest.approx(two.error, rel=1e-3)
    assert len(mixed.blocks) == (2 if reconstruct == "block" else 0)
    for one, two in zip(mixed.blocks, even.blocks):
        assert one.error < one.pruned_error
        assert (one.pruned_error, one.error) == pytest.approx((two.pruned_error, two.error), rel=1e-3)


def test_padding_does_not_count_where_blocks_flatten_the_tokens():
    x = correlated(48, 16).float().view(4, 12, 16)
    mask = torch.ones(4, 12, dtype=torch.long).index_fill_(1, torch.arange(9, 12), 0)
    layers = [nn.Linear(16, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    reports = []
    for layer, value in zip(layers, (1.0, 50.0)):
        rows = torch.where(mask[..., None].bool(), x, value).flatten(0, 1)
        reports.append(oneshot(OneLayer(layer), [{"x": rows, "attention_mask": mask}], fixed_mask()))
    assert reports[0].blocks == reports[1].blocks
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


def test_a_token_of_nothing_does_not_outweigh_the_others():
    layer, x = nn.Linear(16, 8, bias=False), correlated(48, 16).float()
    nothing = torch.linalg.svd(layer.weight.detach())[2][-1]  # the dense layer gives 0 for it, the pruned one does not
    with_it = torch.cat([x, 3 * nothing[None]])
    found = []
    for data in (x, with_it):
        model = OneLayer(copy.deepcopy(layer))
        found.append(oneshot(model, [{"x": data}], fixed_mask()).blocks[0])
    assert found[1].pruned_error < 3 * found[0].pruned_error and found[1].error < 3 * found[0].error


def test_a_batch_of_padding_alone_changes_nothing():
    models, empty = [build(), build()], padded(7, 1)[0]
    empty["attention_mask"] = torch.zeros_like(empty["attention_mask"])
    reports = [
        oneshot(model, data, fixed_mask(), passes=2) for model, data in zip(models, (padded(7), [*padded(7), empty]))
    ]
    for one, two in zip(*(report.blocks for report in reports)):
        assert two.error < two.pruned_error and two.pruned_error == pytest.approx(one.pruned_error, rel=0.05)
    assert all(parameter.isfinite().all() for parameter in models[1].parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [0, 1])
def test_an_interrupt_in_training_restores_the_model(block, dtype):
    model = build().to(dtype)
    model.model.embed_tokens.weight.requires_grad_(False)
    needed = [parameter.requires_grad for parameter in model.parameters()]
    before, steps, changed = snapshot(model), itertools.count(), []

    def interrupt(module, *args):
        if torch.is_grad_enabled() and next(steps) == 4:
            changed.append(not torch.equal(module.weight.float(), before[f"model.layers.{block}.mlp.up_proj.weight"]))
            raise KeyboardInterrupt

    handle = model.model.layers[block].mlp.up_proj.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        oneshot(model, batches(), fixed_mask())
    handle.remove()
    assert changed == [True]
    assert_untouched(model, before, mode=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(parameter.grad is None and parameter.dtype == dtype for parameter in model.parameters())


def test_an_interrupt_while_gradients_are_on_restores_the_model(monkeypatch):
    def interrupted(step, steps):
        torch.set_grad_enabled(True)  # as where the interrupt comes when `enable_grad` ends
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_sparse24.pruning.blockwise._share_of_rate", interrupted)
    model = build()
    before = snapshot(model)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        oneshot(model, batches(), fixed_mask())
    assert_untouched(model, before, mode=False)


# --- precision ---


def test_under_autocast():
    """Weights that it has cast before, and during the training, are not used again."""
    exact, model, batch = build(), build(), zoo.batch()
    reference = oneshot(exact, batches(), fixed_mask(), passes=4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        dense = model(**batch).logits  # casts all weights, and keeps them
        report = oneshot(model, batches(), fixed_mask(), passes=4)
        found = model(**batch).logits
        assert torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(**batch).logits, found) and not torch.equal(dense, found)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for one, two in zip(reference.blocks, report.blocks):
        assert two.pruned_error == pytest.approx(one.pruned_error, rel=0.05)
        assert two.error == pytest.approx(one.error, rel=0.05)


# --- architectures ---


@pytest.mark.parametrize("name", ["gpt2", "bert", "albert", "t5"])  # Conv1D, an encoder, a shared block, both
def test_architectures(name):
    if name == "t5":
        model, data = model_kinds.build(name).eval(), [model_kinds.batch(name, seed=seed) for seed in range(3)]
    else:
        model, data = build(name), padded(7)
    report = oneshot(model, data, fixed_mask(), passes=4, learning_rate=0.02)
    assert len(report.blocks) == {"albert": 1, "t5": 4}.get(name, 2)
    assert all(block.error < block.pruned_error for block in report.blocks)
    assert report.blocks[0].error < 0.95 * report.blocks[0].pruned_error
    unpatch_model(model)
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert is_nm_sparse(module.weight, dim=0 if name == "gpt2" else 1), layer.name


class Steps(nn.Module):
    """A block that adds what a layer makes of its input."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.mlp = nn.Linear(16, 16)
        self.inner = [inner]  # not a submodule

    def forward(self, x):
        if self.inner[0] is not None:
            x = self.inner[0](x)
        return x + self.mlp(x).tanh()


class Model(nn.Module):
    def __init__(self, order: tuple[int, ...], nested: bool = False):
        super().__init__()
        torch.manual_seed(0)
        first = Steps()
        self.layers = nn.ModuleList([first, Steps(first if nested else None)])
        self.order = order

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return x


X = [{"x": correlated(32, 16, seed=seed).float()} for seed in range(3)]


def test_other_blocks_between_two_calls_of_one_block():
    model = Model((0, 1, 0))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"cannot train layers.*reconstruct='layer'"):
        oneshot(model, X, fixed_mask())
    assert_untouched(model, before)
    oneshot(model, X, fixed_mask(), reconstruct="layer")  # as the message says


def test_a_block_that_calls_another_block():
    """It does so in training too, when no pass runs."""
    model = Model((0, 1), nested=True)
    report = oneshot(model, X, fixed_mask())
    assert len(report.blocks) == 2 and all(block.error < block.pruned_error for block in report.blocks)


def test_a_shared_weight_is_trained_where_it_was_pruned():
    model = Model((0, 1))
    first, second = (layer.mlp for layer in model.layers)
    second.weight, second.bias = first.weight, None
    report = oneshot(model, X, fixed_mask())
    one, two = report.blocks
    assert [layer.name for layer in report.layers] == ["layers.0.mlp"]
    assert first.weight is second.weight and is_nm_sparse(first.weight)
    assert torch.equal(first.mask_bits, second.mask_bits)
    assert one.error < one.pruned_error and two.error == two.pruned_error


def test_a_shared_norm_is_trained_in_the_first_block_alone():
    model = Model((0, 1))
    first, second = (layer.mlp for layer in model.layers)
    second.bias = first.bias
    oneshot(model, X, fixed_mask(exclude_modules=["layers.1.mlp"]))
    expected, other = first.bias.clone(), Model((0, 1))
    other.layers[1].mlp.bias = other.layers[0].mlp.bias
    oneshot(other, X, fixed_mask())
    assert torch.equal(other.layers[0].mlp.bias, expected) and not torch.equal(
        expected, Model((0, 1)).layers[0].mlp.bias
    )


def test_a_block_that_writes_into_its_input_is_refused():
    class Writing(Steps):
        def forward(self, x):
            x += 0.1
            return super().forward(x)

    model = Model((0, 1))
    model.layers[1] = Writing()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layers.1 .*reconstruct='layer'"):
        oneshot(model, X, fixed_mask())
    assert_untouched(model, before)
    oneshot(model, X, fixed_mask(), reconstruct="layer")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["up_proj"]))
    with pytest.raises(ValueError, match="adapters"):
        oneshot(model, batches(), fixed_mask())
    oneshot(model.merge_and_unload(), batches(1), fixed_mask(), passes=1)


def test_a_batch_whose_padding_cannot_be_told_apart_is_refused():
    """Encoder and decoder sequences of one length, of which one is padded."""
    model, data = model_kinds.build("t5").eval(), model_kinds.batch("t5")
    ids = data["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    one = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    with pytest.raises(ValueError, match=r"batch 0 of data: .*padding"):
        oneshot(model, [one], fixed_mask())
    for given in ({"decoder_input_ids": ids[:, :-1]}, {"decoder_attention_mask": mask}):
        oneshot(copy.deepcopy(model), [one | given], fixed_mask(), passes=1)


def test_a_mask_counts_the_tokens_of_outputs_with_more_dimensions():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert counted([mask], torch.zeros(4, 2, 3, 8)).sum() == 4 * 3  # as Gemma 3n's blocks give them
    assert counted([mask], torch.zeros(6, 8)).tolist() == [True, True, False, True, False, False]
    assert counted([mask], torch.zeros(2, 4, 8)) is None
