"""Layer 1: building blocks of language models. Switches are features, never model families."""
