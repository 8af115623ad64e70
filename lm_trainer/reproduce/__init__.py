"""What a run directory proves: its steps computed again, one step looked at, two runs compared."""
