"""Sweeps: runs of one configuration with several values of some keys."""
