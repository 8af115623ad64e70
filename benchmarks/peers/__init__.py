"""One training step, the same for `lmt`, PyTorch, transformers and plain JAX, timed alternately.

`shapes` defines the workloads, `kinds` the trainers. Each kind runs in a separate process (`worker`), and the driver
(`python -m benchmarks.peers`) requests steps from them in turns. All start from the same weights and read the same
batches; the driver refuses to print a table if their losses or weights diverge (`agreement`).
"""
