"""The weights and the state that a run begins with, and those that it has saved."""
