"""The loop of training, and its parts."""
