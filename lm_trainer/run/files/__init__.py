"""The files of a run: its directory, its records and what runs are found by."""
