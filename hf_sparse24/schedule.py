"""dense start -> sparse -> dense tail, as pure functions of the number of optimizer steps done."""

import math
from dataclasses import dataclass

from .config import Sparse24Config


@dataclass(frozen=True)
class Schedule:
    """When a training run is sparse. All numbers are optimizer steps, counted from 0.

    Attributes:
        total: length of the run.
        first_sparse: the step that sparsity starts with; with STEP, whose optimizer decides that, 0.
        first_tail: the step that the dense tail starts with, None where there is none: then the run *ends* sparse.
        mask_interval: steps between mask searches, None where the method searches none.
    """

    total: int
    first_sparse: int
    first_tail: int | None
    mask_interval: int | None

    @classmethod
    def from_config(cls, config: Sparse24Config, total_steps: int) -> "Schedule":
        """Turn the config's lengths into steps; fractions are rounded up, as Transformers rounds its warm-up.

        Raises:
            ValueError: `total_steps` is not positive, or too small to leave one sparse step.
        """
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps}: a run needs at least 1 optimizer step")
        # STEP's optimizer decides when sparsity starts; for the check, as late as it may.
        start_field = "switch_by" if config.dense_start is None else "dense_start"
        start = to_steps(getattr(config, start_field), total_steps)
        tail = to_steps(config.dense_tail, total_steps)
        if start + tail >= total_steps:
            raise ValueError(
                f"total_steps={total_steps} leaves no sparse step: {start_field}={getattr(config, start_field)} is "
                f"{start} steps, dense_tail={config.dense_tail} is {tail}; train longer or shorten them"
            )
        interval = None if config.mask_interval is None else max(1, to_steps(config.mask_interval, total_steps))
        first_sparse = 0 if config.dense_start is None else start
        return cls(total_steps, first_sparse, total_steps - tail if tail else None, interval)

    def phase(self, step: int) -> str:
        """`"sparse"` or `"dense"`: how the model computes once `step` optimizer steps are done."""
        in_tail = self.first_tail is not None and step >= self.first_tail
        return "dense" if step < self.first_sparse or in_tail else "sparse"

    def searches_mask(self, step: int) -> bool:
        """Whether masks are searched anew once `step` steps are done. The first are found when sparsity starts."""
        since = step - self.first_sparse
        return self.mask_interval is not None and self.phase(step) == "sparse" and since % self.mask_interval == 0


def to_steps(length: int | float, total: int) -> int:
    """A length in optimizer steps: an int is one already, a float is a fraction of `total`, rounded up."""
    # The tiny subtraction keeps a fraction like 0.07 of 100 from being rounded up to 8 by float noise.
    return math.ceil(length * total - 1e-9) if isinstance(length, float) else length
