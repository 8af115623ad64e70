"""One optimizer step: state, gradients of microbatches, update, evaluation."""
