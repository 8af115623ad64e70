"""Layer 0: what every other part may use, and what knows nothing of language models."""
