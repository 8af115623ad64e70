"""Layer 1: the parts that language models are made of. Features, never families."""
