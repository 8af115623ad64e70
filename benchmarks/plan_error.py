"""Measures the error of `lmt plan`, compared with the memory that training uses.

    python benchmarks/plan_error.py [--results FILE] [SHAPE ...]

Trains every shape for some steps in a new process. The peak is measured in two ways, both independent of the plan's
phases:

- live: at each call of a program, the bytes of all arrays on the first device, each buffer once, plus the memory that
  the program adds according to XLA. This includes everything that the Python code keeps alive.
- kernel: the peak resident memory of the process according to Linux, minus the remainder after deleting the state. The
  allocator is configured to return large blocks immediately, so resident memory follows allocations. One device only:
  emulated devices reach their peaks at different times.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.setting import describe_setting, markdown_table

_ADAM = {"type": "adam", "learning_rate": 1e-3}
_GPT2 = {
    "type": "gpt2",
    "seq_len": 128,
    "hidden_dim": 128,
    "num_layers": 4,
    "num_heads": 4,
    "gradient_checkpointing": False,
}
_DEEP = {"type": "gpt2", "seq_len": 128, "hidden_dim": 256, "num_layers": 12, "num_heads": 4, "scan_layers": True}
_HEADS = {"num_heads": 4, "num_kv_heads": 2}
_LLAMA = {
    "type": "llama",
    "seq_len": 128,
    "hidden_dim": 256,
    "intermediate_dim": 704,
    "num_layers": 4,
    **_HEADS,
    "scan_layers": True,
}
_DPO = {
    "model": _LLAMA,
    "loss": {"type": "dpo"},
    "data": {"tokenizer": "bytes", "format": {"type": "preference"}},
    "trainer": {"train_batch_size": 16, "initialize_from": "base"},
}
_DISTILLATION = {
    "model": _LLAMA,
    "loss": {"type": "distillation", "teacher": "big", "teacher_model": {**_LLAMA, "hidden_dim": 512}},
    "trainer": {"train_batch_size": 16},
}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2 nano": {"model": _GPT2, "trainer": {"train_batch_size": 32}},
    "GPT-2, 12 layers, scan and remat": {
        "model": {**_DEEP, "gradient_checkpointing": True},
        "trainer": {"train_batch_size": 32, "per_device_parallelism": 8},
    },
    "GPT-2, 12 layers, bfloat16": {
        "model": {**_DEEP, "gradient_checkpointing": True},
        "trainer": {"train_batch_size": 16, "per_device_parallelism": 8, "mp": "p=f32,c=bfloat16"},
    },
    "Llama, FSDP": {"devices": 4, "model": _LLAMA, "trainer": {"train_batch_size": 64}},
    "Llama, FSDP, Muon": {
        "devices": 4,
        "model": _LLAMA,
        "trainer": {"train_batch_size": 16},
        "optimizer": {"type": "muon"},
    },
    "Llama, Lion, averaged weights": {
        "model": _LLAMA,
        "trainer": {"train_batch_size": 16, "model_averaging": {"type": "ema"}},
        "optimizer": {"type": "lion", "learning_rate": 1e-4},
    },
    "GPT-2 nano, fast": {"model": _GPT2, "trainer": {"train_batch_size": 32, "determinism": "fast"}},
    "Llama, FSDP, fast, microbatches": {
        "devices": 4,
        "model": _LLAMA,
        "trainer": {"train_batch_size": 64, "determinism": "fast", "per_device_parallelism": 4},
    },
    "Llama, DPO beside a reference": _DPO,
    "Llama, DPO, reference precomputed": {**_DPO, "loss": {"type": "dpo", "precompute": True}},
    "Llama, distillation": _DISTILLATION,
    "Llama, FSDP, distillation by layers": {
        **_DISTILLATION,
        "devices": 4,
        "trainer": {"train_batch_size": 16, "gather": "layer"},
    },
    "Llama, distillation, teacher precomputed": {
        **_DISTILLATION,
        "loss": {**_DISTILLATION["loss"], "top_k": 16, "precompute": True},
    },
}
VOCAB, STEPS = 2048, 3


def config_of(shape: dict[str, Any]) -> Any:
    """Returns the configuration of a shape."""
    from lm_trainer.run.config.run_config import RunConfig

    sections = {name: value for name, value in shape.items() if name != "devices"}
    return RunConfig.model_validate({"data": {"tokenizer": "bytes"}, "optimizer": _ADAM, **sections})


def live_bytes(device: Any) -> int:
    """Counts the bytes of all arrays on a device. Arrays that share a buffer count once."""
    import jax

    buffers = {}
    for array in jax.live_arrays():
        for shard in () if array.is_deleted() else array.addressable_shards:
            if shard.device == device:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


@contextmanager
def watch_memory(device: Any) -> Iterator[list[int]]:
    """Collects the number of bytes in use on `device` during every program of a step."""
    import jax

    from lm_trainer.parallel.tree_sum import Shares
    from lm_trainer.step.dispatch.program import Program

    byte_counts: list[int] = []
    compiled, call = dict[Any, Any](), Program.__call__

    def call_and_count(self: Program, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        # Static arguments of a function are not arguments of its program.
        arrays = [x for x in leaves if not isinstance(x, Shares)]
        key = self, structure, tuple((x.shape, x.dtype, x.sharding) for x in arrays)
        if key not in compiled:
            compiled[key] = self.compile(*args).compiled
        executable = compiled[key]
        if any(device in s.device_set for s in jax.tree.leaves(executable.input_shardings)):
            memory = executable.memory_analysis()
            added = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
            byte_counts.append(live_bytes(device) + added)
        return executable(*(x for x in args if not isinstance(x, Shares)))

    Program.__call__ = call_and_count
    try:
        yield byte_counts
    finally:
        Program.__call__ = call


def train(setup: Any, config: Any, steps: int = STEPS) -> Any:
    """Trains some steps on random tokens. Returns the last state."""
    import jax

    from lm_trainer.run.build.example_batch import example_batch

    batch = example_batch(config, len(setup.step.local_rows()), VOCAB)
    setup.step.compile(batch)
    state = setup.init()
    for _ in range(steps):
        state, metrics = setup.step(state, setup.step.put(batch, state.step), 1e-3)
        jax.block_until_ready((state.params, metrics))
    return state


def measure_live(config: Any, devices: list[Any]) -> int:
    """Measures the peak over some steps on the first device, in bytes, without arrays that existed before."""
    import jax

    from lm_trainer.run.build.setup import build_setup

    existing = jax.live_arrays()  # held, to keep all of them alive during the measurement
    baseline = live_bytes(devices[0])
    setup = build_setup(config, VOCAB, devices)
    with watch_memory(devices[0]) as byte_counts:
        train(setup, config)
    del existing
    return max(byte_counts) - baseline


def measure_kernel(config: Any, devices: list[Any]) -> int:
    """Measures the peak of the process over some steps, minus its memory without a state, in bytes."""
    import jax

    from lm_trainer.run.build.example_batch import example_batch
    from lm_trainer.run.build.setup import build_setup

    setup = build_setup(config, VOCAB, devices)
    state = train(setup, config, 2)
    batch = example_batch(config, len(setup.step.local_rows()), VOCAB)
    _release_unused_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(STEPS):
        state, metrics = setup.step(state, setup.step.put(batch, state.step), 1e-3)
        jax.block_until_ready((state.params, metrics))
    highest = _status_bytes("VmHWM")
    del state, metrics
    _release_unused_memory()
    return highest - _status_bytes("VmRSS")


def _release_unused_memory() -> None:
    """Returns the process's unused memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def measure_figures(name: str, kind: str) -> dict[str, Any]:
    """Measures the figures of a shape: the plan and `live`, or only `kernel`."""
    import jax

    from lm_trainer.plan.memory import StepMemory

    shape = SHAPES[name]
    jax.config.update("jax_num_cpu_devices", shape.get("devices", 1))
    config, devices = config_of(shape), jax.devices()
    if kind == "kernel":
        return {"kernel": measure_kernel(config, devices)}
    figures: dict[str, Any] = {"live": measure_live(config, devices)}
    for name, platform in (("plan", "gpu"), ("plan here", "cpu")):
        memory = StepMemory(config, VOCAB, devices, platform)
        peak = memory.plan().peak
        figures |= {name: peak.bytes, "phase": peak.name}
    return figures


def measure_in_own_process(name: str, kind: str, cache: str) -> dict[str, Any]:
    """Runs `measure_figures` in a new process. `cache` is a directory for compiled programs."""
    command = [sys.executable, "-m", "benchmarks.plan_error", name, "--figure", kind]
    threshold = str(64 * 1024)
    allocator = {"MALLOC_MMAP_THRESHOLD_": threshold, "MALLOC_TRIM_THRESHOLD_": threshold}
    compiled = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env = {**os.environ, **allocator, **compiled, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table_row(name: str) -> list[str]:
    """Returns the table row of a shape."""
    count = SHAPES[name].get("devices", 1)
    with tempfile.TemporaryDirectory() as cache:
        figures = measure_in_own_process(name, "live", cache)
        if count == 1:
            figures |= measure_in_own_process(name, "kernel", cache)
    cells = [name, str(count), figures["phase"]]
    for plan, measured in ((figures["plan"], figures["live"]), (figures["plan here"], figures.get("kernel"))):
        megabytes = [f"{x / 2**20:.1f}" for x in (plan, measured or math.nan)]
        cells += [*megabytes, f"{plan / measured - 1:+.1%}"] if measured else [""] * 3
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of: {'; '.join(SHAPES)}. Default: all.")
    parser.add_argument("--results", type=Path, help="write the report to this file too")
    parser.add_argument("--figure", choices=("live", "kernel"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.figure:
        print(json.dumps(measure_figures(arguments.shapes[0], arguments.figure)))
        return
    rows = []
    for name in arguments.shapes or SHAPES:
        rows.append(table_row(name))
        print(*rows[-1], sep="  ", flush=True)
    figures = ("plan, MiB", "live, MiB", "error", "plan here, MiB", "kernel, MiB", "error")
    heads = ["shape", "devices", "peak is in", *figures]
    text = f"""# How far `lmt plan` is from the memory that training takes

`python -m benchmarks.plan_error` on {describe_setting("jax", "jaxlib", "flax", "optax")}

{markdown_table(heads, rows)}

Bytes of one device at its highest over {STEPS} training steps, with a vocabulary of {VOCAB} and AdamW unless the shape
says otherwise. `plan` is what `lmt plan` predicts, and `peak is in` the phase where. `live` adds up, whenever a program
is called, the arrays that exist on the device and what XLA says that this program adds; it shares XLA's figure with
the plan, and so checks what lives at the same time. `plan here`, to which `peak is in` belongs, has the lanes that this
CPU computes side by side, which `live` cannot see. `kernel` is the resident memory of the process at its highest, less
what is left once the state is gone, and shares nothing; with several emulated devices in one process there is no such
figure. An error is that of the plan against the measurement.

This is the error on the platform that XLA plans for here, a CPU. It says nothing of the difference between XLA's plan
for a CPU and its plan for an accelerator. `live` has the copies that a CPU makes in an update; `plan`, which is for an
accelerator, leaves them out.
"""
    print(text)
    if arguments.results:
        arguments.results.write_text(text)


if __name__ == "__main__":
    main()
