"""Pruning by magnitude, by a mask, or by S-STE's soft threshold, in dense, packed and compressed forms."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import reference
from .checks import (
    check_device,
    check_dim,
    check_floating,
    check_groups,
    check_is,
    check_mask,
    check_matrix,
    check_one_of,
    check_pattern,
    check_result,
    check_scalar,
)
from .dispatch import implementation
from .formats import Compression, Packed, Pattern, empty_compressed, empty_packed, unpadded_columns
from .gemm import cusparselt
from .gemm.backend import encode_dense
from .gemm.layout import layout_of

RULES = ("magnitude", "mask", "soft-threshold")
COMPRESSED = {"compressed": "dense", "compressed-transposed": "transposed"}
"""Compressed forms, and the dense form that the library compresses for each."""
FORMS = ("dense", "transposed", "packed", "packed-transposed", *COMPRESSED)


def nm_prune(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Keep the `n` largest magnitudes of each group of `m`: `apply_mask(weight, nm_mask(weight, ...))` in one pass.

    Not differentiable.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        dtype: of the result, one of these or FP8 (which saturates); None for that of `weight`.

    Returns:
        Shape of `weight`; the dropped entries are +0.0. Ties keep the lower index, NaN counts as largest.

    Raises:
        ValueError: a pattern outside 0 < n < m, a size that `m` does not divide, or another dtype.

    Reference: SR-STE (arXiv 2102.04010), section 3.

    Examples:
        >>> nm_prune(torch.tensor([0.1, -3.0, 2.0, 1.0]))
        tensor([ 0., -3.,  2.,  0.])
    """
    return _prune_checked("nm_prune", weight, "magnitude", n, m, dim, None, None, dtype, ["dense"])[0]


def apply_mask(weight: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`weight` where `mask` is true and +0.0 elsewhere, never -0.0; NaN and inf show even there. Not differentiable.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape.
        mask: bool of that shape, or its packed bits (`pack_bits`).
        dtype: of the result, one of these or FP8 (which saturates); None for that of `weight`.

    Returns:
        Shape of `weight`.

    Raises:
        ValueError: a mask of another shape or dtype, or on another device.

    Examples:
        >>> apply_mask(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
        tensor([0., 2.])
    """
    return _prune_checked("apply_mask", weight, "mask", 2, 4, -1, mask, None, dtype, ["dense"])[0]


def soft_threshold(
    weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """S-STE's continuous pruning: `sign(w) * max(|w| - t, 0) * scale`, t the (m-n)-th smallest magnitude of the group.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        scale: floating 0-d tensor that multiplies the result (see `s_ste_scale`), or None for 1.
        dtype: of the result, in the same pass; None for that of `weight`. FP8 saturates.

    Returns:
        Same shape; at most `n` non-zeros in every `m`, and fewer at ties, which makes it continuous; never -0.0.
        Computed in fp32, an fp64 weight in fp64. A NaN makes its group NaN. Not differentiable: S-STE's gradient goes
        straight through.

    Raises:
        ValueError: a pattern outside 0 < n < m, or a size that `m` does not divide.

    Reference: S-STE (arXiv 2409.09099), section 4.1, with gamma = 0.

    Examples:
        >>> soft_threshold(torch.tensor([4.0, -3.0, 2.0, 1.0]))
        tensor([ 2., -1.,  0.,  0.])
    """
    return _prune_checked("soft_threshold", weight, "soft-threshold", n, m, dim, None, scale, dtype, ["dense"])[0]


def prune_forms(
    weight: Tensor,
    forms: Sequence[str],
    rule: str = "magnitude",
    n: int = 2,
    m: int = 4,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    compressions: Mapping[str, Compression] | None = None,
) -> tuple[Tensor | Packed, ...]:
    """Prune a matrix, and write it in several forms in one pass.

    Args:
        weight: `[R, C]`, the size of `dim` a multiple of `m`.
        forms: `"dense"` `[R, C]`, `"transposed"` (dense `[C, R]`, row-major), and two forms that store a 2:4 matrix
            without its zeros, with groups along C, or as `"...-transposed"` of `[C, R]` with groups along R:

            * `"packed"`: a `Packed`; the dimension of the groups is a multiple of 8;
            * `"compressed"`: what `compress` makes of the dense form. For cuSPARSELt: bf16 or fp16, both sizes
              multiples of 16, on a device that runs sparse GEMMs. Of other backends, those that store one tensor.

            Both need 2:4 groups in their direction: `dim` for magnitude and soft threshold, and a mask that keeps at
            most two of every four (of more, the last two are stored; where it keeps fewer, zeros fill the places). They
            do not have what the rule drops besides these two, not even NaN. Packed and compressed exclude each other
            in one direction.
        rule: `"magnitude"`, `"soft-threshold"` (with `scale`), or `"mask"` (with `mask`).
        n: entries to keep of each group, 0 < n < m.
        m: size of a group. Packed and compressed forms take 2:4 and what is within it (`Pattern.is_within_24`).
        dim: the dimension that groups run along, for magnitude and soft threshold.
        mask: of the rule `"mask"`, as for `apply_mask`.
        scale: of the rule `"soft-threshold"`, as there.
        dtype: of the results; None for that of `weight`. FP8 saturates.
        compressions: for a compressed form, the `Compression` of the plan of its GEMM (`plan_gemm`). If that has a
            layout, the kernel writes the form in the same pass. Without an entry, the library compresses the pruned
            matrix, and its size must be one that the library does not pad. Entries of other forms are ignored.

    Returns:
        One result per form, in the order of `forms`, a tensor or a `Packed`.

    Raises:
        ValueError: an unknown rule or form, a shape that does not fit them, a mask that is missing or not needed, a
            compressed form where no sparse GEMM can run.
        RuntimeError: a compressed form whose size is not that of its `Compression`.

    Examples:
        >>> dense, packed = prune_forms(torch.randn(16, 32), ["dense", "packed"])
        >>> torch.equal(unpack_nm(packed), dense)
        True
    """
    check_floating("prune_forms", weight=weight)
    check_matrix("prune_forms", weight=weight)
    check_one_of(RULES, rule=rule)
    check_pattern("prune_forms", n, m)
    if not isinstance(forms, (list, tuple)) or not forms or any(forms.count(form) > 1 for form in forms):
        raise ValueError(f"forms={forms!r}: must be a list of different forms of {list(FORMS)}")
    if compressions is not None and not isinstance(compressions, Mapping):
        raise ValueError(f"prune_forms: compressions={compressions!r}: must be a dict from forms to their Compression")
    dtype = weight.dtype if dtype is None else dtype
    taken: dict[int, str] = {}
    stored: list[int] = []
    encoded: dict[str, Compression] = {}
    for form in forms:
        check_one_of(FORMS, form=form)
        if form in ("dense", "transposed"):
            continue
        along = 0 if form.endswith("-transposed") else 1
        compression = compressions.get(form) if compressions and form in COMPRESSED else None
        is_foreign = isinstance(compression, Compression) and compression.backend != "cusparselt"
        check_groups(f"prune_forms: {form}", weight, 4 if is_foreign else 8, along)
        if not Pattern(n, m).is_within_24:
            raise ValueError(f"form={form!r} is for 2:4 and patterns within it, not {n}:{m}")
        if rule != "mask" and along != check_dim("prune_forms", weight, dim):
            raise ValueError(f"form={form!r} needs groups along dimension {along}, and {rule!r} has dim={dim}")
        if taken.setdefault(along, form) != form:
            raise ValueError(f"forms={forms!r}: {taken[along]!r} and {form!r} do not go together")
        if form.startswith("compressed"):
            rows, size = weight.shape if along else weight.shape[::-1]
            compression = Compression(unpadded_columns(size)) if compression is None else compression
            check_is(Compression, "prune_forms", compression=compression)
            if is_foreign:
                encoded[form] = compression
                continue
            cusparselt.check_compressible("prune_forms", rows, size, dtype, weight.device)
            stored += compression[:2]
    # What another backend stores is made from the dense form.
    written = list(dict.fromkeys(COMPRESSED[form] if form in encoded else form for form in forms))
    results = iter(_prune_checked("prune_forms", weight, rule, n, m, dim, mask, scale, dtype, written, stored))
    made = {form: Packed(next(results), next(results)) if "packed" in form else next(results) for form in written}
    for form, compression in encoded.items():
        made[form] = encode_dense("prune_forms", made[COMPRESSED[form]], compression)
    return tuple(made[form] for form in forms)


def _prune_checked(
    name: str,
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype | None,
    forms: list[str],
    compressions: Sequence[int] = (),
) -> list[Tensor]:
    if rule == "mask":
        if mask is None:
            raise ValueError(f"{name}: rule='mask' needs a mask")
        check_floating(name, weight=weight)
        check_mask(name, mask, weight)
        check_device(name, weight, mask)
        dim = max(weight.dim() - 1, 0)  # an elementwise rule has no groups
    else:
        if mask is not None:
            raise ValueError(f"{name}: rule={rule!r} makes its own mask; leave mask out or choose rule='mask'")
        check_pattern(name, n, m)
        dim = check_groups(name, weight, m, dim)
    if scale is not None:
        if rule != "soft-threshold":
            raise ValueError(f"{name}: rule={rule!r} has no scale")
        check_scalar(name, "scale", scale, weight)
    dtype = weight.dtype if dtype is None else dtype
    check_result(name, dtype)
    return _prune(weight, rule, n, m, dim, mask, scale, dtype, ",".join(forms), list(compressions))


@torch.library.custom_op("sparse24::prune", mutates_args=())
def _prune(
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    forms: str,
    compressions: Sequence[int],
) -> list[Tensor]:
    """The tensors of all forms in order; `compressions` has columns and layout number of each compressed one."""
    if rule != "mask" and (n, m) != (2, 4):
        # The kernels choose two of four alone. Any other pattern is a mask to them, which has every form.
        if rule == "magnitude":
            mask = reference.masks.nm_mask(weight, n, m, dim, packed=False)
        else:
            weight, scale = reference.prune.soft_threshold(weight, n, m, dim, scale), None
            mask = weight != 0
        rule = "mask"
    prune = implementation("prune.prune", weight, has_kernels=dtype.itemsize > 1)
    wanted = forms.split(",")  # an operator's schema has no list of strings
    stored = _compression_of(wanted, compressions)
    layouts = {}
    for form, compression in stored.items():
        rows, size = weight.shape if form == "compressed" else weight.shape[::-1]
        layout = layout_of(compression, rows, size, dtype, weight.device)
        if layout is not None:
            layouts[form] = layout
    by_library = {form: COMPRESSED[form] for form in stored if form not in layouts}
    written = list(dict.fromkeys(by_library.get(form, form) for form in wanted))
    results = iter(prune(weight, rule, n, m, dim, mask, scale, dtype, written, layouts))
    made = {form: [next(results), next(results)] if "packed" in form else [next(results)] for form in written}
    for form, dense_form in by_library.items():
        made[form] = [cusparselt.compress(*made[dense_form], stored[form].columns)]
    return [tensor for form in wanted for tensor in made[form]]


@_prune.register_fake
def _(
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    forms: str,
    compressions: Sequence[int],
) -> list[Tensor]:
    stored = _compression_of(forms.split(","), compressions)
    results: list[Tensor] = []
    for form in forms.split(","):
        matrix = weight.t() if form.endswith("transposed") else weight
        if form in ("dense", "transposed"):
            results.append(weight.new_empty(matrix.shape, dtype=dtype))
        elif form in stored:
            results.append(empty_compressed(matrix, dtype, stored[form].columns))
        else:
            results += empty_packed(matrix, dtype)
    return results


def _compression_of(forms: list[str], compressions: Sequence[int]) -> dict[str, Compression]:
    """The `Compression` of each compressed form, from its two numbers."""
    compressed = [form for form in forms if form in COMPRESSED]
    return {form: Compression(compressions[2 * i], compressions[2 * i + 1]) for i, form in enumerate(compressed)}
