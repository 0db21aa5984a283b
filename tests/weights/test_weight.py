"""SparseWeight on a plain module: a stack of experts is one weight, and each of its matrices what it would be alone."""

import copy

import pytest
import torch
import zoo
from method_runs import STEPS, every_method, loop, method_config
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, patch_model, sparse_run, sparse_weights
from hf_sparse24.layers.sparse_module import make_dense
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import SparseRun
from hf_sparse24.weights.sharding import total
from hf_sparse24.weights.sparse_weight import SparseWeight

EXPERTS, OUT, IN = 3, 16, 8
every_layout = pytest.mark.parametrize("input_dim", [-1, -2])


class Experts(nn.Module):
    """As Transformers stores them: one Parameter `[experts, out, in]`, or `[experts, in, out]` with input_dim=-2."""

    def __init__(self, stack: Tensor):
        super().__init__()
        self.up = nn.Parameter(stack.clone())


def make_stack(input_dim: int, seed: int = 0) -> Tensor:
    matrices = torch.randn(EXPERTS, OUT, IN, generator=torch.Generator().manual_seed(seed))
    return matrices if input_dim == -1 else matrices.transpose(1, 2).contiguous()


def attached(stack: Tensor, input_dim: int, method: str) -> tuple[nn.Module, SparseWeight]:
    model = Experts(stack)
    return model, SparseWeight.attach(model, "up", input_dim, SparseRun(method_config(method)))


def layers_of(stack: Tensor, input_dim: int, method: str) -> nn.Module:
    """The same matrices as patched layers of their own."""
    layers = nn.ModuleList()
    for matrix in stack:
        layer = nn.Linear(IN, OUT, bias=False) if input_dim == -1 else Conv1D(OUT, IN)
        layer.weight = nn.Parameter(matrix.clone())
        layers.append(layer)
    patch_model(layers, method_config(method))
    return layers


def assert_same_per_matrix(stack: SparseWeight, layers: nn.Module) -> None:
    pruned, mask = stack.pruned(), stack.mask()
    assert pruned.shape == mask.shape == stack.parameter.shape and mask.dtype == torch.bool
    for i, weight in enumerate(sparse_weights(layers).values()):
        assert torch.equal(stack.parameter[i], weight.parameter)
        assert torch.equal(mask[i], weight.mask())
        assert torch.equal(pruned[i], weight.pruned())
        assert torch.equal(stack.mask(packed=True)[i], weight.mask(packed=True))
        assert all(torch.equal(tensor[i], weight.state[name]) for name, tensor in stack.state.items())


@every_layout
@every_method
def test_pruned_matrix_by_matrix(method, input_dim):
    values = make_stack(input_dim)
    model, stack = attached(values, input_dim, method)
    assert sparse_weights(model) == {"up": stack} and stack.is_stack and stack.sizes == (OUT, IN)
    assert len(stack.views()) == EXPERTS
    assert_same_per_matrix(stack, layers_of(values, input_dim, method))
    pruned = stack.pruned()
    assert is_nm_sparse(pruned, dim=input_dim) and not torch.signbit(pruned[pruned == 0]).any()


@every_layout
@every_method
def test_trained_matrix_by_matrix(method, input_dim):
    """Decayed, refreshed, counted: a controller does to a stack what it does to its matrices."""
    values = make_stack(input_dim)
    model, stack = attached(values, input_dim, method)
    layers = layers_of(values, input_dim, method)
    runs = [(model, *loop(model, lr=0.1)), (layers, *loop(layers, lr=0.1))]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        gradient = torch.randn(values.shape, generator=generator)
        stack.parameter.grad = gradient.clone()
        for weight, part in zip(sparse_weights(layers).values(), gradient):
            weight.parameter.grad = part.clone()
        for _, optimizer, _ in runs:
            optimizer.step()
        assert_same_per_matrix(stack, layers)
        ours, theirs = (controller.metrics() for *_, controller in runs)
        shared = {"flip_rate", "kept_magnitude", "sparse_phase"}
        assert {name: ours.get(name) for name in shared} == pytest.approx({name: theirs.get(name) for name in shared})
    assert sparse_run(model).phase == sparse_run(layers).phase
    assert list(runs[0][2].layer_flip_rates()) in ([], ["up"])


@every_layout
@every_method
def test_saved_and_loaded(method, input_dim):
    model, stack = attached(make_stack(input_dim), input_dim, method)
    with torch.no_grad():  # state that the weights alone do not give back
        stack.parameter.add_(torch.randn(stack.parameter.shape))
    names = [f"{name}_of_up" for name in (*stack.state, *stack.parameters)]
    assert set(model.state_dict()) == {"up", *names}
    other, loaded = attached(make_stack(input_dim, seed=1), input_dim, method)
    other.load_state_dict(model.state_dict())
    assert torch.equal(loaded.pruned(), stack.pruned()) and torch.equal(loaded.mask(), stack.mask())
    twin = copy.deepcopy(model)
    (copied,) = sparse_weights(twin).values()
    assert copied.module is twin and copied.parameter is not stack.parameter
    assert torch.equal(copied.pruned(), stack.pruned())


@every_method
def test_attached_and_detached(method):
    model, stack = attached(make_stack(-1), -1, method)
    assert sparse_run(model) is stack.run
    make_dense(stack)
    assert not sparse_weights(model) and list(model.state_dict()) == ["up"] and "sparse24" not in vars(model)
    assert torch.equal(model.up, make_stack(-1))


def test_views_have_the_names_of_layers():
    model = zoo.build("gpt_oss")
    patch_model(model, Sparse24Config(method="ste", target_modules=["gate_up_proj", "o_proj"], layers_to_transform=1))
    layer = "model.layers.1"
    names = [view.name for weight in sparse_weights(copy.deepcopy(model)).values() for view in weight.views()]
    assert names == [f"{layer}.self_attn.o_proj", *(f"{layer}.mlp.experts.gate_up_proj[{i}]" for i in range(4))]


@pytest.mark.parametrize(("name", "parts"), [("llama", "mlp"), ("gpt_oss", "mlp.experts")])
def test_layers_of_other_names_share_a_compiled_graph(name, parts):
    model = zoo.build(name)
    layers = [layer.get_submodule(parts) for layer in model.model.layers]
    stacks = [key for key, parameter in model.named_parameters() if parameter.dim() == 3]
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules=stacks or "mlp"))
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for layer in layers:
            layer.compile(backend="eager", fullgraph=True)
        model(**zoo.batch())


def test_sums_over_weights_on_several_devices():
    weights = [torch.ones(4, device="meta"), torch.ones(4)]
    assert total([weight.sum() for weight in weights], weights).device.type == "meta"  # of the first one


def test_two_weights_of_one_module_keep_their_state_apart():
    """As gate, up and down of stacked experts stand in one module. State of `weight` has the short names."""
    run = SparseRun(Sparse24Config())
    model = Experts(make_stack(-1))
    model.weight = nn.Parameter(torch.randn(OUT, IN))
    weights = [SparseWeight.attach(model, name, -1, run) for name in ("up", "weight")]
    assert list(model.state_dict()) == ["up", "weight", "scale_of_up", "scale"]
    assert list(sparse_weights(model)) == ["up", "weight"]
    assert weights[0].state["scale"].shape == (EXPERTS,) and weights[1].state["scale"].shape == ()
    make_dense(weights[0])
    assert list(model.state_dict()) == ["up", "weight", "scale"] and list(sparse_weights(model)) == ["weight"]
