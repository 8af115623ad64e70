"""One optimizer step: the state, a microbatch as an executable, the update, evaluation."""
