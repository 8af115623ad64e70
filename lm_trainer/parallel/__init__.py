"""Devices and what passes between them: mesh, shardings, collectives, sums of a fixed order, processes."""
