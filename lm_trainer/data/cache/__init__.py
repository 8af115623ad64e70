"""Tokenised text on disk: file format, key-value store and readers."""
