"""Hashes those programs that must not depend on the mesh, as the TPU compiler compiles them for TPU slices.

    python -m benchmarks.program_hashes --out benchmarks/results/compiled/hashes.md

`determinism: elastic` and `layerwise` require these programs to be equal on every slice of a generation. Needs the
package libtpu but no TPU, and about ten minutes of processor time.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the target devices are only compiled for

import jax

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.plan import parse_devices
from lm_trainer.plan.target import target_devices
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.step.dispatch.executable import Executable

SLICES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:2x4", "v4:2x2x1", "v4:2x2x2")
COUNTS = (1, 4, 16)
"""Numbers of chips per mesh. A mesh has the first chips of a slice. Another mesh has only the last chip of host 0."""
PROGRAMS = {
    "elastic": ("microbatch",),
    "layerwise": ("enter", "layer 0", "leave gradient", "layer 0 gradient", "enter gradient"),
}
"""Programs with computation of each kind of determinism. Programs that only move or add data are left out."""
LENGTH = 256
MODEL = {"type": "llama", "seq_len": LENGTH, "hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2,
         "num_heads": 2, "num_kv_heads": 2, "scan_layers": True, "gradient_checkpointing": True}  # fmt: skip
TRAINER = {"train_batch_size": 32, "per_device_parallelism": 2, "mp": "p=f32,c=bfloat16"}
Hashes = dict[str, set[str]]
"""Hashes of each program on all meshes of a slice, by the name of the program."""


class Warnings(logging.Handler):
    """Collects warnings about meshes whose devices have different programs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def mesh_devices(devices: list[Any]) -> Iterator[list[Any]]:
    """Yields the chips of each mesh to compile for."""
    # A process compiles only for the chips of its host.
    yield [device for device in devices if device.process_index == devices[0].process_index][-1:]
    for count in COUNTS:
        if count <= len(devices):
            yield devices[:count]
    if len(devices) not in COUNTS:
        yield devices


def program_hashes(determinism: str, devices: list[Any]) -> Iterator[tuple[str, str]]:
    """Yields the names and hashes of the programs on a mesh of `devices`."""
    with compiling_for("tpu"):
        config = config_of({"model": MODEL, "trainer": {**TRAINER, "determinism": determinism}})
        step = build_setup(config, VOCAB, devices).step
        compiled = step.compile(random_batch(1, LENGTH, VOCAB))
        for name in PROGRAMS[determinism]:
            yield name, (compiled if isinstance(compiled, Executable) else compiled.by_name[name]).fingerprint()


def hash_programs(topology: str) -> Hashes:
    hashes: Hashes = defaultdict(set)
    devices = list(target_devices(parse_devices(topology)))
    for mesh in mesh_devices(devices):
        for determinism in PROGRAMS:
            for name, program in program_hashes(determinism, mesh):
                hashes[name].add(program)
    return hashes


def report(hashes_by_slice: Mapping[str, Hashes], warned: list[str]) -> Iterator[str]:
    names = [name for of_generation in PROGRAMS.values() for name in of_generation]
    yield "# Hashes of programs that no mesh may change, by the TPU's own compiler"
    yield ""
    yield f"libtpu {version('libtpu')}, jax {jax.__version__}: `python -m benchmarks.program_hashes --out FILE`."
    yield ""
    yield "A small Llama. `microbatch` is that of `determinism: elastic`, the others are those of `layerwise`. Each is"
    yield "compiled for one chip, four chips and all chips of the slice, there for every chip of the first host, and"
    yield "for the last chip of that host alone. A cell has the hashes of all these meshes: one where they are equal."
    yield ""
    yield f"| slice | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for topology, hashes in hashes_by_slice.items():
        yield f"| {topology} | {' | '.join(', '.join(sorted(hashes[name])) for name in names)} |"
    yield ""
    for generation in dict.fromkeys(topology.split(":")[0] for topology in hashes_by_slice):
        of_generation = [
            hashes for topology, hashes in hashes_by_slice.items() if topology.startswith(f"{generation}:")
        ]
        differ = [name for name in names if len(set[str]().union(*(hashes[name] for hashes in of_generation))) > 1]
        yield f"- {generation}: " + (f"{', '.join(differ)} differ" if differ else "each program is one on all slices")
    yield ""
    yield f"Meshes with several programs for one computation: {len(warned) or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the report")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    warnings = Warnings()
    logging.getLogger("lm_trainer.step.dispatch.executable").addHandler(warnings)
    hashes_by_slice: dict[str, Hashes] = {}
    for topology in SLICES:
        hashes_by_slice[topology] = hash_programs(topology)
        options.out.write_text("\n".join(report(hashes_by_slice, warnings.texts)) + "\n")
        print(topology, dict(hashes_by_slice[topology]), flush=True)


if __name__ == "__main__":
    main()
