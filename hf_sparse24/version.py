"""The version, in a separate file so that setup.cfg can read it without importing torch."""

__version__ = "0.3.0"
"""The version of this library, as it goes into `config.json`."""
