"""GEMMs with one 2:4 operand: what can run them, what is fastest, and how the operand is stored.

Modules, from the bottom up; each imports only those above it in this list:

    problem.py      one GEMM's shape, and the algorithm that runs it
    backend.py      the protocol of a backend, and dense math
    cusparselt.py   Nvidia's sparse tensor cores; the only module that calls cuSPARSELt
    packed.py       weights that exist in packed form alone
    measure.py      one algorithm, checked against dense math and timed
    autotune.py     sparse or dense: cuSPARSELt's search, checked, remembered in one table
    tuned.py        the backends that run what was found
    planning.py     `plan_gemm`, `plan_packed`, `compress`: backend, algorithm and operand of one GEMM, with the reason

Authors of backends import what they need from here.
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
