"""One weight: where it lives and how it is sharded, its state and masks, its encodings, its three GEMMs as data."""
