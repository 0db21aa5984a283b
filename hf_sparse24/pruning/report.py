"""OneshotReport: the result of `oneshot`, with the errors of layers and blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..patching.report import PatchReport, group_name
from ..tables import TableReport, shown_patterns


@dataclass(frozen=True)
class BlockReport:
    """The errors of one block, before and after its reconstruction.

    Attributes:
        name: of the block.
        pruned_error: root of the mean over tokens of the squared error of the block's output relative to the square of
            the dense model's, after pruning. It holds the errors of all blocks before it.
        error: the same after the reconstruction.
    """

    name: str
    pruned_error: float
    error: float


@dataclass(frozen=True)
class LayerReport:
    """The errors and counts of one pruned layer.

    Attributes:
        name: of the layer.
        tokens: number of inputs it was calibrated on, without padding.
        masked_error: `||X W^T - X (M * W)^T|| / ||X W^T||` in the Frobenius norm, W dense and M the mask: the output
            error of the mask alone.
        error: the same for the layer's new weight and bias, before block reconstruction. Without reconstruction of
            layers, and with a criterion other than "sparsegpt", both errors are measured on about 128 inputs, at least
            one a batch.
        kept_magnitude: share of the dense weight's L1 norm that the mask keeps.
        dropped: number of non-zero weights that the mask drops.
        damping: the argument of `oneshot`, or the higher value that SparseGPT needed.
        pattern: N:M of the mask.
    """

    name: str
    tokens: int
    masked_error: float
    error: float
    kept_magnitude: float
    dropped: int
    damping: float
    pattern: str


@dataclass(frozen=True, repr=False)
class OneshotReport(TableReport):
    """The result of `oneshot`, layer by layer. Print it, show it in a notebook, or read its fields.

    Attributes:
        criterion, reconstruct, values: the arguments of `oneshot`.
        layers: one for each pruned weight, in module order.
        patch: which layers are sparse, and why not the others.
        blocks: one for each block that was reconstructed, in the order that they run.
    """

    criterion: str
    reconstruct: str | None
    layers: tuple[LayerReport, ...]
    patch: PatchReport
    values: str = "float"
    blocks: tuple[BlockReport, ...] = ()
    _columns = ("module group", "layers", "tokens", "kept", "dropped", "masked error", "error", "worst")

    def __repr__(self) -> str:
        return f"<OneshotReport: {self._title()}; {len(self.layers)} layers>"

    def _title(self) -> str:
        how = f", weights reconstructed by {self.reconstruct}" if self.reconstruct else ""
        how += ", rounded to int8" if self.values == "int8" else ""
        patterns = shown_patterns(layer.pattern for layer in self.layers)
        return f"one-shot {patterns} by {self.criterion} masks{how}; errors are of the layers' outputs"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        groups: dict[str, list[LayerReport]] = {}
        for layer in self.layers:
            groups.setdefault(group_name(layer.name), []).append(layer)
        for name, group in groups.items():
            kept, masked, error = (
                f"{sum(getattr(layer, field) for layer in group) / len(group):.1%}"
                for field in ("kept_magnitude", "masked_error", "error")
            )
            tokens, dropped = min(layer.tokens for layer in group), sum(layer.dropped for layer in group)
            worst = f"{max(layer.error for layer in group):.1%}"
            yield name, str(len(group)), f"{tokens:,}", kept, f"{dropped:,}", masked, error, worst
