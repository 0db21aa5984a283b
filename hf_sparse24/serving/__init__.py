"""A plugin for vLLM, which reads packed checkpoints. Only vLLM imports it, in whose environment vLLM is."""
