"""A page about a run, or about several beside one another."""
