"""Scaling laws: fitted to what a ladder measured, and what they predict."""
