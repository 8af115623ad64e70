"""Times the same training step in `lmt`, PyTorch, transformers and plain JAX, alternating between them.

`shapes` defines the workloads, and `kinds` defines the trainers. Each kind runs in a separate process (`worker`), and
the driver (`python -m benchmarks.peers`) requests steps from the workers in turn. All kinds start from the same weights
and read the same batches. The driver refuses to print a table if their losses or weights diverge (`agreement`).
"""
