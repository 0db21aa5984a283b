"""Making a model sparse and back: which layers, the change itself, whose config says so, and packing.

surgery.py      patch_model and unpatch_model
targets.py      which layers become sparse
unsupported.py  why a layer that was selected stays dense
refusals.py     which models are refused as a whole
report.py       PatchReport, the table of both
ownership.py    which Transformers models say in their configs that they are sparse
packing.py      pack_model and unpack_model
masters.py      packed masters: values without zeros that train
"""
