"""Losses that are computed in stages: functions of the stages, and the sums of gradients over microbatches."""
