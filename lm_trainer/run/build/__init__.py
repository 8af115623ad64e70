"""The program of a run, planned from its configuration."""
