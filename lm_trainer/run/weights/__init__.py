"""Initial weights of a run, and its saved weights and training states."""
