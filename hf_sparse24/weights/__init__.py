"""One weight: how it is stored, its masks and state, its encodings, its three GEMMs as data.

The road from a layer to a kernel:

    layers/linear.py     Sparse24Layer.forward      plans its GEMMs, asks its weight for their operands
    sparse_weight.py     SparseWeight.encoded       says what operands are made from
    encodings.py         Encodings.get              gives the ones that are kept, and makes the others:
    sparse_weight.py     SparseWeight.encode        asks the method for a rule, and checks that it is N:M
    rules.py             encode                     calls the kernel of that rule: `sparse24_kernels.prune.prune_forms`

A `SparseWeight` has a storage, the state that its method keeps, and encodings:

    storage.py           how the module keeps it: dense, or packed with values that train or are frozen
    state.py             the buffers and Parameters of its method
    gemms.py             its three GEMMs as data
    sharding.py          the part of a tensor that this process holds, and all of it
    input_dim.py         which of its dimensions is the input dimension
    packed_weight.py     packed forms, made without loss and checked after reading
"""
