"""Checkpoints: when they are written, and how they are proved intact."""
