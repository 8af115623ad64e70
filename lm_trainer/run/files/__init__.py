"""The files of a run: its directory, its records, and finding runs."""
