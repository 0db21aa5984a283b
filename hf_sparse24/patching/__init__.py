"""Making a model sparse and back: which layers, the change itself, whose config says so, and packing."""
