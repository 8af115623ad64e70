"""Rows of a batch from cached tokens: chunks, packing, and the order in which rows come."""
