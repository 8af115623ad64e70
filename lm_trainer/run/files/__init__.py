"""The files of a run: its directory and records, and functions that find runs."""
