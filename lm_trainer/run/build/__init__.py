"""Builds the model, the shardings and the compiled functions of a run from its configuration."""
