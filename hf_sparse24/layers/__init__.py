"""The modules that compute with sparse and packed weights. Begin with `linear.py`: it explains the three GEMMs."""
