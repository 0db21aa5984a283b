"""The command line: what runs here and why (doctor), and measuring the GEMMs of a model (tune)."""
