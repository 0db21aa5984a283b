"""The command line, `hf-sparse24`: a function for each command."""
