"""Health of a run: handles stop signals, raises alerts, and detects hanging steps and dead processes."""
