"""Updates: from summed gradients to new weights."""
