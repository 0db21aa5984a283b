"""PEFT's tuners on sparse models: what `get_peft_model` and `PeftModel.from_pretrained` do by themselves.

Importing this package puts a subclass of each tuner into PEFT's registries (`registry.py`); `origin.py` writes into an
adapter's files which sparse weights it was trained on, and compares them with those that it is loaded onto.
"""

from .registry import register_tuners

__all__ = ["register_tuners"]
