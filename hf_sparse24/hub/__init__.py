"""Sharing a sparse model: what the Hub shows of it, and how it gets there.

    push.py      push_to_hub: the export of a model with its card, in one commit
    card.py      the model card: what is sparse, how to load it, how it was trained, how it compares
    picture.py   the log of a run: its last evaluation, and the picture of losses, flip rate and kept magnitude

The core asks `extensions` for them.
"""
