"""The health of a run: stop signals, steps that hang, processes that die."""
