"""The commands of `hf-sparse24`, a function each; `hf_sparse24_command.py` outside the package parses their arguments.

- `prune.py`: `prune`, by the checked arguments and the divided text of `prune_job.py`
- `checkpoint_commands.py`: `export`, `inspect`, `verify`, by `verification.py`
- `gemm_commands.py`: `doctor`, `tune`, by `doctor.py`
- `models.py`: finds a checkpoint, and makes its model without weights
"""

from collections.abc import Iterable

from ..tables import Row, text_table


def print_table(rows: Iterable[Row]) -> None:
    """Print rows as aligned and indented lines."""
    print(text_table(rows, indent="  "))
