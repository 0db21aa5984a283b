"""Pruning a trained model in one pass: `oneshot`, its calibration, and the layer-wise algorithms."""
