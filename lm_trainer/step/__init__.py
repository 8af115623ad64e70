"""Optimizer steps: state, gradients of microbatches, update and evaluation."""
