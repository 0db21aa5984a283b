"""PEFT on sparse models, in `get_peft_model` and `PeftModel.from_pretrained` as they are.

`registry.py` puts a subclass of each tuner into PEFT's registries; `origin.py` writes into an adapter's files which
sparse weights it was trained on, and compares them with those that it is loaded onto.
"""

from .registry import register_tuners

__all__ = ["register_tuners"]
