"""Rows of a batch, built from cached tokens: chunks, packing, and the order of rows."""
