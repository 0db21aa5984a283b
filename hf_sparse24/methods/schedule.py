"""dense start -> sparse -> dense tail, as pure functions of the number of optimizer steps done."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When a training run is sparse. All numbers are optimizer steps, counted from 0.

    Attributes:
        total: length of the run.
        first_sparse: the step that sparsity starts with.
        first_tail: the step that the dense tail starts with, None where there is none: then the run *ends* sparse.
    """

    total: int
    first_sparse: int
    first_tail: int | None

    @classmethod
    def from_lengths(cls, total: int, start: int | float, tail: int | float, start_name: str = "dense_start"):
        """Turn lengths into steps; fractions are rounded up, as Transformers rounds its warm-up.

        Args:
            total: optimizer steps of the run, >= 1.
            start, tail: lengths of dense training at the beginning and at the end. start_name: of the setting that
                says `start`, for the error.

        Raises:
            ValueError: `total` is not positive, or too small to leave one sparse step.
        """
        if total < 1:
            raise ValueError(f"total_steps={total}: a run needs at least 1 optimizer step")
        start_steps, tail_steps = to_steps(start, total), to_steps(tail, total)
        if start_steps + tail_steps >= total:
            raise ValueError(
                f"total_steps={total} leaves no sparse step: {start_name}={start} is {start_steps} steps, "
                f"dense_tail={tail} is {tail_steps}; train longer or shorten them"
            )
        return cls(total, start_steps, total - tail_steps if tail_steps else None)

    def phase(self, step: int) -> str:
        """`"sparse"` or `"dense"`: how the model computes once `step` optimizer steps are done."""
        in_tail = self.first_tail is not None and step >= self.first_tail
        return "dense" if step < self.first_sparse or in_tail else "sparse"


def to_steps(length: int | float, total: int) -> int:
    """A length in optimizer steps: an int is one already, a float is a fraction of `total`, rounded up."""
    # The tiny subtraction keeps a fraction like 0.07 of 100 from being rounded up to 8 by float noise.
    return math.ceil(length * total - 1e-9) if isinstance(length, float) else length
