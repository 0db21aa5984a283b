"""PEFT's adapters around sparse layers: they act through the mask, and merge into weights that stay 2:4."""
