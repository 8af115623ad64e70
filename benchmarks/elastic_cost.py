"""The cost of elastic determinism: step time, memory and traffic of `elastic` and `layerwise` steps against `fast`.

All train the same model with the same global batch, and take turns step by step, so that a machine whose speed drifts
slows them all. `fast` computes a device's rows at once, or, as the second twin, in the microbatches of `elastic`. The
inside of layers is kept for the gradient, but by `layerwise` and by the twin of `elastic` that computes it again too.

    python benchmarks/elastic_cost.py                  # 1, 2, 4 and 8 emulated devices, or as many GPUs as there are
    python benchmarks/elastic_cost.py --devices 1 --results benchmarks/results/elastic_cost.md

Emulated devices share the cores of the machine: with more devices than cores, times show the overhead of dividing the
work, not its gain.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

VOCAB = 2048
KINDS: dict[str, dict[str, Any]] = {
    "elastic": {},
    "elastic, recomputing": {"recompute": True},
    "layerwise": {"determinism": "layerwise"},
    "fast": {"determinism": "fast"},
    "fast in microbatches": {"determinism": "fast", "microbatches": True},
}


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of step on some devices."""

    seconds: list[float]
    temporary: float
    """Temporary bytes on each device, of the program that takes most."""
    planned: int
    """The most bytes that each device holds, by the plan of `lmt plan`."""
    sent: dict[str, float]
    """Bytes that each device sends in a step, by collective."""


def plan(kind: str, devices: int, size: argparse.Namespace) -> Any:
    """The program of a GPT-2 of `size`."""
    import jax

    from lm_trainer.run.config import RunConfig
    from lm_trainer.run.program import build_program

    settings = dict(KINDS[kind])
    recompute = settings.pop("recompute", False)
    rows = {"per_device_parallelism": size.batch // 8} if settings.pop("microbatches", False) else {}
    model = {"type": "gpt2", "seq_len": size.seq_len, "hidden_dim": size.hidden, "num_layers": size.layers}
    config = RunConfig.model_validate(
        {
            "model": {
                **model,
                "num_heads": size.hidden // 64,
                "scan_layers": True,
                "gradient_checkpointing": recompute,
            },
            "data": {"tokenizer": "bytes"},
            "trainer": {"train_batch_size": size.batch, "mp": size.mp, **rows, **settings},
            "optimizer": {"type": "adam", "learning_rate": 1e-3},
        }
    )
    return build_program(config, VOCAB, jax.devices()[:devices])


def steps_of(program: Any, size: argparse.Namespace) -> Callable[[], float]:
    """A function that runs one step and returns how many seconds it took."""
    import jax

    from lm_trainer.profile.workload import random_batch

    batch = random_batch(size.batch, size.seq_len, VOCAB)
    program.step.compile(batch)
    placed, state = program.step.put(batch), program.init()

    def run() -> float:
        nonlocal state
        started = time.perf_counter()
        state, metrics = program.step(state, placed, 1e-3)
        jax.block_until_ready((state.params, metrics))
        return time.perf_counter() - started

    return run


def measure(devices: int, size: argparse.Namespace) -> dict[str, Cost]:
    """All kinds on some devices, in turn."""
    # On 8 devices each has one microbatch: both kinds of `fast` are the same there.
    kinds = [kind for kind in KINDS if not (kind == "fast in microbatches" and devices == 8)]
    programs = {kind: plan(kind, devices, size) for kind in kinds}
    runs = {kind: steps_of(program, size) for kind, program in programs.items()}
    for run in runs.values():
        # The first compiles what the others reuse.
        run()
        run()
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(size.pairs):
        # Every other turn backwards, so that no kind always follows the same one.
        for kind in kinds if turn % 2 else reversed(kinds):
            seconds[kind].append(runs[kind]())
    return {kind: Cost(seconds[kind], *read_off(program, size)) for kind, program in programs.items()}


def read_off(program: Any, size: argparse.Namespace) -> tuple[float, int, dict[str, float]]:
    """Figures of the compiled programs of a step: `temporary`, `planned` and `sent` of `Cost`."""
    import jax

    from lm_trainer.plan.memory import ProgramBytes, phase_bytes, state_bytes
    from lm_trainer.profile.collectives import bytes_sent
    from lm_trainer.profile.workload import random_batch

    step, batch = program.step, random_batch(size.batch, size.seq_len, VOCAB)
    plan = step.plans.at(0)
    phases = [*step.phases(batch, plan, jax.default_backend())]
    compiled = {phase.program.name: phase.program.compile() for phase in phases}
    sent: dict[str, float] = {}
    for phase in phases:
        for name, count in bytes_sent(compiled[phase.program.name].hlo()).items():
            sent[name] = sent.get(name, 0.0) + phase.runs * count
    programs = {name: ProgramBytes.of(executable) for name, executable in compiled.items()}
    rows = plan.per_shard(program.sharding.mesh) * plan.rows
    held = {
        "state": sum(state_bytes(program.init()).values()),
        "batch": rows * sum(x.nbytes for x in jax.tree.leaves(batch)) // size.batch,
    }
    peak = max(phase.bytes for phase in phase_bytes(phases, programs, held))
    return max(each.temporary for each in programs.values()), peak, sent


def peak_bytes(kind: str, devices: int, size: argparse.Namespace) -> float:
    """The most memory that a device held over some steps, where the backend tells; in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", kind, "--devices", str(devices), *size.shape]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def table(counts: Sequence[int], size: argparse.Namespace) -> Iterator[str]:
    """Each number of devices in a process of its own: more devices than are used are more threads than are used."""
    yield (
        "| devices | step | median ms | spread ms | against fast | against elastic | temporary MiB | planned MiB "
        "| peak MiB | sent MiB | of a ring's |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for devices in counts:
        command = [sys.executable, __file__, "--rows-of", str(devices), *size.shape]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield from done.stdout.splitlines()


def rows(devices: int, size: argparse.Namespace) -> Iterator[str]:
    """The lines of the table for some devices."""
    import jax

    with_peak = jax.devices()[0].memory_stats() is not None
    costs = measure(devices, size)
    ring = 2 * (devices - 1) / devices * parameter_bytes(size)
    for kind, cost in costs.items():
        fast, elastic = (
            statistics.median(a / b for a, b in zip(cost.seconds, costs[other].seconds, strict=True))
            for other in ("fast", "elastic")
        )
        low, _, high = statistics.quantiles(cost.seconds, n=4)
        sent = sum(cost.sent.values())
        peak = f"{peak_bytes(kind, devices, size) / 2**20:,.0f}" if with_peak else "-"
        yield (
            f"| {devices} | {kind} | {1e3 * statistics.median(cost.seconds):.1f} "
            f"| {1e3 * low:.1f} to {1e3 * high:.1f} | {fast:.3f} | {elastic:.3f} "
            f"| {cost.temporary / 2**20:,.1f} | {cost.planned / 2**20:,.1f} | {peak} | {sent / 2**20:,.2f} "
            f"| {f'{sent / ring:.2f}' if ring else '-'} |"
        )


def parameter_bytes(size: argparse.Namespace) -> float:
    """Bytes of all parameters in the dtype in which devices send them."""
    shapes = plan("elastic", 1, size).model.shapes.values()
    return float(sum(x.size * x.dtype.itemsize for x in shapes))


def report(counts: Sequence[int], size: argparse.Namespace) -> Iterator[str]:
    import jax

    from lm_trainer.core.runtime import available_cores

    device = jax.devices()[0]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "optax"))
    yield "# What elastic determinism costs"
    yield ""
    yield f"`python benchmarks/elastic_cost.py {' '.join(size.shape)}` on {device.device_kind} ({device.platform}),"
    yield f"{platform.platform()}, {available_cores()} CPU cores; Python {platform.python_version()}, {packages}."
    yield f"Commit {commit()}. GPT-2 of {size.layers} layers and width {size.hidden}, {size.mp}, with"
    yield f"{parameter_bytes(size) / 2**20:.1f} MiB of parameters; {size.batch} rows of {size.seq_len} tokens;"
    yield f"{size.pairs} steps of each kind in turn."
    yield ""
    yield from table(counts, size)
    yield ""
    yield "Times: medians and quartiles; `against fast` and `against elastic` are medians over the turns of a step's"
    yield "time by that of the other in the same turn. Temporary memory: XLA's, of the largest program. Planned: the"
    yield "most that a device holds, as `lmt plan` counts it. Sent: by each device in a step, read from the compiled"
    yield "programs; a ring sends 2 (n - 1) / n times the parameters, to gather them and to add gradients. Layer by"
    yield "layer they are gathered for the forward and for the backward pass."
    if device.platform == "cpu":
        yield f"Emulated devices share {available_cores()} cores: beyond that many devices, times show overhead only."


def commit() -> str:
    here, command = Path(__file__).parent, ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=int, nargs="*", help="how many; by default 1, 2, 4, 8 as far as there are any"
    )
    parser.add_argument("--pairs", type=int, default=12, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=32, help="rows in the global batch, a multiple of 8")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mp", default="f32", help="as trainer.mp")
    parser.add_argument("--results", type=Path, help="write the report to this file as well")
    parser.add_argument("--rows-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", choices=list(KINDS), help=argparse.SUPPRESS)
    size = parser.parse_args()
    names = ("pairs", "batch", "seq_len", "hidden", "layers", "mp")
    size.shape = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(size, name)))]

    from lm_trainer.core.runtime import prepare_process

    prepare_process()

    import jax

    jax.config.update("jax_num_cpu_devices", size.rows_of or 8)
    if size.rows_of:
        print(*rows(size.rows_of, size), sep="\n")
        return
    if size.peak_of:
        run = steps_of(plan(size.peak_of, size.devices[0], size), size)
        for _ in range(4):
            run()
        stats = [device.memory_stats() for device in jax.devices()[: size.devices[0]]]
        print(max(s["peak_bytes_in_use"] for s in stats))
        return
    counts = size.devices or [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    lines = []
    for line in report(counts, size):
        print(line, flush=True)
        lines.append(line)
    if size.results:
        size.results.parent.mkdir(parents=True, exist_ok=True)
        size.results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
