"""Speed of sparse24_kernels. Nothing here knows a model; that results are right on a GPU is for `pytest -m gpu`.

`recipes/benchmarks/gpu.py` runs the sections on a GPU (`make gpu`): operations.py times kernels, gemms.py GEMMs.
`recipes/benchmarks/cpu.py` runs those on a CPU: cpu.py times packed layers, beside the dense kernels of dense.cpp.
run.py and timing.py are what they share.
"""
