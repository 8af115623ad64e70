"""Losses over a complete run: a law of loss curves fitted to the rungs of a ladder, and curves predicted from it."""
