"""Runs tasks of EleutherAI's lm-evaluation-harness on models of this package."""
