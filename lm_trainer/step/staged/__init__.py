"""A loss computed in stages: their functions, and how gradients are summed over microbatches."""
