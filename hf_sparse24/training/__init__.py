"""Training: what happens between steps (controller), in any Trainer (callback, resume), in one line (trainer)."""
