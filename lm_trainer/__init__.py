"""Training language models on JAX, bit for bit the same on any number of devices."""

__version__ = "0.1.0.dev0"
