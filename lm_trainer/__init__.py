"""Training language models on JAX, bit for bit the same on any number of devices."""
