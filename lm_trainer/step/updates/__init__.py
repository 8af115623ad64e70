"""From summed gradients to new weights."""
