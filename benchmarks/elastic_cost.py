"""Cost of elastic determinism: compares time, memory and traffic of `elastic` and `layerwise` steps with `fast`.

All kinds train the same model with the same global batch. They alternate step by step and pass the state on to each
other, so that changes of the machine's speed affect all of them equally. `fast` computes all rows of a device at once.
Another kind of `fast` computes them in the microbatches of `elastic`. Activations are saved for the gradient, except in
the recomputing kinds.

    python -m benchmarks.elastic_cost                  # 1, 2, 4 and 8 emulated devices, or all GPUs
    python -m benchmarks.elastic_cost --devices 1 --results benchmarks/results/elastic_cost.md
    python -m benchmarks.elastic_cost --shape llama-30m --batch 8 --kinds elastic layerwise fast

Emulated devices share the cores of the machine. With more devices than cores, the times show the overhead of dividing
the work, but not the speed-up.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.setting import describe_load

SELF = [sys.executable, "-m", "benchmarks.elastic_cost"]
RECOMPUTING = ", recomputing"
KINDS: dict[str, dict[str, Any]] = {
    "elastic": {"gather": "model"},
    "layerwise": {"gather": "layer"},
    "fast": {"determinism": "fast"},
    "fast in microbatches": {"determinism": "fast", "microbatches": True},
    "elastic, recomputing": {"gather": "model"},
    "layerwise, recomputing": {"gather": "layer"},
    "fast, recomputing": {"determinism": "fast"},
}


@dataclass(frozen=True)
class Cost:
    """Cost of one kind of step on a number of devices."""

    seconds: list[float]
    cpu: list[float]
    """CPU seconds of all threads of the process in each of the same steps."""
    temporary: float
    """Bytes of temporary memory per device of the largest program."""
    planned: int
    """Peak bytes per device that `lmt plan` predicts."""
    sent: dict[str, float]
    """Bytes that each device sends per step, by collective."""


def build_setup_of_kind(kind: str, devices: int, size: argparse.Namespace) -> Any:
    """Builds the training setup for the model that `size` selects."""
    import jax

    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.run.config.run_config import RunConfig

    settings, shape = dict(KINDS[kind]), select_shape(size)
    rows = {"per_device_parallelism": size.batch // 8} if settings.pop("microbatches", False) else {}
    config = RunConfig.model_validate(
        {
            "model": {
                **shape.model_section(),
                "scan_layers": True,
                "gradient_checkpointing": kind.endswith(RECOMPUTING),
            },
            "data": {"tokenizer": "bytes"},
            "trainer": {"train_batch_size": size.batch, "mp": size.mp, **rows, **settings},
            "optimizer": {"type": "adam", "learning_rate": 1e-3},
        }
    )
    return build_setup(config, shape.vocab, jax.devices()[:devices])


def select_shape(size: argparse.Namespace) -> Shape:
    """Returns the model that the options select."""
    if size.shape:
        return replace(SHAPES[size.shape], seq_len=size.seq_len, rows=size.batch)
    return Shape("gpt2", size.layers, size.hidden, size.hidden // 64, seq_len=size.seq_len, rows=size.batch, vocab=2048)


def make_batch(size: argparse.Namespace) -> Any:
    """Makes a batch of random rows for the model."""
    from lm_trainer.profile.workload import random_batch

    shape = select_shape(size)
    return random_batch(size.batch, shape.seq_len, shape.vocab)


def make_timed_step(setup: Any, size: argparse.Namespace) -> Callable[[Any], tuple[Any, float, float]]:
    """Makes a function that advances a state by one step, and returns it with the step's wall and CPU seconds."""
    import jax

    batch = make_batch(size)
    setup.step.compile(batch)
    placed = setup.step.put(batch)

    def timed_step(state: Any) -> tuple[Any, float, float]:
        started, used = time.perf_counter(), time.process_time()
        state, metrics = setup.step(state, placed, 1e-3)
        jax.block_until_ready((state.params, metrics))
        return state, time.perf_counter() - started, time.process_time() - used

    return timed_step


def measure(devices: int, size: argparse.Namespace) -> dict[str, Cost]:
    """Measures all kinds on a number of devices, alternating between the kinds."""
    # With 8 devices, each device has one microbatch, so both kinds of `fast` are the same.
    kinds = [kind for kind in size.kinds if not (kind == "fast in microbatches" and devices == 8)]
    programs = {kind: build_setup_of_kind(kind, devices, size) for kind in kinds}
    state = programs[kinds[0]].init()
    runs = {kind: make_timed_step(setup, size) for kind, setup in programs.items()}
    for run in runs.values():
        # The first kind compiles programs that the other kinds reuse.
        for _ in range(2):
            state, _, _ = run(state)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(size.pairs):
        # Reverse every other turn, so that no kind always follows the same kind.
        for kind in kinds if turn % 2 else reversed(kinds):
            state, elapsed, used = runs[kind](state)
            seconds[kind].append(elapsed)
            cpu[kind].append(used)
    return {kind: Cost(seconds[kind], cpu[kind], *read_program_figures(kind, devices, size)) for kind in kinds}


def read_program_figures(kind: str, devices: int, size: argparse.Namespace) -> tuple[float, int, dict[str, float]]:
    """Reads `temporary`, `planned` and `sent` of `Cost` from the compiled programs of a step."""
    import jax

    from lm_trainer.parallel.rehearsal import on_one_shard
    from lm_trainer.profile.collectives import bytes_sent
    from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms

    programs, sent = MeasuredPrograms(), dict[str, float]()
    with on_one_shard():
        setup = build_setup_of_kind(kind, devices, size)
    row = jax.tree.map(lambda x: x[:1], make_batch(size))
    with programs.measure_for_rows(1) as measure:
        record = setup.rehearse(row, jax.default_backend(), measure)
    for key, runs in record.runs.items():
        for name, count in bytes_sent(programs.texts[key]).items():
            sent[name] = sent.get(name, 0.0) + runs * count
    phases = record.phases
    return max(phase.parts["temporary"] for phase in phases), max(phase.bytes for phase in phases), sent


def measure_peak_bytes(kind: str, devices: int, size: argparse.Namespace) -> float:
    """Measures the peak memory of a device over some steps in a new process, if the backend reports it."""
    command = [*SELF, "--peak-of", kind, "--devices", str(devices), *size.forwarded]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def table_lines(counts: Sequence[int], size: argparse.Namespace) -> Iterator[str]:
    """Measures each number of devices in a new process, because unused devices would have unused threads."""
    yield (
        "| devices | step | median ms | spread ms | CPU ms | time / fast | CPU / fast | time / elastic | CPU / elastic "
        "| temporary MiB | planned MiB | peak MiB | sent MiB | of a ring's |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for devices in counts:
        command = [*SELF, "--rows-of", str(devices), *size.forwarded]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield from done.stdout.splitlines()


def table_rows(devices: int, size: argparse.Namespace) -> Iterator[str]:
    """Yields the table rows for a number of devices."""
    import jax

    with_peak = jax.devices()[0].memory_stats() is not None
    costs = measure(devices, size)
    ring = 2 * (devices - 1) / devices * parameter_bytes(size)
    for kind, cost in costs.items():
        # Kinds with recomputation are compared only with each other.
        baselines = [costs.get(baseline + RECOMPUTING * kind.endswith(RECOMPUTING)) for baseline in ("fast", "elastic")]
        ratios = " | ".join(
            f"{median_ratio(cost.seconds, baseline.seconds)} | {median_ratio(cost.cpu, baseline.cpu)}"
            if baseline
            else "- | -"
            for baseline in baselines
        )
        low, _, high = statistics.quantiles(cost.seconds, n=4)
        sent = sum(cost.sent.values())
        peak = f"{measure_peak_bytes(kind, devices, size) / 2**20:,.0f}" if with_peak else "-"
        yield (
            f"| {devices} | {kind} | {1e3 * statistics.median(cost.seconds):.1f} "
            f"| {1e3 * low:.1f} to {1e3 * high:.1f} | {1e3 * statistics.median(cost.cpu):.1f} | {ratios} "
            f"| {cost.temporary / 2**20:,.1f} | {cost.planned / 2**20:,.1f} | {peak} | {sent / 2**20:,.2f} "
            f"| {f'{sent / ring:.2f}' if ring else '-'} |"
        )


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> str:
    """Formats the median over all turns of the ratio between a value and the baseline in the same turn."""
    return f"{statistics.median(a / b for a, b in zip(values, baseline, strict=True)):.3f}"


def parameter_bytes(size: argparse.Namespace) -> float:
    """Returns the bytes of all parameters in the dtype that is used for communication."""
    shapes = build_setup_of_kind(size.kinds[0], 1, size).model.shapes.values()
    return float(sum(x.size * x.dtype.itemsize for x in shapes))


def report(counts: Sequence[int], size: argparse.Namespace) -> Iterator[str]:
    import jax

    from lm_trainer.core.runtime import available_cores

    device = jax.devices()[0]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "optax"))
    yield "# What elastic determinism costs"
    yield ""
    yield f"`{shlex.join(['python', '-m', *SELF[2:], *size.forwarded])}` on {device.device_kind} ({device.platform}),"
    yield f"{platform.platform()}, {available_cores()} CPU cores; Python {platform.python_version()}, {packages}."
    yield f"Commit {current_commit()}. {select_shape(size).describe()}; {size.mp}, with"
    yield f"{parameter_bytes(size) / 2**20:.1f} MiB of parameters; {size.pairs} steps of each kind in turn."
    yield describe_load("at the start")
    yield ""
    yield from table_lines(counts, size)
    yield ""
    yield "Times: medians and quartiles; the columns of ratios are medians over the turns of a step's time, or of the"
    yield "CPU time of all threads, by that of the other kind in the same turn; kinds that compute the inside of layers"
    yield "again are compared with those that do so too. Temporary memory: XLA's, of the largest program. Planned: the"
    yield "most that a device holds, as `lmt plan` counts it. Sent: by each device in a step, read from the compiled"
    yield "programs; a ring sends 2 (n - 1) / n times the parameters, to gather them and to add gradients. Layer by"
    yield "layer they are gathered for the forward and for the backward pass."
    if device.platform == "cpu":
        yield f"Emulated devices share {available_cores()} cores: beyond that many devices, times show overhead only."


def current_commit() -> str:
    directory, command = Path(__file__).parent, ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=int, nargs="*", help="numbers of devices; by default 1, 2, 4, 8 up to the available ones"
    )
    parser.add_argument("--pairs", type=int, default=12, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=32, help="rows in the global batch, a multiple of 8")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=list(SHAPES), help="one of benchmarks/peers, instead of these two")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--mp", default="f32", help="as trainer.mp")
    parser.add_argument("--results", type=Path, help="write the report to this file too")
    parser.add_argument("--rows-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", choices=list(KINDS), help=argparse.SUPPRESS)
    size = parser.parse_args()
    model = ("shape",) if size.shape else ("hidden", "layers")
    names = ("pairs", "batch", "seq_len", *model, "mp")
    size.forwarded = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(size, name)))]
    size.forwarded += ["--kinds", *size.kinds]

    from lm_trainer.core.runtime import prepare_process

    prepare_process()

    import jax

    jax.config.update("jax_num_cpu_devices", size.rows_of or 8)
    if size.rows_of:
        print(*table_rows(size.rows_of, size), sep="\n")
        return
    if size.peak_of:
        setup = build_setup_of_kind(size.peak_of, size.devices[0], size)
        run, state = make_timed_step(setup, size), setup.init()
        for _ in range(4):
            state, _, _ = run(state)
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
