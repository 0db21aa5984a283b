"""Serving engines that read packed checkpoints: a plugin for vLLM.

`packed_layers.py` decides which layers of an engine are packed; `vllm_plugin.py` tells vLLM how they load and compute.
Nothing here is imported by `import hf_sparse24`: vLLM imports it, and only vLLM's environment has vLLM.
"""
