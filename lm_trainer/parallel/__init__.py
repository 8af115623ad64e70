"""Devices and communication: mesh, shardings, collectives, sums in a fixed order, processes."""
