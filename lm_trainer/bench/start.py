"""Measures the time from process start to the end of the first step, with an empty and a warm compilation cache.

Each start is a separate process: `python -m lm_trainer.bench.start` reads a configuration from standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.profile.timing import BenchResult, Spread
from lm_trainer.run.config.run_config import RunConfig

PHASES = {
    "imports": "Python and its packages",
    "compile": "tracing and compiling the gradient",
    "initialise": "weights and optimizer state",
    "first_step": "first step, with what is still to be compiled",
    "total": "from the start of the process",
}
_BUILT, _READ = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"


def measure_starts(config: RunConfig, *, repeats: int) -> BenchResult:
    """Alternates between a start with an empty cache and a start with the cache that the previous start has filled.

    Raises:
        UserError: if a start fails. The message contains the last line of its error output.
    """
    starts_by_kind: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            trainer = config.trainer.model_copy(update={"jax_compilation_cache_dir": cache})
            text = config.model_copy(update={"trainer": trainer}).model_dump_json()
            # The order matters: the first start fills the cache that the second one reads.
            for start in starts_by_kind.values():
                start.append(_run_start(text))
            size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    spreads = {
        kind: {phase: Spread.from_values([start[phase] for start in starts]) for phase in PHASES}
        for kind, starts in starts_by_kind.items()
    }
    programs = {kind: int(starts[-1]["programs"]) for kind, starts in starts_by_kind.items()}
    read = {kind: int(starts[-1]["read"]) for kind, starts in starts_by_kind.items()}
    values: dict[str, Any] = {
        "samples": repeats,
        "cache_bytes": size,
        "programs_built": programs,
        "programs_read": read,
        **{kind: {phase: spread.as_dict() for phase, spread in phases.items()} for kind, phases in spreads.items()},
    }
    names = {"cold": "empty cache", "warm": "second start"}
    table = [
        (f"{names[kind]}: {phase.replace('_', ' ')}", f"{spread.median:.2f} s ({PHASES[phase]})")
        for kind, phases in spreads.items()
        for phase, spread in phases.items()
    ]
    ratio = spreads["warm"]["total"].median / spreads["cold"]["total"].median
    table += [
        (
            "programs",
            f"{programs['cold']} at the first start, {programs['warm']} at the second, which read {read['warm']} of "
            f"them from the cache and compiled the others, which take too little time to be kept",
        ),
        ("second start", f"takes {ratio:.0%} of the first; the cache holds {size / 2**20:.1f} MiB; {repeats} of each"),
    ]
    return BenchResult(table, values)


def _run_start(config: str) -> dict[str, float]:
    # The clock starts here, to include the start of the Python interpreter.
    command = [sys.executable, "-m", "lm_trainer.bench.start", repr(time.time())]
    done = subprocess.run(command, input=config, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the run cannot start: {(done.stderr.strip().splitlines() or ['no reason was given'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Performs one start, and prints the time of each phase in seconds as JSON, or an error on stderr."""
    try:
        _measure_phases()
    except UserError as error:
        sys.exit(str(error))


def _measure_phases() -> None:
    # Modules are imported here, because the import time is one of the phases.
    started = float(sys.argv[1])
    from lm_trainer.core.runtime import prepare_process

    prepare_process()
    import jax

    from lm_trainer.run.build.example_batch import example_batch
    from lm_trainer.run.dry_run import configure_and_build_setup

    marks = {"imports": time.time() - started}
    events: Counter[str] = Counter()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event]))
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

    def mark(phase: str, since: float) -> float:
        marks[phase] = time.time() - since
        return time.time()

    config = RunConfig.model_validate_json(sys.stdin.read())
    phase_start = time.time()
    program, vocab_size = configure_and_build_setup(config)
    batch = example_batch(config, len(program.step.local_rows()), vocab_size)
    program.step.compile(batch)
    phase_start = mark("compile", phase_start)
    state = jax.block_until_ready(program.init())
    phase_start = mark("initialise", phase_start)
    jax.block_until_ready(program.step(state, program.step.put(batch), 1e-3))
    mark("first_step", phase_start)
    mark("total", started)
    sys.stdout.write(json.dumps({**marks, "programs": events[_BUILT], "read": events[_READ]}) + "\n")


if __name__ == "__main__":
    main()
