"""Benchmarks of speed and memory. Each is a program: `python -m benchmarks.NAME`."""
