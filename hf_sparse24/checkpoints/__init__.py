"""Models in files: `from_pretrained`, `save_pretrained` and `export_model`.

    quantizer.py          from_pretrained patches the model that it loads; save_pretrained of a patched model
    packed_files.py       reading a packed checkpoint: check its files, make modules packed, check what was read
    export.py             export_model: a dense or a packed checkpoint to share
    lazy_tensors.py       the tensors of an export, computed when their file is written
    safetensors_file.py   files of safetensors with the mark of their export, and their headers
    replacing.py          a new model replaces the one in a directory, never mixed with it
    manifest.py           sparse24.json, which says what an export has written

`config.json` of a packed model lists its packed weights. The tools read exports to verify them.
"""
