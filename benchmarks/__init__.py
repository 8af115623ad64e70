"""Measurements of speed and memory, each a program: `python -m benchmarks.NAME`."""
