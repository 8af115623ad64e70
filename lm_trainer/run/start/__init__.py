"""Starts or resumes a run, and checks that its processes agree."""
