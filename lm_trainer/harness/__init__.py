"""Tasks of EleutherAI's lm-evaluation-harness, asked of a model of this package."""
