"""Times `lmt train` and a plain script from the command to the first step, and compilation with more layers.

    python -m benchmarks.start_up

The plain script imports the usual packages (jax, flax, optax, orbax, grain) and trains the same GPT-2 on tokens in
memory, with the plain JAX step of `benchmarks.peers`. `lmt train` reads its configuration, and opens its existing token
cache and its run directory. Both start alternately, first with an empty cache of compiled programs, and then with the
cache that the first start wrote. The time ends when the loss of the first step is known.

The second table shows times for compiling the gradient of a GPT-2 microbatch with scanned layers, without a cache. The
numbers of layers alternate.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.setting import LMT, describe_load, describe_setting, markdown_table

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "nano"
_FIRST_STEP = re.compile(r"^step 1/\d+ .*\bloss (\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs=2, default=(12, 48))
    parser.add_argument("--plain", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        run_plain_script(*map(Path, options.plain))
        return
    rows = measure_start_rows(options.turns)
    compiled, ratio = measure_compile_rows(options.turns, options.layers)
    print("# Starting\n")
    print(
        describe_setting("jax", "flax", "optax", "orbax-checkpoint", "grain"),
        f"{options.turns} turns.",
        describe_load(),
    )
    print(f"\n{markdown_table(['', 'lmt train, s', 'plain script, s', 'lmt / plain (range)'], rows)}")
    print(f"\n{markdown_table(['layers', 's to compile', 'range'], compiled)}")
    print(f"\n{options.layers[1]} layers take {ratio:.2f} times as long to compile as {options.layers[0]}.")


def measure_start_rows(turns: int) -> list[list[str]]:
    kinds = ("empty cache of programs", "filled cache of programs")
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        weights = directory / "weights.npz"
        subprocess.run([sys.executable, "-m", "benchmarks.peers.lmt_step", SHAPE, str(weights)], cwd=ROOT, check=True)
        time_lmt_start(directory, directory / "first", "first")  # builds the cache of tokens
        for turn in range(turns):
            for kind in kinds:
                lmt = time_lmt_start(directory, directory / f"lmt-{turn}", f"{turn}-{kinds.index(kind)}")
                plain = time_plain_start(weights, directory / f"plain-{turn}")
                seconds[kind].append((lmt, plain))
    rows = []
    for kind, pairs in seconds.items():
        lmt, plain = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratios = sorted(a / b for a, b in pairs)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([kind, f"{lmt:.1f}", f"{plain:.1f}", spread])
    return rows


def time_lmt_start(directory: Path, programs: Path, run: str) -> float:
    """Returns the seconds from the start of `lmt train` in `directory` until it shows the loss of its first step."""
    command = [*LMT, "train", str(ROOT / "configs/gpt2_nano.yaml")]
    # AdamW, as the plain script has it.
    settings = ["model.seq_len=128", "trainer.train_batch_size=32", "data.tokenizer=bytes", "optimizer.type=adam"]
    command += [*settings, f"trainer.id={run}", f"trainer.jax_compilation_cache_dir={programs}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LMT_PROGRESS": "plain"}
    return _seconds_until_first_step(command, directory, environment)


def time_plain_start(weights: Path, programs: Path) -> float:
    """Returns the seconds from the start of the plain script until the end of its first step."""
    command = [sys.executable, "-m", "benchmarks.start_up", "--plain", str(weights), str(programs)]
    return _seconds_until_first_step(command, ROOT, dict(os.environ))


def _seconds_until_first_step(command: Sequence[str], directory: Path, environment: dict[str, str]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if _FIRST_STEP.match(line):
                seconds = time.perf_counter() - started
                process.kill()
                return seconds
    sys.exit(f"{' '.join(command)} ended without a step")


def run_plain_script(weights: Path, programs: Path) -> None:
    """Runs a plain script up to its first step."""
    import flax.nnx  # noqa: F401 - a usual script builds its model with it
    import grain  # noqa: F401 - and reads its data with it
    import jax
    import orbax.checkpoint  # noqa: F401 - and saves with it

    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

    from benchmarks.peers.jax_twin import make
    from benchmarks.peers.shapes import SHAPES

    loss = make(SHAPES[SHAPE], weights).step(0)
    print(f"step 1/1 | loss {loss:.4f}", flush=True)


def measure_compile_rows(turns: int, layers: Sequence[int]) -> tuple[list[list[str]], float]:
    """Times compilation of the gradient for each number of layers. Also returns the ratio of the last to the first."""
    import jax

    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.run.config.run_config import RunConfig

    jax.config.update("jax_enable_compilation_cache", False)
    seconds: dict[int, list[float]] = {count: [] for count in layers}
    for _ in range(turns):
        for count in layers:
            model = {"type": "gpt2", "seq_len": 128, "hidden_dim": 128, "num_heads": 4, "num_layers": count}
            model |= {"scan_layers": True}
            config = RunConfig.model_validate({"model": model, "data": {"tokenizer": "bytes"}})
            setup = build_setup(config, 512, jax.devices()[:1])
            batch = random_batch(config.trainer.batch_schedule.at(0), 128, 512)
            started = time.perf_counter()
            setup.step.compile(batch)
            seconds[count].append(time.perf_counter() - started)
    rows = [
        [str(count), f"{statistics.median(of):.2f}", f"{min(of):.2f} to {max(of):.2f}"] for count, of in seconds.items()
    ]
    first, last = (seconds[count] for count in (layers[0], layers[-1]))
    return rows, statistics.median(b / a for a, b in zip(first, last, strict=True))


if __name__ == "__main__":
    main()
