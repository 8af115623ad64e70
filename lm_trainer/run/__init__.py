"""Training runs, from the configuration to the last checkpoint."""
