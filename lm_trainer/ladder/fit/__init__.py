"""Scaling laws: fits to the losses of a ladder, and predictions of larger runs."""
