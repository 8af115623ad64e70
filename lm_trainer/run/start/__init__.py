"""Starting or resuming a run, and the agreement of its processes."""
