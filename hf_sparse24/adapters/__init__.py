"""PEFT's adapters around sparse layers: they act through the mask, and merge into weights that stay 2:4.

`attaching.py` handles the adapters that PEFT adds. `masked.py` has the GEMM of a masked LoRA, `variants.py` puts it
into PEFT's layers. `merging.py` merges, unmerges, and gives a model without its adapters. `bypass.py` refuses adapters
that compute with the dense master weight.
"""
