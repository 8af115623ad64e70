"""One start of a run: a fresh one or a resume, and what its processes agree on."""
