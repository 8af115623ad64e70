"""Tokenised text on disk: its files, and how they are read."""
