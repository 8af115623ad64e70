"""Gradients of a loss, and the values a model logs."""
