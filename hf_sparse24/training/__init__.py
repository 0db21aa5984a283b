"""Training: what happens between steps (controller), in any Trainer (callback), and in one line (trainer)."""
