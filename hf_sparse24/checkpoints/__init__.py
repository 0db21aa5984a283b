"""Checkpoints: `save_pretrained` and `from_pretrained` of patched models (quantizer), and export for everybody else."""
