"""A plugin for vLLM, which reads packed checkpoints. Only vLLM imports `vllm_plugin.py`, in whose environment vLLM is.

`packed_layers.py` says which of its layers are packed, and how they may be split.
"""
