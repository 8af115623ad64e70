"""Checkpoints: the policy for saving and retention, the store, and the checksums."""
