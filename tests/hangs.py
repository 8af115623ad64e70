"""The limit of waits for what happens soon, so that a test that hangs fails."""

HANG_SECONDS = 600
"""Far more than anything takes here, also on a machine with other work."""
