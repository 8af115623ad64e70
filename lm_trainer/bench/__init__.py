"""Measurements of a configuration, one file for each command of `lmt bench`."""
