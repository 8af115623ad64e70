"""Groups of devices, the programs they run, and their microbatches."""
