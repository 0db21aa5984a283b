"""oneshot replays finished blocks: the work is linear in depth, and the results are those of whole forward passes."""

import model_kinds
import pytest
import torch
import zoo
from oneshot_models import LAYERWISE, fixed_mask
from sparse_models import assert_same_state, snapshot
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_sparse24 import oneshot
from hf_sparse24.pruning.replay import Replay
from hf_sparse24.pruning.statistics import Gram

CONFIG = fixed_mask()


def batches(count: int = 3, **more: int) -> list[dict[str, torch.Tensor]]:
    """With padding, and with ids of that length for every name in `more`."""
    found = []
    for seed in range(count):
        ids = zoo.batch(seed=seed, rows=2, length=16)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0
        found.append({"input_ids": ids, "attention_mask": mask} | {name: ids[:, :n] for name, n in more.items()})
    return found


def from_config(auto_class, name: str, **fields) -> nn.Module:
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model(name, vocab_size=zoo.VOCAB, **fields))


def funnel() -> nn.Module:
    """Pools between blocks, and its decoder reads the output of the first of them."""
    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    return from_config(AutoModelForMaskedLM, "funnel", block_sizes=[2, 2, 1], num_decoder_layers=2, **sizes)


def gemma4() -> nn.Module:
    """Inputs of their own for every block, two kinds of masks, and keys and values of earlier blocks in a dict."""
    return from_config(
        AutoModelForCausalLM, "gemma4_text", vocab_size_per_layer_input=zoo.VOCAB, hidden_size=32,
        hidden_size_per_layer_input=8, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, global_head_dim=8, num_kv_shared_layers=2, sliding_window=8, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip


class Block(nn.Module):
    """Writes into its input, returns a dict, and counts how often it computes."""

    def __init__(self, size: int):
        super().__init__()
        self.mlp = nn.Linear(size, size)
        self.computed = 0

    def forward(self, h, *, scale):
        self.computed += 1
        h += 0.1
        return {"h": torch.tanh(self.mlp(h)) * scale, "passed": (h, None)}


class Odd(nn.Module):
    """Its blocks take turns, some of them run twice, and the model adds, scales and shifts between and around them."""

    def __init__(self, depth: int = 4, size: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(size) for _ in range(depth)])
        self.shift = nn.Parameter(torch.randn(size))

    def order(self):
        blocks = list(self.blocks)
        return [blocks[0], blocks[2], blocks[1], blocks[2], *blocks[3:], blocks[0]]

    def forward(self, x, extra=None):
        h, first = x.clone(), None
        for i, block in enumerate(self.order()):
            out = block(h, scale=self.shift)
            h = out["h"] + out["passed"][0] * i
            first = h.clone() if first is None else first
            h += first * self.shift
        return h


class Chain(Odd):
    """Every block once."""

    def order(self):
        return list(self.blocks)


class Noting(Block):
    """The first one of a pass leaves a note for the others, which is no argument and no output."""

    def __init__(self, size: int, notes: dict):
        super().__init__(size)
        self.notes = notes

    def forward(self, h, *, scale):
        return super().forward(h * self.notes.setdefault("mean", h.mean()), scale=scale)


class Secretive(Chain):
    def __init__(self):
        super().__init__()
        self.notes: dict = {}
        self.blocks = nn.ModuleList([Noting(16, self.notes) for _ in range(3)])

    def forward(self, x):
        self.notes.clear()
        return super().forward(x)


class InParts(Chain):
    """It runs what is in its blocks, and not the blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block.mlp(x))
        return x


class TwoTowers(nn.Module):
    """The second one runs for batches that have an input for it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Chain(), Chain()

    def forward(self, x, y=None):
        x = self.one(x)
        return x if y is None else x.mean() + self.two(y)


class DeeperForLongInputs(Chain):
    def forward(self, x):
        return super().forward(self.blocks[0](x, scale=1.0)["h"] if len(x) > 20 else x)


def x_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))} for seed in range(count)]


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


CASES = {
    "llama": (lambda: zoo.build("llama", num_hidden_layers=4), batches, 1),
    "albert": (lambda: zoo.build("albert", num_hidden_layers=3), batches, 1),
    "t5": (lambda: model_kinds.build("t5", num_layers=3), lambda: batches(decoder_input_ids=10), 2),
    "funnel": (funnel, batches, 2),
    "gemma4": (gemma4, batches, 3),
    "chain": (Chain, x_batches, 2),
    "odd": (Odd, x_batches, 2),
}
"""A model, its data, and how many outputs of a batch it takes at most: one, where blocks only feed the next one."""


def in_whole_passes(monkeypatch) -> None:
    """Let every pass of a batch compute all blocks up to the one to calibrate."""
    run = Replay.run
    monkeypatch.setattr(Replay, "run", lambda self, batch, course, effects, *more: run(self, batch, course, [], *more))


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_whole_passes(name, monkeypatch):
    build, data, most = CASES[name]
    kept, run = [], Replay.run

    def counting_run(self, batch, course, effects, *more):
        result = run(self, batch, course, effects, *more)
        kept.append(sum(any(tensor.is_contiguous() for tensor in tensors(effect)) for effect in effects))
        return result

    monkeypatch.setattr(Replay, "run", counting_run)
    replayed, whole = build(), build()
    report = oneshot(replayed, data(), CONFIG, **LAYERWISE)
    assert max(kept) == most
    in_whole_passes(monkeypatch)
    assert oneshot(whole, data(), CONFIG, **LAYERWISE).layers == report.layers
    assert_same_state(replayed, whole)


@pytest.mark.parametrize("depth", [4, 12])
def test_a_block_computes_twice_per_batch_however_deep_the_model_is(depth):
    """Dense, to be calibrated, and pruned, for the next one; and twice for one batch before, to see what is run."""
    model = Chain(depth)
    oneshot(model, x_batches(5), CONFIG, **LAYERWISE)
    assert [block.computed for block in model.blocks] == [2 + 2 * 5] * (depth - 1) + [2 + 5]


def test_no_cache_for_generation_is_made():
    model, caches = zoo.build("llama"), []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs["past_key_values"]), with_kwargs=True
    )
    oneshot(model, batches(1), CONFIG, passes=1)
    assert set(caches) == {None} and model.config.use_cache


def test_layers_with_the_same_input_share_its_gram_matrix(monkeypatch):
    sizes, summary = [], Gram.summary
    monkeypatch.setattr(Gram, "summary", lambda self, rows: sizes.append(rows.shape[1]) or summary(self, rows))
    oneshot(zoo.build("llama"), batches(1), CONFIG, **LAYERWISE)
    assert sizes == [32, 32, 32, 64] * 2  # query, key and value; the attention's output; gate and up; down


@pytest.mark.parametrize(
    ("build", "reason"), [(Secretive, r"model block by block: blocks\.1 differs"), (InParts, "no calibration tokens")]
)
def test_what_cannot_be_replayed_is_refused(build, reason):
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError, match=reason):
        oneshot(model, x_batches(), CONFIG)
    assert_same_state(model, before)


def test_kinds_of_batches_may_run_different_blocks():
    x, y = (batch["x"] for batch in x_batches(2))
    report = oneshot(TwoTowers(), [{"x": x}, {"x": x, "y": y}, {"x": y}], CONFIG, reconstruct="layer")
    assert [layer.tokens for layer in report.layers] == [36] * 4 + [12] * 4


def test_batches_of_a_kind_must_run_the_same_blocks():
    data = [*x_batches(1), {"x": torch.randn(24, 16)}]
    with pytest.raises(ValueError, match=r"blocks\.0 is number 1 "):
        oneshot(DeeperForLongInputs(), data, CONFIG, reconstruct="layer")
