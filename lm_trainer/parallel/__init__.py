"""Devices and communication: mesh, shardings, collectives, sums of a fixed order, processes."""
