"""The configuration of a run, and the plan that it is resolved to."""
