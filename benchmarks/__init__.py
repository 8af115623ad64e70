"""Speed and memory benchmarks, each a program: `python -m benchmarks.NAME`."""
