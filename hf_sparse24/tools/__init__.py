"""The command line: `hf-sparse24 doctor`, `tune`, `plan`, `report`, `export`, `inspect` and `verify`."""
