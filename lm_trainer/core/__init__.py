"""Values and helpers used by every other package, with no knowledge of language models."""
