"""Reproduction of a run: its steps computed again, looked into, and compared with those of another run."""
