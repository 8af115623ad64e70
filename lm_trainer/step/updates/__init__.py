"""Updates, which turn summed gradients into new weights."""
