"""Initial and saved weights and states of a run."""
