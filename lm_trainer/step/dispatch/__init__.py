"""Groups of devices, the programs they run, and the microbatches they compute."""
