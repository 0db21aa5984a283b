"""Sharing a sparse model: what the Hub shows of it, and how it gets there.

    push.py      push_to_hub: the export of a model with its card, in one commit
    card.py      the model card: what is sparse, how to load it, how it was trained, how it compares
    picture.py   the picture of a run: losses, flip rate and kept magnitude
    losses.py    what the log of a Trainer says by the step

The core asks `extensions.hub` for them.
"""
