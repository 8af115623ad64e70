"""Groups of devices, the programs that they run, and their microbatches."""
