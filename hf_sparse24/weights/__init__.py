"""One weight: how it is stored, its masks and state, its encodings, its three GEMMs as data.

The road from a layer to a kernel:

    layers/linear.py     Sparse24Layer.forward      plans its GEMMs, asks its weight for their operands
    sparse_weight.py     SparseWeight.encoded       says what operands are made from
    encodings.py         Encodings.get              gives the ones that are kept, and makes the others:
    sparse_weight.py     SparseWeight._encode       asks the method for a rule, and checks that it is N:M
    rules.py             encode                     calls the kernel of that rule: `sparse24_kernels.prune.prune_forms`

The files, from the lowest layer up:

    view.py              `WeightView`, what a method sees of a weight
    sharding.py          parts and wholes of DTensors
    gemms.py             the three GEMMs of a layer as data, and which of them can be sparse
    rules.py             how a weight becomes N:M, as data, and what becomes of that
    encodings.py         the rule by which encodings are kept
    packed_weight.py     tensors in packed form: made without loss, checked after they were read
    storage.py           how a module keeps a weight: dense master, packed master, packed and frozen
    state.py             the buffers and Parameters that a method keeps for a weight
    sparse_weight.py     `SparseWeight`, which has one of each of these; `sparse_weights`, which finds them, and
                         `wrong_states`, which checks what was loaded
"""
