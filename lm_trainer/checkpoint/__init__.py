"""Checkpoints: the policy that writes and keeps them, their store, and the checksums that verify them."""
