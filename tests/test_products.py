"""Sparse products in models, on a CPU stand-in for the library: right numbers, packed once, never stale."""

import copy
import pickle

import cslt
import pytest
import sparse24_kernels as kernels
import torch
import zoo
from cslt import counting_stand_in, stand_in  # noqa: F401 (fixtures)
from sparse24_kernels import backends, cusparselt
from sparse24_kernels.layout import learn_layout
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, Sparse24Controller, drop_master_weights, patch_model, unpatch_model
from hf_sparse24.methods import METHODS as METHODS_BY_NAME
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.patching import set_phase, sparse_layers

METHODS = ["ste", "s-ste", "t-sr-ste"]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 16, bias=False)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def model_of(method: str, backend: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear", backend=backend))
    return model


def train(model: nn.Module, tokens: int = 32, steps: int = 3, micro_batches: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = Sparse24Controller(model, optimizer, total_steps=100)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(2, tokens // 2, 32, generator=generator).bfloat16()
            model(x).float().square().mean().backward()
            controller.after_micro_step()
        controller.before_step()
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("tokens", [32, 34])
@pytest.mark.parametrize("method", METHODS)
def test_training_by_sparse_products_equals_dense_math(stand_in, method, tokens):  # noqa: F811
    sparse, reference = train(model_of(method), tokens), train(model_of(method, "reference"), tokens)
    for ours, theirs in zip(sparse, reference):
        assert torch.equal(ours, theirs)
    by_shape = {(m, k, transposed) for m, _, k, _, transposed in stand_in.products}
    assert {(48, 32, True), (16, 48, True)} <= by_shape  # output
    assert ((48, 16, True) in by_shape) == (method == "t-sr-ste")  # grad_input of the second layer
    assert (32, 48, True) not in by_shape  # nobody asks for that of the first
    assert any(not transposed for *_, transposed in by_shape) == (method != "ste" and tokens == 32)  # grad_weight


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_packed_once_per_optimizer_step(counting_stand_in, method):  # noqa: F811
    steps, micro_batches, layers = 3, 4, 2
    forms = 3 if method == "t-sr-ste" else 2  # of both layers; the first one's input needs no gradient
    gradients = 0 if method == "ste" else steps * micro_batches * layers
    train(model_of(method), steps=steps, micro_batches=micro_batches)
    assert counting_stand_in.compressed == steps * forms + gradients


def test_recomputation_reuses_them_and_inference_does_not(counting_stand_in):  # noqa: F811
    model = model_of("t-sr-ste")
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert counting_stand_in.compressed == 4 + 2  # both directions of two layers, two gradients
    with torch.no_grad():  # here anything could have changed the weights unseen, so nothing is reused
        for i in range(3):
            model(x)
            assert counting_stand_in.compressed == 6 + 2 * (i + 1)


def changes():
    def step_behind_the_version_counter(model):
        class Optimizer(torch.optim.Optimizer):
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.mul_(2)  # `.data` has a version counter of its own

        Optimizer(model.parameters(), {}).step()

    def load(model):
        model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})

    def in_place(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)

    def replace(model):
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data

    def cast(model):
        model.float().bfloat16()
        in_place(model)

    def state(model):
        for layer in sparse_layers(model).values():
            layer.scale.mul_(2)

    return [step_behind_the_version_counter, load, in_place, replace, cast, state]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_change_goes_unseen(stand_in, change, backend):  # noqa: F811
    model = model_of("s-ste", backend)
    x = torch.randn(16, 32).bfloat16()
    before = model(x)
    assert torch.equal(model(x), before) and model.layers[0].operands.nbytes()
    change(model)
    after = model(x)
    expected = copy.deepcopy(model)(x)  # a copy remembers nothing
    assert torch.equal(after, expected) and not torch.equal(after, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writing_behind_the_back_around_evaluations(stand_in, mode):  # noqa: F811
    """As averaged weights are swapped in, or adapters merged: through `.data`, without a sign."""
    model, x = model_of("ste"), torch.randn(16, 32).bfloat16()
    trained = model(x)
    with mode():
        before = model(x)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        assert not torch.equal(model(x), before)
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        assert torch.equal(model(x), before)
    assert torch.equal(model(x), trained)


def test_reassigned_data_at_a_recycled_address(stand_in):  # noqa: F811
    model, x = model_of("ste"), torch.randn(16, 32).bfloat16()
    for _ in range(20):
        before = model(x)
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
            parameter.data = parameter.data / 4
        assert not torch.equal(model(x), before)


def test_weights_of_inference_mode():
    with torch.inference_mode():
        model, x = model_of("ste", "reference"), torch.randn(16, 32).bfloat16()
        before = model(x)
        for parameter in model.parameters():
            parameter.mul_(2)
        assert not torch.equal(model(x), before)


def test_operands_of_different_dtypes_are_refused(stand_in):  # noqa: F811
    model = model_of("ste")
    for x in (torch.randn(16, 32), torch.randn(16, 32).half()):
        with pytest.raises(RuntimeError, match="operands of one dtype"):
            model.layers[0](x)


def test_one_token_and_operands_at_odd_addresses(stand_in):  # noqa: F811
    matrix = kernels.nm_prune(torch.randn(32, 48)).bfloat16()
    compressed, algorithm = kernels.compress(matrix), cusparselt.Algorithm(1)
    x = torch.randn(1, 48).bfloat16()
    result = kernels.sparse_linear(x, compressed, algorithm=algorithm)
    torch.testing.assert_close(result, nn.functional.linear(x, matrix))
    storage = torch.randn(16 * 48 + 1).bfloat16()
    x, bias = storage[1:].view(16, 48), torch.randn(64).bfloat16()[::2]
    result = kernels.sparse_linear(x, compressed, bias, algorithm=algorithm)
    torch.testing.assert_close(result, nn.functional.linear(x, matrix, bias))


def test_training_after_inference_mode(stand_in):  # noqa: F811
    model, x = model_of("t-sr-ste"), torch.randn(16, 32).bfloat16()
    with torch.inference_mode():
        before = model(x)
    after = model(x)
    after.sum().backward()
    assert torch.equal(after, before)


def test_a_copy_and_a_pickle_carry_no_operands(stand_in):  # noqa: F811
    model = model_of("ste")
    model(torch.randn(16, 32).bfloat16())
    layer = model.layers[0]
    assert layer.operands.nbytes() > 0
    assert copy.deepcopy(model).layers[0].operands.nbytes() == 0
    assert layer._replicate_for_data_parallel().operands.nbytes() == 0
    assert pickle.loads(pickle.dumps(layer.operands)).nbytes() == 0
    layer.operands.clear()
    assert layer.operands.nbytes() == 0


def test_memory_of_a_layer_whose_products_are_all_sparse(stand_in):  # noqa: F811
    model = model_of("t-sr-ste")
    model(torch.randn(16, 32).bfloat16().requires_grad_())
    layer = model.layers[0]
    assert layer.operands.nbytes() == 2 * 9 / 16 * layer.weight.numel() * 2  # W and its transpose, nothing dense


def test_dropped_master_weights(stand_in, tmp_path):  # noqa: F811
    model = zoo.build("llama").bfloat16()
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    ids = torch.randint(0, zoo.VOCAB, (2, 8))
    with torch.no_grad():
        before, state = model(ids).logits, copy.deepcopy(model.state_dict())
        sizes = sum(layer.weight.nbytes for layer in sparse_layers(model).values())
        assert drop_master_weights(model) == sizes * 7 / 16
        assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids[:1, :1]).logits.isfinite(), torch.ones(1, 1, zoo.VOCAB, dtype=torch.bool))
    for forbidden in (
        lambda: model(ids, labels=ids).loss.backward(),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.float(),
        lambda: unpatch_model(model),
        lambda: unpatch_model(model, sparse=False),
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state, assign=True),
        lambda: torch.save(model, tmp_path / "model"),
        lambda: set_phase(model, "dense"),
    ):
        with pytest.raises(RuntimeError, match="master weight was dropped"):
            forbidden()
    with torch.no_grad():
        assert torch.equal(model.to("cpu")(ids).logits, before)  # where it is already
        assert torch.equal(copy.deepcopy(model)(ids).logits, before)
    with pytest.raises(ValueError, match=r"no weight can be dropped: .*: dropped already"):
        drop_master_weights(model)


def test_what_cannot_drop_its_master_weights(stand_in):  # noqa: F811
    model = Mlp()
    with pytest.raises(ValueError, match="not patched"):
        drop_master_weights(model)
    patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"layers\.0: the sparse products run in bf16 and fp16, not torch.float32"):
        drop_master_weights(model)
    set_phase(model, "dense")
    with pytest.raises(ValueError, match="dense phase"):
        drop_master_weights(model)


def test_compiled_in_one_graph(stand_in):  # noqa: F811
    x = torch.randn(48, 32).bfloat16()
    for method in METHODS:
        torch._dynamo.reset()
        model, eager = model_of(method), model_of(method)
        for layer in (*model.layers, *eager.layers):
            layer.rng_key = torch.tensor(5)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for tokens in (32, 16, 48):  # another number of tokens is another plan
            for run in (compiled, eager):
                run(x[:tokens]).float().square().mean().backward()
            for ours, theirs in zip(model.parameters(), eager.parameters()):
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_cannot_be_sparse_is_dense_and_says_why(stand_in):  # noqa: F811
    device = torch.device("cpu")
    problem = cusparselt.Problem(48, 32, 32, torch.bfloat16, True, True)
    assert backends.choose_product("auto", problem, device) == (cusparselt.Algorithm(3), "measured")
    for change, reason in (
        ({"m": 40}, "cuSPARSELt needs multiples of 16, not 40 x 32"),
        ({"k": 8}, "cuSPARSELt needs multiples of 16, not 48 x 8"),
        ({"dtype": torch.float32}, "the sparse products run in bf16 and fp16, not torch.float32"),
    ):
        assert backends.choose_product("auto", problem._replace(**change), device) == (None, reason)
    assert backends.choose_product("reference", problem, device).reason == "requested"
    x = torch.randn(16, 24).bfloat16()
    odd = nn.ModuleList([nn.Linear(24, 20)]).bfloat16()
    patch_model(odd, Sparse24Config(method="ste", target_modules="all-linear"))
    assert odd[0](x).shape == (16, 20) and not stand_in.products


def test_without_the_library(monkeypatch):
    device = torch.device("cpu")
    assert backends.choose_backend("auto", device) == ("reference", "cuSPARSELt needs a CUDA device, not cpu")
    with pytest.raises(ValueError, match="backend='cusparselt': cuSPARSELt needs a CUDA device, not cpu; use 'auto'"):
        kernels.plan_linear(16, 16, 16, torch.bfloat16, device, "cusparselt")
    with pytest.raises(ValueError, match="backend='cutlass' is not available"):
        kernels.plan_mm(16, 16, 16, torch.bfloat16, device, "cutlass")


def test_operators(stand_in):  # noqa: F811
    matrix = kernels.nm_prune(torch.randn(32, 48)).bfloat16()
    compressed = kernels.compress(matrix)
    assert compressed.shape == (32, 27)
    torch.library.opcheck(torch.ops.sparse24.cslt_compress.default, (matrix,))
    x, bias = torch.randn(20, 48).bfloat16(), torch.randn(32).bfloat16()
    algorithm = cusparselt.Algorithm(1)
    result = kernels.sparse_linear(x.view(4, 5, 48), compressed, bias, algorithm=algorithm)
    assert torch.equal(result, nn.functional.linear(x, matrix, bias).view(4, 5, 32)) and result.is_contiguous()
    for dense in (x.t(), x.t().contiguous(), torch.randn(48, 40).bfloat16()[:, ::2]):  # any strides
        result = kernels.sparse_mm(compressed, dense, algorithm=algorithm)
        torch.testing.assert_close(result, matrix @ dense)
        arguments = (compressed, dense, None, False, 1, 1, -1)
        torch.library.opcheck(torch.ops.sparse24.cslt_mm.default, arguments)
    assert kernels.sparse_linear(x[:0], compressed, algorithm=algorithm).shape == (0, 32)
    with pytest.raises(ValueError, match="compressed 32 x 27 is no matrix of 32 x 64"):
        kernels.sparse_linear(torch.randn(20, 64).bfloat16(), compressed, algorithm=algorithm)
    with pytest.raises(ValueError, match="compress: no compressed form: cuSPARSELt needs multiples of 16, not 10 x 16"):
        kernels.compress(torch.randn(10, 16).bfloat16())


@pytest.mark.parametrize("library", [{"padding": 3}, {"flat": True}])
@pytest.mark.parametrize("compiled", [False, True])
def test_padded_matrices_and_those_of_older_releases(monkeypatch, library, compiled):
    cslt.install(monkeypatch, cslt.StandIn(**library))
    model, reference = model_of("t-sr-ste"), model_of("t-sr-ste", "reference")
    for layer in (*model.layers, *reference.layers):
        layer.rng_key = torch.tensor(7)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = torch.randn(32, 32).bfloat16()
    forward(x).sum().backward()
    reference(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


def test_releases_that_make_no_room_for_padding_take_sizes_that_have_none(monkeypatch):
    monkeypatch.setattr(cusparselt, "_sizes_are_the_librarys", lambda: False)
    assert "multiples of 128, not 64 x 256" in cusparselt.why_not_matrix(64, 256, torch.bfloat16)
    assert cusparselt.why_not_matrix(128, 256, torch.bfloat16) is None


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("name", METHODS_BY_NAME)
def test_every_method_gives_every_form(stand_in, name, conv1d):  # noqa: F811
    layer = Conv1D(48, 32) if conv1d else nn.Linear(32, 48)
    layer.bfloat16()
    with torch.no_grad():
        layer.weight.normal_()
    patch_model(nn.ModuleList([layer]), Sparse24Config(method=name, target_modules="all-linear"))
    forms = ["dense", "compressed"] + ["compressed-transposed"] * layer.method.transposable
    for learn in (False, True):
        if learn:
            for size in ((48, 32), (32, 48)):
                learn_layout(*size, torch.bfloat16, torch.device("cpu"))
        dense, *compressed = layer.operands_of(forms, torch.bfloat16)
        assert dense.shape == (48, 32) and is_nm_sparse(dense)
        for ours, matrix in zip(compressed, (dense, dense.t())):
            x = torch.randn(16, matrix.shape[1]).bfloat16()
            product = kernels.sparse_linear(x, ours, algorithm=cusparselt.Algorithm())
            assert torch.equal(product, nn.functional.linear(x, matrix))


def test_both_signatures_of_split_k(monkeypatch):
    assert cusparselt._split_k_arguments(1, -1) == {}
    monkeypatch.setattr(cusparselt, "_split_k_argument_names", lambda: frozenset({"split_k", "split_k_mode"}))
    assert cusparselt._split_k_arguments(4, 1) == {"split_k": 4, "split_k_mode": 1}
    monkeypatch.setattr(cusparselt, "_split_k_argument_names", lambda: frozenset({"split_k", "split_k_one_kernel"}))
    assert cusparselt._split_k_arguments(4, 0) == {"split_k": 4, "split_k_one_kernel": True}
