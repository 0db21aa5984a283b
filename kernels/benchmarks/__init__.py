"""Speed of sparse24_kernels on a GPU. Nothing here knows a model; that results are right is for `pytest -m gpu`.

`recipes/benchmarks/gpu.py` runs the sections (`make gpu`): operations.py times kernels, gemms.py GEMMs;
run.py and timing.py are what they share.
"""
