"""Benchmarks of a configuration, with one module for each command of `lmt bench`."""
