"""Measures the host cost of dispatching the programs of a layerwise step.

    python -m benchmarks.dispatch --step-seconds 6.8

Uses a tiny Llama with negligible computation, but with as many layers and microbatches per device as a large model. The
remaining time is spent in Python and the runtime. On accelerators, one program computes a microbatch on all devices of
a process; on CPUs, each device has its own. Both are measured here, on emulated devices. The figures are the processor
time of the dispatching thread, which excludes other work on the machine. They are upper bounds, because they include
small programs that the runtime computes in this thread. `--step-seconds` is the step time of the large model on its
devices.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.setting import describe_load, describe_setting, markdown_table

VOCAB, LENGTH = 64, 8


def config_of(determinism: str, chosen: argparse.Namespace) -> Any:
    from lm_trainer.run.config.run_config import RunConfig

    return RunConfig.model_validate(
        {
            "model": {
                "type": "llama",
                "seq_len": LENGTH,
                "hidden_dim": 8,
                "intermediate_dim": 8,
                "num_layers": chosen.layers,
                "num_heads": 1,
                "num_kv_heads": 1,
                "scan_layers": True,
            },
            "trainer": {
                "train_batch_size": chosen.microbatches * chosen.devices,
                "per_device_parallelism": 1,
                "num_train_steps": chosen.steps + 2,
                "determinism": determinism,
                "microbatches_per_gather": None if determinism != "layerwise" else chosen.microbatches,
                "cpu_threads": chosen.devices,
            },
        }
    )


def measure(determinism: str, platform: str, chosen: argparse.Namespace) -> tuple[float, int]:
    """Returns the median seconds per step of the dispatching thread, and the number of programs per device and step.

    Args:
        determinism: value of `trainer.determinism`.
        platform: the devices get programs as on this platform.
        chosen: parsed arguments.
    """
    import jax

    from lm_trainer.bench.dispatch import time_dispatch
    from lm_trainer.plan.memory import StepMemory
    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.step.dispatch.mesh_group import dispatching_for

    config = config_of(determinism, chosen)
    with dispatching_for(platform):
        setup = build_setup(config, VOCAB)
    batch = random_batch(config.trainer.train_batch_size, LENGTH, VOCAB)
    setup.step.compile(batch)
    state, placed = setup.init(), setup.step.put(batch)
    jax.block_until_ready((state.params, placed))

    def dispatch_step() -> Any:
        nonlocal state
        state, metrics = setup.compute_step(state, placed)
        return state.params, metrics

    times = time_dispatch(dispatch_step, steps=chosen.steps)
    runs = StepMemory(config, VOCAB, jax.devices(), platform).run_counts()
    return times.host.median, sum(runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8, help="per device and step")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=6.8, help="step time of the large model")
    chosen = parser.parse_args()
    from lm_trainer.core.runtime import set_cpu_threads

    set_cpu_threads(chosen.devices)
    import jax

    jax.config.update("jax_num_cpu_devices", chosen.devices)
    rows = []
    for determinism in ("layerwise", "elastic"):
        for platform in ("cpu", "gpu") if chosen.devices > 1 else ("cpu",):
            seconds, programs = measure(determinism, platform, chosen)
            microseconds = 1e6 * seconds / (programs * chosen.devices)
            share = seconds / chosen.step_seconds
            kind = "of each device" if platform == "cpu" else "of all devices"
            figures = [f"{programs}", f"{1000 * seconds:.0f}", f"{microseconds:.0f}", f"{share:.2%}"]
            rows.append([determinism, kind, *figures])
    heads = ["step", "programs", "programs of a device", "ms of the host", "us a program and device"]
    heads.append(f"of {chosen.step_seconds} s")
    print(describe_setting("jax", "jaxlib"), describe_load())
    print(f"\n{chosen.layers} layers, {chosen.microbatches} microbatches on each of {chosen.devices} devices.\n")
    print(markdown_table(heads, rows))


if __name__ == "__main__":
    main()
