"""One training step, the same for all: `lmt`'s own beside PyTorch's, transformers' and plain JAX's, timed in turn.

`shapes` says what is trained, `kinds` who trains it. Each kind runs in a process of its own (`worker`), which the
driver (`python -m benchmarks.peers`) asks for steps in turn. All start from the same weights and read the same batches;
the driver refuses to print a table where their losses or their weights part (`agreement`).
"""
