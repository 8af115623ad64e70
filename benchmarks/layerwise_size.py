"""Trains a model layer by layer that is too large to train as one program, and compares planned and measured peaks.

    python -m benchmarks.layerwise_size --layers 14 --limit-gib 13

The model is a Llama with bfloat16 computation, and float32 weights and AdamW state, on 8 emulated CPU devices. The
devices share the memory of one process, so figures of the process are about 8 times the figures of a device. `elastic`
is only planned. The process ends itself before it exceeds the limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from typing import Any

from benchmarks.setting import describe_load, describe_setting
from lm_trainer.core.runtime import resident_bytes

DEVICES, VOCAB, ROWS, LENGTH = 8, 2048, 8, 256


def config_of(determinism: str, size: argparse.Namespace) -> Any:
    from lm_trainer.run.config.run_config import RunConfig

    return RunConfig.model_validate(
        {
            "model": {
                "type": "llama",
                "seq_len": LENGTH,
                "hidden_dim": size.hidden,
                "intermediate_dim": size.hidden * 8 // 3,
                "num_layers": size.layers,
                "num_heads": size.hidden // 128,
                "num_kv_heads": size.hidden // 128,
                "scan_layers": True,
            },
            "trainer": {
                "train_batch_size": ROWS,
                "num_train_steps": size.steps,
                "mp": "p=f32,c=bfloat16",
                "gather": {"elastic": "model", "layerwise": "layer"}[determinism],
                "cpu_threads": DEVICES,
            },
            "optimizer": {"type": "adam", "learning_rate": 1e-4},
        }
    )


def plan_peak_phase(determinism: str, size: argparse.Namespace) -> Any:
    """Plans the run, and returns the phase with the highest peak on a device."""
    import jax

    from lm_trainer.plan.memory import StepMemory

    memory = StepMemory(config_of(determinism, size), VOCAB, jax.devices(), "cpu")
    return memory.plan().peak


def train(size: argparse.Namespace) -> None:
    """Trains some steps, all on the same random tokens."""
    import jax

    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.setup import build_setup

    setup = build_setup(config_of("layerwise", size), VOCAB)
    batch = random_batch(ROWS, LENGTH, VOCAB)
    setup.step.compile(batch)
    state = setup.init()
    for _ in range(size.steps):
        started = time.perf_counter()
        state, metrics = setup.take_step(state, batch)
        jax.block_until_ready((state.params, metrics))
        seconds = time.perf_counter() - started
        print(f"step {state.step}: loss {float(metrics['loss']):.4f}, {seconds:.0f} s, {peak_gib():.1f} GiB so far")


def peak_gib() -> float:
    """Returns the peak memory of the process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def start_memory_guard(limit_gib: float) -> None:
    """Starts a thread that ends the process immediately if it exceeds the limit."""

    def watch() -> None:
        while True:
            if (resident_bytes() or 0) > limit_gib * 2**30:
                print(f"more than {limit_gib} GiB: stopped", flush=True)
                os._exit(1)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536, help="a multiple of 384")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=13)
    parser.add_argument("--plan-only", action="store_true")
    size = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    start_memory_guard(size.limit_gib)

    from lm_trainer.core.runtime import set_cpu_threads

    # Keeps the default allocator settings, which return freed memory, so the peak is memory that is really in use.
    set_cpu_threads(DEVICES)

    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)

    from lm_trainer.profile.flops import parameter_count

    print(describe_setting("jax", "jaxlib"), describe_load("at the start"))
    count = parameter_count(config_of("layerwise", size).model.spec(VOCAB))
    print(f"{count:,} parameters, {ROWS} rows of {LENGTH} tokens, {DEVICES} devices")
    for determinism in ("layerwise", "elastic"):
        peak = plan_peak_phase(determinism, size)
        parts = ", ".join(f"{name} {DEVICES * size_in_bytes / 2**30:.2f}" for name, size_in_bytes in peak.parts.items())
        print(f"{determinism}: planned {DEVICES * peak.bytes / 2**30:.1f} GiB on all devices, in {peak.name}: {parts}")
    if not size.plan_only:
        train(size)
        print(f"the process held {peak_gib():.1f} GiB at most")


if __name__ == "__main__":
    main()
