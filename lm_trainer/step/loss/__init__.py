"""Gradients of a loss, and the values that a model logs."""
