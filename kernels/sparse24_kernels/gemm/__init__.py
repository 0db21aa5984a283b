"""GEMMs with one 2:4 operand: what can run them, what is fastest, and how the operand is stored.

`kernels/README.md` says what each module is for. Authors of backends import what they need from here.
"""

from .backend import GemmBackend, GemmPlan, register_backend
from .planning import compress, plan_gemm, plan_packed
from .problem import GemmProblem, linear_problem, mm_problem

__all__ = [
    "GemmBackend",
    "GemmPlan",
    "GemmProblem",
    "compress",
    "linear_problem",
    "mm_problem",
    "plan_gemm",
    "plan_packed",
    "register_backend",
]
