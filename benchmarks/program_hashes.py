"""Hashes of the program of a microbatch on chips and meshes of TPU slices, as the TPU's own compiler writes it.

    python -m benchmarks.program_hashes --out benchmarks/results/compiled/hashes.md

`determinism: elastic` rests on their being equal on every slice of a generation. Needs the package libtpu and no TPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on the devices that are compiled for

import jax

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.plan import parse_devices
from lm_trainer.plan.target import target_devices
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.program import build_program

SLICES = ("v5e:2x2", "v5e:4x4", "v5p:2x2x1", "v5p:4x4x4", "v6e:2x2", "v6e:4x4", "v4:2x2x1", "v4:4x4x4")
MESHES = {"first chip": [0], "fourth chip": [3], "four chips": [0, 1, 2, 3]}
"""Mesh -> its chips among those of the first host."""
LENGTH = 256
MODEL = {"type": "llama", "seq_len": LENGTH, "hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2,
         "num_heads": 2, "num_kv_heads": 2, "scan_layers": True, "gradient_checkpointing": True}  # fmt: skip
TRAINER = {"train_batch_size": 8, "per_device_parallelism": 2, "mp": "p=f32,c=bfloat16", "determinism": "elastic"}


def microbatch_hash(devices: list[Any]) -> str:
    """The hash of the program that computes a microbatch on a mesh of `devices`."""
    with compiling_for("tpu"):
        step = build_program(config_of({"model": MODEL, "trainer": TRAINER}), VOCAB, devices).step
        phases = step.phases(random_batch(1, LENGTH, VOCAB), step.plans.at(0), "tpu")
        return next(p.program for p in phases if p.program.name == "microbatch").compile().fingerprint()


def report(found: dict[str, list[str]]) -> Iterator[str]:
    yield "# Hashes of a microbatch's program by the TPU's own compiler"
    yield ""
    yield f"libtpu {version('libtpu')}, jax {jax.__version__}: `python -m benchmarks.program_hashes --out FILE`."
    yield "A small Llama, `determinism: elastic`. Those of one generation are to be equal, on every slice and mesh."
    yield ""
    yield f"| slice | {' | '.join(MESHES)} |"
    yield "|---|" + "---|" * len(MESHES)
    for topology, hashes in found.items():
        yield f"| {topology} | {' | '.join(hashes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the report")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    for topology in SLICES:
        devices = target_devices(parse_devices(topology))
        found[topology] = [microbatch_hash([devices[at] for at in places]) for places in MESHES.values()]
        given.out.write_text("\n".join(report(found)) + "\n")
        print(topology, *found[topology], flush=True)


if __name__ == "__main__":
    main()
