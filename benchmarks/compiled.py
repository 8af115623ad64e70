"""Compiles training steps for TPUs and GPUs, and reports memory, FLOPs, traffic, and bounds on the MFU.

    python -m benchmarks.compiled tpu --out benchmarks/results/compiled/tpu.md
    python -m benchmarks.compiled gpu --out benchmarks/results/compiled/gpu.md

Each row is one `lmt plan --compile`, which needs the package libtpu or JAX's CUDA plug-in but no such device, and one
`lmt plan` without `--compile`. Results are saved one by one, and a second start skips the ones that the same compiler
made. Takes an hour of processor time for TPUs, and a quarter of an hour for GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from lm_trainer.plan.compiler_flags import SPARSE_CORES
from lm_trainer.plan.devices import parse_devices

ROOT = Path(__file__).resolve().parent.parent
PRECISION: dict[str, Any] = {"mp": "p=f32,c=bfloat16", "num_train_steps": 1000}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"type": "gpt2", "seq_len": 1024, "hidden_dim": 768, "num_layers": 12, "num_heads": 12},
    "llama-1b": {
        "type": "llama",
        "seq_len": 2048,
        "hidden_dim": 2048,
        "intermediate_dim": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
    },
    "llama-8b": {
        "type": "llama",
        "seq_len": 4096,
        "hidden_dim": 4096,
        "intermediate_dim": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
    },
    "llama-70b": {
        "type": "llama",
        "seq_len": 4096,
        "hidden_dim": 8192,
        "intermediate_dim": 28672,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
    },
    "mixtral-8x1b": {
        "type": "mixtral",
        "seq_len": 2048,
        "hidden_dim": 2048,
        "intermediate_dim": 4096,
        "num_layers": 16,
        "num_heads": 16,
        "num_kv_heads": 8,
    },
}
MODELS["mixtral-8x1b-grouped"] = {**MODELS["mixtral-8x1b"], "expert_kernel": "grouped"}
VOCAB = {
    **{"gpt2-124m": 50304, "llama-1b": 50304, "llama-8b": 128256, "llama-70b": 128256},
    **dict.fromkeys(("mixtral-8x1b", "mixtral-8x1b-grouped"), 32000),
}


class Case(NamedTuple):
    """One step to compile."""

    model: str
    devices: str
    rows: int
    """Number of rows of a microbatch. Each device computes `microbatches` microbatches."""
    microbatches: int
    determinism: str
    flags: str = ""
    """Value of LIBTPU_INIT_ARGS."""

    def __str__(self) -> str:
        name = f"{self.model} {self.devices} {self.microbatches} x {self.rows} rows {self.determinism}"
        return f"{name}, SparseCores" if self.flags else name


_V5P = [
    *(Case("llama-1b", "v5p:4x4x4", 4, 2, mode) for mode in ("fast", "elastic", "layerwise")),
    *(Case("llama-8b", "v5p:4x4x4", 2, 4, mode) for mode in ("fast", "layerwise")),
    *(Case("mixtral-8x1b", "v5p:4x4x4", 2, 2, mode) for mode in ("fast", "layerwise")),
    Case("mixtral-8x1b-grouped", "v5p:4x4x4", 2, 2, "layerwise"),
]
TPU = [
    *(Case("gpt2-124m", "v5e:2x2", 8, 4, mode) for mode in ("fast", "elastic", "layerwise")),
    *(Case("llama-1b", "v5e:4x4", 1, 8, mode) for mode in ("fast", "elastic", "layerwise")),
    *(Case("llama-1b", "v5e:4x4", 4, 2, mode) for mode in ("fast", "layerwise")),
    *_V5P,
    *(case._replace(flags=SPARSE_CORES) for case in _V5P),
    *(Case("llama-1b", "v5p:4x4x4", 4, 8, mode, SPARSE_CORES) for mode in ("fast", "elastic", "layerwise")),
    *(Case("llama-8b", "v5p:4x4x4", 2, 8, mode, SPARSE_CORES) for mode in ("fast", "layerwise")),
    Case("llama-70b", "v5p:4x8x8", 1, 2, "layerwise"),
]
GPU = [
    *(Case("gpt2-124m", "8xH100", 16, 2, mode) for mode in ("fast", "elastic", "layerwise")),
    *(Case("llama-1b", "8xH100", 4, n, mode) for n in (2, 8) for mode in ("fast", "elastic", "layerwise")),
    *(Case("mixtral-8x1b", "8xH100", 2, 2, mode) for mode in ("fast", "layerwise")),
    Case("mixtral-8x1b-grouped", "8xH100", 2, 2, "layerwise"),
    *(Case("llama-8b", "8xH100", 1, 4, mode) for mode in ("fast", "layerwise")),
    *(Case("llama-8b", "64xH100", 2, n, mode) for n in (2, 8) for mode in ("fast", "layerwise")),
    *(Case("llama-70b", "64xH100", 1, 2, mode) for mode in ("fast", "layerwise")),
]
COMPILERS = {"tpu": (TPU, "libtpu"), "gpu": (GPU, "jax-cuda12-plugin")}
"""Maps each kind of device to the cases to compile for it, and to the package of its compiler."""
NOTES = {
    "tpu": [
        "Over all chips of v5p:4x4x4 this compiler gathers by adding zeros and leaves sums whole, by all-reduces,",
        "whatever the order of the chips: twice the bytes of the all-gathers and reduce-scatters that were asked for.",
        "Steps with `SparseCores` in their name are compiled with the flags that `lmt plan --compile` names for them.",
        "",
    ],
    "gpu": [],
}
"""Maps each kind of device to notes for the readers of its table."""


def run_plan_command(*options: str, flags: str = "") -> dict[str, Any]:
    """Runs `lmt plan` with these options, and `flags` for the TPU compiler, and returns its output.

    Raises:
        RuntimeError: with the error message if planning fails.
    """
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": path, "LIBTPU_INIT_ARGS": flags}
    command = [sys.executable, "-m", "cli", "plan", *options, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "rror" in line or "memory" in line]
        raise RuntimeError((errors or done.stderr.splitlines() or ["no output"])[-1][:300])
    return json.loads(done.stdout)


def compile_case(case: Case) -> dict[str, Any]:
    """Returns the plan of a case, or the reason why planning failed."""
    chips = parse_devices(case.devices).count
    model = {**MODELS[case.model], "gradient_checkpointing": True, "scan_layers": True}
    batch = {"train_batch_size": chips * case.rows * case.microbatches, "per_device_parallelism": case.rows}
    trainer = {**PRECISION, **batch, "elastic_shards": chips, "determinism": case.determinism}
    if case.determinism == "elastic":
        trainer["gather"] = "model"
    config = {"model": {**model, "cross_entropy_block_size": 2048}, "trainer": trainer, "optimizer": {"type": "adam"}}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "case.yaml"
        path.write_text(json.dumps(config))
        options = [str(path), "--devices", case.devices, "--vocab-size", str(VOCAB[case.model])]
        try:
            plan, planned = run_plan_command(*options, "--compile", flags=case.flags), run_plan_command(*options)
        except RuntimeError as e:
            return {"case": str(case), "failed": str(e)}
    temporary = [
        {phase["name"]: phase["parts"]["temporary"] for phase in source["memory"]["phases"]}
        for source in (plan, planned)
    ]
    programs = plan["compiled"]["programs"]
    summed = ("flops", "bytes_moved", "network_seconds")
    sums = {key: sum(program["runs"] * program[key] for program in programs) for key in summed}
    sent = sum(program["runs"] * sum(program["bytes_sent"].values()) for program in programs)
    return {
        "case": str(case),
        "peak": plan["memory"]["peak_bytes"],
        "planned": planned["memory"]["peak_bytes"],
        "phase": max(plan["memory"]["phases"], key=lambda phase: phase["bytes"])["name"],
        "temporary": {phase: [figures.get(phase) for figures in temporary] for phase in temporary[0]},
        **sums,
        "bytes_sent": sent,
        "model_flops": plan["work"]["flops_per_step"] / chips,
        "seconds": plan["compiled"]["step_seconds"],
        "mfu": plan["compiled"]["mfu"],
        "expected_mfu": plan["time"]["mfu"],
        "bound_by": plan["compiled"]["bound_by"],
        "overlapped_share": plan["compiled"]["overlapped_share"],
    }


def compiler_versions(kind: str) -> str:
    """Returns the names and versions of the packages that compile for a kind of device."""
    package = COMPILERS[kind][1]
    return f"{package} {version(package)}, jax {version('jax')}"


def report(kind: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"# Training steps by the {kind.upper()}'s own compiler"
    yield ""
    yield f"{compiler_versions(kind)}; regenerate: `python -m benchmarks.compiled {kind} --out FILE`."
    yield ""
    yield "All figures are of one device and one step: GB at the peak and the phase it is in; the same peak as `lmt"
    yield "plan` has it without this compiler; TFLOP of products and attention kernels, and the part of them that the"
    yield "model needs without recomputation; GB read and written, GB sent. The MFU lies between these bounds if"
    yield "products, memory and links reach the figures of their datasheet: the lower one if nothing overlaps, the"
    yield "higher one if all does in each program. The expected MFU has efficiencies of microbenchmarks. The overlap is"
    yield "the share of gathers and reductions of layers whose programs compute another layer; the rest are separate,"
    yield "because the compiler would compute that layer otherwise."
    yield ""
    yield from NOTES[kind]
    columns = ("step", "peak GB", "planned GB", "in", "TFLOP", "needed", "GB moved", "GB sent", "s", "MFU", "bound by")
    yield f"| {' | '.join(columns)} | expected | overlap |"
    yield "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---|---:|---:|"
    for row in rows:
        if "failed" in row:
            yield f"| {row['case']} | | | does not compile: {row['failed']} | | | | | | | | | |"
            continue
        seconds, mfu = row["seconds"], row["mfu"]
        overlap = f"{row['overlapped_share']:.0%}" if "layerwise" in row["case"] else ""
        yield (
            f"| {row['case']} | {row['peak'] / 1e9:.2f} | {row['planned'] / 1e9:.2f} "
            f"({row['planned'] / row['peak'] - 1:+.0%}) | {row['phase']} | {row['flops'] / 1e12:.1f} | "
            f"{row['model_flops'] / row['flops']:.0%} | {row['bytes_moved'] / 1e9:.0f} | "
            f"{row['bytes_sent'] / 1e9:.1f} | {seconds['least']:.2f} to {seconds['most']:.2f} | {mfu['least']:.0%} to "
            f"{mfu['most']:.0%} | {row['bound_by']} | {row['expected_mfu']:.0%} | {overlap} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=COMPILERS, help="devices to compile for")
    parser.add_argument("--out", type=Path, required=True, help="the report; its data are saved next to it as .json")
    parser.add_argument("--only", default="", help="only cases with this text in their names")
    options = parser.parse_args()
    data_file = options.out.with_suffix(".json")
    results: dict[str, Any] = json.loads(data_file.read_text()) if data_file.exists() else {}
    cases, versions = COMPILERS[options.kind][0], compiler_versions(options.kind)
    results = {name: result for name, result in results.items() if result.get("compiler") == versions}
    for case in cases:
        if options.only in str(case) and str(case) not in results:
            results[str(case)] = {"compiler": versions, **compile_case(case)}
            data_file.parent.mkdir(parents=True, exist_ok=True)
            data_file.write_text(json.dumps(results, indent=1) + "\n")
            rows = [results[str(listed)] for listed in cases if str(listed) in results]
            options.out.write_text("\n".join(report(options.kind, rows)) + "\n")
            print(results[str(case)], flush=True)


if __name__ == "__main__":
    main()
