"""Builds the rows of batches from cached tokens: chunks, packing, and the order of rows."""
