"""Checkpoints: the policy for saving and keeping them, the store that reads and writes them, and their checksums."""
