"""Runs all measurements that need a GPU, one after another, in under 25 minutes of GPU time.

    python -m benchmarks.gpu --results benchmarks/results/1xH100
    python -m benchmarks.gpu --only mfu determinism
    python -m benchmarks.gpu --small               # the same on small shapes, without a GPU

Every part is a separate command with a time limit, and its output goes to a file in `--results`. If a part fails, the
others continue, and the failed part is named at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.setting import LMT, describe_setting

ROOT = Path(__file__).resolve().parents[1]
_SMALL = [
    "model.seq_len=32",
    "model.hidden_dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.cross_entropy_block_size=null",
    "data.tokenizer=bytes",
    "trainer.train_batch_size=8",
    "trainer.elastic_shards=8",
    "trainer.num_train_steps=4",
]
_SMALL_LLAMA = ["model.num_kv_heads=1", "model.intermediate_dim=64"]


@dataclass(frozen=True)
class BenchmarkPart:
    """One or several commands, all of which must succeed."""

    name: str
    description: str
    commands: tuple[list[str], ...]
    minutes: float
    """Time limit in minutes."""


def make_parts(small: bool, directory: Path) -> Iterator[BenchmarkPart]:
    """Yields all parts in order of importance."""
    gpt2, llama = (_workload_arguments(name, small) for name in ("gpt2_124m", "llama_1b"))
    repeats = ["--repeats", "2"] if small else []
    mfu = [[*LMT, "bench", "mfu", *of, "--roofline"] for of in (gpt2, llama)]
    yield BenchmarkPart("mfu", "MFU and roofline of both workloads", tuple(mfu), 4)
    shapes = ("tiny", "llama-tiny") if small else ("124m-gpu", "llama-1b")
    turns = ["--turns", "1" if small else "9"]
    yield BenchmarkPart("peers_gpt2", "GPT-2 beside PyTorch and plain JAX", (_peers_command(shapes[0], turns),), 5)
    # Each of these kinds needs 20 GB for weights and moments, so only two run at a time.
    pairs = [["lmt", "torch compile"], ["lmt", "lmt fast"], ["lmt", "jax twin"]]
    yield BenchmarkPart(
        "peers_llama", "Llama beside each", tuple(_peers_command(shapes[1], [*turns, "--kinds", *p]) for p in pairs), 6
    )
    yield BenchmarkPart("elastic_cost", "what elastic determinism costs", (_elastic_cost_command(small),), 3)
    runs = [[*LMT, "train", *gpt2, f"trainer.id={run}"] for run in ("once", "again")]
    compared = [*LMT, "diff", str(directory / "logs/once"), str(directory / "logs/again")]
    yield BenchmarkPart("determinism", "one run twice, compared bit by bit", (*runs, compared), 4)
    memory = [[*LMT, "bench", "memory", *of, *repeats] for of in (gpt2, llama)]
    yield BenchmarkPart("memory", "what recomputation and blocks of the loss save", tuple(memory), 3)


def _workload_arguments(name: str, small: bool) -> list[str]:
    shrunk = [*_SMALL, *(_SMALL_LLAMA if name == "llama_1b" else [])]
    return [str(ROOT / f"benchmarks/workloads/{name}.yaml"), *(shrunk if small else [])]


def _peers_command(shape: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.peers", "--shape", shape, *options]


def _elastic_cost_command(small: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.elastic_cost", "--devices", "1"]
    if small:
        return [*command, "--pairs", "2", "--batch", "8", "--seq-len", "16", "--hidden", "64", "--layers", "1"]
    shape = ["--batch", "128", "--seq-len", "1024", "--hidden", "768", "--layers", "12", "--mp", "p=f32,c=bfloat16"]
    return [*command, *shape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="a directory for the output of each part")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts by name; an unknown name lists them")
    parser.add_argument("--small", action="store_true", help="small shapes, to try this script")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        by_name = {part.name: part for part in make_parts(options.small, directory)}
        if unknown := set(options.only or ()) - set(by_name):
            sys.exit(f"--only {' '.join(sorted(unknown))}: there are {', '.join(by_name)}")
        chosen = [part for part in by_name.values() if not options.only or part.name in options.only]
        failed = [part.name for part in chosen if not run(part, directory, options.results)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(part: BenchmarkPart, directory: Path, results: Path | None) -> bool:
    """Runs a part and shows its output. Returns True if all its commands succeeded."""
    print(f"\n# {part.name}: {part.description}\n", flush=True)
    started, text = time.monotonic(), [f"{part.description}: {describe_setting('jax', 'jaxlib', 'torch')}\n"]
    good = True
    for command in part.commands:
        left = 60 * part.minutes - (time.monotonic() - started)
        shown = shlex.join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")
        good, output = _run_command(command, directory, left)
        text += [f"$ {shown.replace(shlex.join(LMT[1:]), 'lmt').replace('python lmt', 'lmt')}\n", output]
        print(*text[-2:], sep="\n", flush=True)
        if not good:
            break
    print(f"[{part.name}: {time.monotonic() - started:.0f} s{'' if good else ', failed'}]", flush=True)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{part.name}.txt").write_text("\n".join(text) + "\n")
    return good


def _run_command(command: list[str], directory: Path, seconds: float) -> tuple[bool, str]:
    of_repository = command[1] == "-m"
    try:
        done = subprocess.run(
            command,
            cwd=ROOT if of_repository else directory,
            env={"LMT_PROGRESS": "plain", **os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(seconds, 1),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return False, f"{output}\ngiven up after {seconds:.0f} s"
    return done.returncode == 0, done.stdout


if __name__ == "__main__":
    main()
