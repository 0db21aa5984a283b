"""oneshot with masks that are N:M both ways, against all 90 masks of a tile, and training with them."""

from itertools import combinations, product

import pytest
import torch
import zoo
from oneshot_models import OneLayer, batches
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Controller, oneshot, patch_model, sparse_weights
from hf_sparse24.metrics import is_nm_sparse

ROWS = [torch.tensor([i in kept for i in range(4)]) for kept in combinations(range(4), 2)]
TILES = [torch.stack(rows) for rows in product(ROWS, repeat=4) if (torch.stack(rows).sum(0) == 2).all()]
CONFIGS = {
    "t-sr-ste": Sparse24Config(method="t-sr-ste", mask_interval=10**6, masked_decay=0, dense_tail=0),
    "slope": Sparse24Config(method="slope", initial_mask="transposable"),
}


def pruned(x: torch.Tensor, weight: torch.Tensor, method="slope", **arguments):
    """The layer after oneshot, with its mask and the report of it."""
    layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    config = CONFIGS[method].replace(target_modules="all-linear")
    report = oneshot(OneLayer(layer), [{"x": x}], config, damping=0.0, **arguments).layers[0]
    return layer.weight, layer.sparse24["weight"].mask(), report


def least_error(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> float:
    """||X W^T - X V^T||^2 of the best V on a mask."""
    error = 0.0
    for row, kept in zip(weight, mask):
        best = torch.linalg.lstsq(x[:, kept], x @ row).solution
        error += (x @ row - x[:, kept] @ best).square().sum().item()
    return error


def orthogonal(tokens: int, inputs: int) -> torch.Tensor:
    """Inputs with a diagonal Gram matrix: tiles are independent, and dropping a weight costs its score's square."""
    return torch.linalg.qr(torch.randn(tokens, inputs, dtype=torch.float64)).Q * torch.randn(inputs).exp()


def test_there_are_90_masks():
    assert len(TILES) == 90


@pytest.mark.parametrize("reconstruct", [None, "layer"])
@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("method", CONFIGS)
def test_the_mask_is_the_best_of_the_layers_problem(method, criterion, reconstruct):
    x, weight = orthogonal(40, 16), torch.randn(8, 16, dtype=torch.float64)
    _, mask, report = pruned(x, weight, method, criterion=criterion, reconstruct=reconstruct)
    total = 0.0
    for top, left in product(range(0, 8, 4), range(0, 16, 4)):
        part, inputs = weight[top : top + 4, left : left + 4], x[:, left : left + 4]
        errors = [least_error(inputs, part, tile) for tile in TILES]
        assert torch.equal(mask[top : top + 4, left : left + 4], TILES[errors.index(min(errors))])
        total += min(errors)
    assert report.error == pytest.approx(total**0.5 / torch.linalg.norm(x @ weight.T).item(), rel=1e-6)


def test_magnitude_keeps_the_mask_of_patch_model():
    """T-SR-STE's own: the largest L1 norm."""
    weight = torch.randn(8, 16, dtype=torch.float64)
    for method in CONFIGS:
        _, mask, _ = pruned(orthogonal(40, 16), weight, method, criterion="magnitude", reconstruct=None)
        for top, left in product(range(0, 8, 4), range(0, 16, 4)):
            part = weight[top : top + 4, left : left + 4].abs()
            best = max(TILES, key=lambda tile: part[tile].sum())
            assert torch.equal(mask[top : top + 4, left : left + 4], best)


@pytest.mark.parametrize("reconstruct", ["block", "layer", None])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # linear layers, and Conv1D
@pytest.mark.parametrize("method", CONFIGS)
def test_a_kept_mask_trains_with_both_gemms_sparse(method, name, reconstruct):
    model = zoo.build(name)
    oneshot(model, batches(), CONFIGS[method], reconstruct=reconstruct, passes=1)
    masks = {key: weight.mask() for key, weight in sparse_weights(model).items()}
    for key, weight in sparse_weights(model).items():
        assert weight.method.check_state(weight.views()[0]) is None
        assert not weight.parameter[~masks[key]].any()
        assert all((counts == 2).all() for counts in kept_in_groups(masks[key]))
        assert weight.method.gemms.output.sparse == weight.method.gemms.grad_input.sparse == "weight"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    losses = []
    for _ in range(4):
        loss = model(**zoo.batch(0)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and controller.metrics()["sparse_phase"] == 1
    for key, weight in sparse_weights(model).items():
        assert torch.equal(weight.mask(), masks[key])
        (view,), used = weight.views(), weight.pruned()
        assert all(is_nm_sparse(used, dim=dim) for dim in (0, 1))
        if method == "slope":  # the second mask drops nothing
            assert torch.equal(weight.method.prune_grad_input(view).values, used)


def kept_in_groups(mask: torch.Tensor, m: int = 4) -> list[torch.Tensor]:
    return [mask.unflatten(dim, (-1, m)).sum(dim + 1) for dim in (0, 1)]


def test_slope_patched_with_a_transposable_mask():
    config, plain = CONFIGS["slope"], Sparse24Config(method="slope")
    models = [zoo.build("llama"), zoo.build("llama")]
    patch_model(models[0], config), patch_model(models[1], plain)
    for ours, rows in zip(*(sparse_weights(model).values() for model in models)):
        assert all((counts == 2).all() for counts in kept_in_groups(ours.mask()))
        assert not (kept_in_groups(rows.mask())[0] == 2).all()
        ours.set_state({"mask_bits": rows.state["mask_bits"]})
        assert "along the output dimension" in ours.method.check_state(ours.views()[0])
