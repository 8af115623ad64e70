"""Compares layers that are compiled alone with layers in programs that also gather and reduce, for TPUs and GPUs.

    python -m benchmarks.compiled_overlap 4xH100 v6e:2x2 v5e:2x2 v5p:2x2x1 --out benchmarks/results/compiled/overlap.md

The graphs of all results are compared, as at the start of a run with `gather: layer`. Needs the package libtpu or JAX's
CUDA plug-in but no such device. Takes four to six minutes of processor time for each kind of device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.setting import markdown_table
from lm_trainer.plan.compiler_flags import SPARSE_CORES

ROOT = Path(__file__).resolve().parent.parent
LENGTH, WIDTH, VOCAB = 512, 256, 4096
_MODEL: dict[str, Any] = {
    "seq_len": LENGTH,
    "hidden_dim": WIDTH,
    "num_layers": 3,
    "num_heads": 4,
    "gradient_checkpointing": True,
    "cross_entropy_block_size": 512,
}
_ROTARY: dict[str, Any] = {**_MODEL, "intermediate_dim": 4 * WIDTH, "num_kv_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _MODEL,
    "llama": _ROTARY,
    "gemma2": {**_ROTARY, "head_dim": 64, "sliding_window": 128},
    "qwen3": {**_ROTARY, "head_dim": 64},
    "olmo2": _ROTARY,
    "mixtral": {**_ROTARY, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
DTYPES = {"bfloat16": "p=f32,c=bfloat16", "float32": "f32"}
COLUMNS = {
    "forward": ("", False),
    "forward, with gather": (" with gather", False),
    "backward": ("", True),
    "backward, with gather and reduction": (" with gather", True),
}
"""Column -> part of the names of its programs, and whether these compute gradients."""

_LEGEND = """\
Each cell has the number of results of a program over all devices whose graphs (operations, fusions, kernels, tile sizes
of what adds) are those of the layer compiled for one device, and the number of all its results. A cell is empty if the
program was not compiled, because a layer differs without any exchange: each device then has a separate program."""


class Comparison(NamedTuple):
    """Results of a program over all devices that are computed as in the program of the layer alone."""

    program: str
    equal: int
    results: int


class _Differs(Exception):
    """Ends the compilation of a step whose layers differ without any exchange: the run then uses the layers alone."""


def compare_programs(target: str, family: str, policy: str) -> list[Comparison]:
    """Compiles the programs of a step for a target, and compares each with the same computation for one device."""
    from benchmarks.plan_error import config_of
    from lm_trainer.core.jax_types import PyTree
    from lm_trainer.parallel.target_platform import compiling_for
    from lm_trainer.plan import parse_devices
    from lm_trainer.plan.target import target_devices
    from lm_trainer.profile.devices import device_platform
    from lm_trainer.profile.program_graph import output_hashes
    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.step.dispatch import mesh_executable
    from lm_trainer.step.dispatch.per_group import PerGroupExecutable

    group = parse_devices(target)
    comparisons = list[Comparison]()
    compile_for = mesh_executable.MeshExecutable.compile_for

    def compile_and_compare(self: mesh_executable.MeshExecutable, params: PyTree, alone: PerGroupExecutable) -> None:
        hashes = list[list[str]]()

        def record_hashes(hlo: str) -> list[str]:
            hashes.append(output_hashes(hlo))
            return hashes[-1]

        difference = None
        with mock.patch.object(mesh_executable, "output_hashes", record_hashes):
            try:
                compile_for(self, params, alone)
            except mesh_executable.ProgramsDiffer as error:
                difference = error
        expected, compiled = hashes
        equal = sum(a == b for a, b in zip(expected, compiled, strict=False))
        comparisons.append(Comparison(self._program.name, equal, len(expected)))
        if difference is not None:
            raise difference if " with " in self._program.name else _Differs

    batch = {"train_batch_size": 2 * group.count, "per_device_parallelism": 1}
    config = config_of(
        {
            "model": {"type": family, **FAMILIES[family]},
            "trainer": {**batch, "elastic_shards": group.count, "mp": policy, "determinism": "layerwise"},
        }
    )
    with (
        compiling_for(device_platform(group.kind)),
        mock.patch.object(mesh_executable.MeshExecutable, "compile_for", compile_and_compare),
        contextlib.suppress(_Differs),
    ):
        build_setup(config, VOCAB, target_devices(group)).step.compile(random_batch(1, LENGTH, VOCAB))
    return comparisons


def table_row(target: str, family: str, dtype: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Returns a row of the table: `equal / results` of each kind of program of layers."""

    def cell(exchange: str, is_gradient: bool) -> str:
        chosen = [
            comparison
            for comparison in comparisons
            if comparison.program.startswith("layer")
            and ("gradient" in comparison.program.partition(" with ")[0]) == is_gradient
            and (exchange in comparison.program if exchange else " with " not in comparison.program)
        ]
        equal, results = (sum(getattr(x, field) for x in chosen) for field in ("equal", "results"))
        return f"{equal} / {results}" if results else ""

    return [target, family, dtype, *(cell(*kind) for kind in COLUMNS.values())]


def compare_on_target(target: str) -> Iterator[list[str]]:
    """Yields the rows of a target, made in a new process, because the flags of the compiler hold for a process."""
    flags = {"LIBTPU_INIT_ARGS": SPARSE_CORES} if target.startswith("v5p") else {}
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", **flags}
    command = [sys.executable, "-m", "benchmarks.compiled_overlap", target]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield json.loads(line)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")


def print_target_rows(target: str) -> None:
    for family in FAMILIES:
        for dtype, policy in DTYPES.items():
            row = table_row(target, family, dtype, compare_programs(target, family, policy))
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", help="devices, as for lmt plan")
    parser.add_argument("--out", type=Path, help="the report; without it, the rows of the first target are printed")
    options = parser.parse_args()
    if options.out is None:
        print_target_rows(options.targets[0])
        return
    from importlib.metadata import version

    rows = [row for target in options.targets for row in compare_on_target(target)]
    command = f"`python -m benchmarks.compiled_overlap {' '.join(options.targets)} --out FILE`"
    text = [
        "# Layers alone, and in programs that also gather and reduce",
        f"{command}; jax {version('jax')}; v5p with the flags for its SparseCores.",
        f"Three layers of width {WIDTH}, {LENGTH} positions, microbatches of one row, two on each device.",
        _LEGEND,
        markdown_table(["devices", "family", "dtype", *COLUMNS], rows),
    ]
    options.out.write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
