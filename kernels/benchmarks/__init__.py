"""Benchmarks of sparse24_kernels on a GPU: correctness first, then speed. Nothing here knows a model.

`recipes/benchmarks/gpu.py` runs them (`make gpu`), with `kernels/` and `tests/kernels/` on `sys.path`. gate.py checks,
operations.py times kernels, gemms.py and tilelang_gemm.py GEMMs; ahead_of_time.py is a command that needs no GPU.
"""
