"""Groups of devices, the programs that they run, and the microbatches that go through them."""
