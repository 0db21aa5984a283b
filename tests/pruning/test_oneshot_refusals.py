"""What oneshot refuses, and that a model is untouched after an error or an interrupt."""

import itertools

import pytest
import torch
import zoo
from oneshot_models import LAYERWISE, OneLayer, assert_untouched, batches, fixed_mask
from sparse_models import assert_same_state, snapshot
from torch import nn

from hf_sparse24 import Sparse24Config, oneshot, sparse_weights


class HalfUsed(OneLayer):
    """Its second block is never run."""

    def __init__(self):
        super().__init__(nn.Linear(16, 8))
        self.blocks.append(nn.ModuleDict({"mlp": nn.Linear(16, 8)}))


X = torch.ones(3, 16)


@pytest.mark.parametrize(
    ("make", "data", "arguments", "message"),
    [
        (None, [], {}, "data has no batches"),
        (None, [[1, 2]], {}, "batch 0 of data is <class 'list'>: must be a dict of tensors"),
        (None, [zoo.batch(), {"input_ids": [1, 2]}], {}, "batch 1 of data is {'input_ids': 'list'}: must be a dict"),
        (None, batches(1), {"criterion": "best"}, r"criterion='best': must be one of \['magnitude', 'wanda'"),
        (None, batches(1), {"reconstruct": True}, r"reconstruct=True: must be one of \['block', 'layer', None\]"),
        (None, list(zoo.batch()["input_ids"]), {}, r"batch 0 of data: input_ids are \[12\], must be"),
        (None, batches(1), {"passes": 0}, "passes=0: must be"),
        (None, batches(1), {"passes": 1.5}, "passes=1.5: must be"),
        (None, batches(1), {"learning_rate": 2}, "learning_rate=2: must be"),
        (None, batches(1), {"learning_rate": "0.1"}, "learning_rate='0.1': must be"),
        (None, batches(1), {"values": "int4"}, r"values='int4': must be one of \['float', 'int8'\]"),
        (None, batches(1), {"damping": float("nan")}, "damping=nan: must be"),
        (None, batches(1), {"calibrate_all_experts": True}, "calibrate_all_experts=True: no stack of experts"),
        (None, batches(1), {"config": "fixed-mask"}, "config='fixed-mask': must be"),
        (None, batches(1), {"config": Sparse24Config()}, "method='s-ste'"),
        (None, batches(1), {"config": fixed_mask(dense_start=5)}, "dense_start=5"),
        (None, batches(1), {"config": fixed_mask(target_modules=["nope"])}, "no linear layer's name ends in"),
        (HalfUsed, [{"x": X}], {}, "no calibration tokens reach 1 layers, such as blocks.1.mlp:"),
        (None, [{**zoo.batch(), "attention_mask": torch.zeros(2, 12)}], {}, "no calibration tokens reach 7 layers"),
        (lambda: OneLayer(nn.Linear(15, 8)), [{"x": X[:, 1:]}], {"values": "int8", "config": fixed_mask(pattern="3:5")},
         r"values='int8': no sparse weight has a packed form, such as blocks.0.mlp \(M of a packed 3:5 must divide 64"),
        (lambda: OneLayer(nn.Linear(16, 8)), [{"x": X * torch.nan}], {}, "NaN or inf in the inputs of blocks.0.mlp"),
        (lambda: OneLayer(nn.Linear(16, 8, device="meta")), [{"x": X}], {}, "blocks.0.mlp has no weight yet"),
    ],
)  # fmt: skip
def test_refused_and_untouched(make, data, arguments, message):
    model = (make or (lambda: zoo.build("llama")))()
    meta = any(parameter.is_meta for parameter in model.parameters())
    before = {} if meta else snapshot(model)
    with pytest.raises(ValueError, match=message):
        oneshot(model, data, **{"config": fixed_mask(), **arguments})
    if not meta:
        assert_untouched(model, before)


class SentenceTransformer(nn.Sequential):
    """Its forward takes a dict, as that of sentence-transformers."""

    def forward(self, input, **kwargs):
        return self[0].auto_model(**input)


def test_a_wrapper_that_is_called_otherwise_is_refused_and_the_model_inside_is_pruned():
    transformer = nn.Module()
    transformer.auto_model = zoo.build("bert")
    model = SentenceTransformer(transformer)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"SentenceTransformer .*input_ids"):
        oneshot(model, batches(1), fixed_mask())
    assert_untouched(model, before)
    oneshot(model[0].auto_model, batches(1), fixed_mask(), reconstruct=None)
    assert sparse_weights(model)


def test_a_patched_model_is_refused_and_stays_patched():
    model = zoo.build("llama")
    oneshot(model, batches(1), fixed_mask(), reconstruct=None)
    before = snapshot(model)
    with pytest.raises(ValueError, match="unpatch_model"):
        oneshot(model, batches(1), fixed_mask())
    assert_same_state(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_an_interrupted_run_restores_the_model(name, error):
    """Whenever it comes: in the survey, before anything is pruned, when one block is. An error in the trial of replay
    becomes a ValueError that says that the model cannot be pruned block by block."""
    model = zoo.build(name).eval()
    before, data = snapshot(model), batches(1)

    def interrupted_at(call: int) -> bool:
        counter = itertools.count(1)

        def interrupt(module, *args):
            if next(counter) == call:
                raise error("stop")

        attention = next(module for module in model.modules() if module.__class__.__name__.endswith("Attention"))
        handle = attention.register_forward_hook(interrupt)
        try:
            oneshot(model, data, fixed_mask(), **LAYERWISE)
        except (error, ValueError) as raised:
            assert (type(raised) is error) == (error is KeyboardInterrupt or call != 2)
            return True
        finally:
            handle.remove()
        return False

    # The survey, the trial, the first block's pass, the second's, when the first is pruned.
    for call in (1, 2, 3, 4):
        assert interrupted_at(call)
        assert_untouched(model, before, mode=False)
    assert not interrupted_at(5) and sparse_weights(model)
