"""A loss in stages: how microbatches go through them, and how their gradients are summed."""
