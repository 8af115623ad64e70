"""Measures kernels of experts on a CPU: grouped products of the chosen experts, and every expert for every token.

    python -m benchmarks.experts

Loss and gradient of one microbatch, one program for each kernel, which alternate call by call. The processor time of
the process is counted, because other work on the machine does not change it much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.runtime import prepare_process

KERNELS = ("dense", "grouped")
VOCAB = 2048


class Shape(NamedTuple):
    rows: int
    model: dict[str, Any]


def _shape(rows: int, seq_len: int, hidden: int, layers: int, experts: int, chosen: int, width: int) -> Shape:  # noqa: PLR0913 - sizes
    sizes = {"seq_len": seq_len, "hidden_dim": hidden, "num_layers": layers, "num_heads": hidden // 32}
    sizes |= {"num_kv_heads": hidden // 32, "intermediate_dim": width, "n_routed_experts": experts}
    return Shape(rows, {"type": "olmoe", **sizes, "num_experts_per_tok": chosen, "gradient_checkpointing": False})


SHAPES = {
    "nano, 2 of 4": _shape(16, 128, 64, 2, 4, 2, 96),
    "nano, 2 of 8": _shape(16, 128, 64, 2, 8, 2, 64),
    "30M, 2 of 8": _shape(4, 512, 384, 4, 8, 2, 512),
    "30M, 8 of 64": _shape(4, 512, 384, 4, 64, 8, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    prepare_process()
    print("# Kernels of experts on a CPU\n")
    print(describe_setting("jax"), f"{options.pairs} pairs.", describe_load("at the start"))
    print()
    rows = []
    for name, shape in SHAPES.items():
        runs = {kernel: compile_gradient(shape, kernel) for kernel in KERNELS}
        seconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
        for pair in range(options.pairs):
            for kernel in KERNELS if pair % 2 else KERNELS[::-1]:
                seconds[kernel].append(runs[kernel]())
        ratios = sorted(a / b for a, b in zip(seconds["grouped"], seconds["dense"], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        of = [f"{1e3 * statistics.median(seconds[kernel]):.0f}" for kernel in KERNELS]
        rows.append([name, *of, f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"])
    print(markdown_table(["experts", "dense, CPU ms", "grouped, CPU ms", "grouped / dense (quartiles)"], rows))
    print("\nLoss and gradient of one microbatch of 2,048 tokens in float32, with attention and output layer.")


def compile_gradient(shape: Shape, kernel: str) -> Callable[[], float]:
    """Returns a function that computes loss and gradient once, and returns the processor time in seconds."""
    import jax
    from flax import nnx
    from pydantic import TypeAdapter

    from lm_trainer.models import AnyModel
    from lm_trainer.nn.loss import token_loss
    from lm_trainer.profile.workload import random_batch

    config = TypeAdapter(AnyModel).validate_python({**shape.model, "expert_kernel": kernel})
    batch = random_batch(shape.rows, config.seq_len, VOCAB)
    graph, params = nnx.split(jax.jit(lambda: config.build(VOCAB, rngs=nnx.Rngs(0)))(), nnx.Param)
    gradient = jax.jit(jax.value_and_grad(lambda p: token_loss(nnx.merge(graph, p), batch)[0]))
    jax.block_until_ready(gradient(params))

    def run() -> float:
        start = time.process_time()
        jax.block_until_ready(gradient(params))
        return time.process_time() - start

    return run


if __name__ == "__main__":
    main()
