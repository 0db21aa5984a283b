"""The model card, and the push to the Hub: what a user shares of a sparse model."""
