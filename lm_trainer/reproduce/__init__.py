"""Reproduces a run: recomputes its steps, inspects them, and compares them with another run."""
