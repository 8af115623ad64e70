"""Checks the hardware during a step: microbatches are computed again by other devices, and all bits are compared."""
