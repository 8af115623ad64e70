"""The configuration of a run, and the resolved step plan."""
