"""Building the program of a run from its configuration."""
