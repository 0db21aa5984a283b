"""The modules that compute with sparse and packed weights. Begin with `linear.py`: it explains the three GEMMs.

linear.py         Sparse24Linear and Sparse24Conv1D: the GEMMs of a layer that trains
sparse_module.py  the base of all sparse modules: saving, loading, and classes made at run time
experts.py        stacked experts, whose weights are 3-D Parameters
packed.py         layers that compute with packed weights
gated.py          gated MLPs, whose two projections become one kernel
"""
