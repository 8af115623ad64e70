"""Measures the host memory needed to start from a large Hugging Face checkpoint.

    python benchmarks/import_memory.py [--gigabytes 1.5] [--devices 8]

Makes a random Llama checkpoint of the given size in bfloat16 and in several files. A new process reads it to emulated
CPU devices, as sharded float32 parameters. Prints the increase of the process's memory from before reading to its peak.
On CPUs the parameters themselves are in host memory, so their size is subtracted. The remainder must be below 1.5 times
the size of the largest file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, INNER, HEADS, VOCAB = 2048, 5632, 16, 32_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--devices", type=int, default=1, help="emulated devices")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(measure(arguments.read)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        largest = write_checkpoint(Path(scratch), arguments.gigabytes)
        measured = json.loads(_measure_in_own_process(Path(scratch), arguments.devices))
    beyond = measured["peak"] - measured["before"] - measured["share"]
    measured |= {"devices": arguments.devices, "largest_file": largest, "beyond_share": beyond}
    print(json.dumps({name: round(value / 1e6) if value > 1e5 else value for name, value in measured.items()}))
    print(f"beyond the local share: {beyond / largest:.2f} of the largest file (at most 1.50)")
    if beyond > 1.5 * largest:
        sys.exit("too much")


def _measure_in_own_process(directory: Path, devices: int) -> str:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--read", str(directory)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def write_checkpoint(directory: Path, gigabytes: float) -> int:
    """Writes the checkpoint with a few layers per file. Returns the size of the largest file in bytes."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from lm_trainer.export.weights import INDEX_FILE, write_json
    from lm_trainer.models import LlamaConfig, hf
    from lm_trainer.models.hf_table import file_name, file_tensors

    # Bytes in bfloat16. Attention has four square matrices, and the MLP has three matrices.
    per_layer = 2 * (4 * WIDTH**2 + 3 * WIDTH * INNER)
    layers = max(2, round((gigabytes * 1e9 - 4 * VOCAB * WIDTH) / per_layer))
    config = LlamaConfig(
        seq_len=2048, hidden_dim=WIDTH, intermediate_dim=INNER, num_layers=layers, num_heads=HEADS, num_kv_heads=HEADS
    )
    family = config.hf_family()
    shapes = {
        file_name(family, entry.name): entry.shape for entry in file_tensors(family, hf.param_infos(config, VOCAB))
    }
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(shapes):
        size += 2 * int(np.prod(shapes[name]))
        # About five files, so that the largest file is much smaller than the checkpoint.
        if size > gigabytes * 1e9 / 5:
            files.append([])
            size = 0
        files[-1].append(name)
    rng, placed, sizes = np.random.default_rng(0), {}, []
    for number, names in enumerate(files, 1):
        path = directory / f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: rng.normal(size=shapes[name]).astype(ml_dtypes.bfloat16) for name in names}
        save_file(tensors, path, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, path.name)
        sizes.append(path.stat().st_size)
    write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": placed})
    write_json(directory / "config.json", hf.config_to_hf(config, vocab_size=VOCAB, eos_id=0, bos_id=None))
    return max(sizes)


def measure(directory: Path) -> dict[str, int]:
    """Measures memory in bytes before, at the peak of and after reading, and the size of this process's parameters."""
    import jax
    import jax.numpy as jnp

    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.run.config.run_config import RunConfig
    from lm_trainer.run.weights.pretrained import HfCheckpoint

    config = RunConfig.model_validate({"initialize_from_hf": str(directory), "optimizer": {"type": "lion"}})
    source = HfCheckpoint.open(config)
    config = config.model_copy(update={"model": source.config})
    setup = build_setup(config, source.vocab_size)
    # The first computation starts XLA's threads and memory pools, whose memory must not be counted.
    jax.block_until_ready(jnp.zeros(8) + 1)
    baseline = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    params = source.load(source.config, setup.model.shapes, setup.sharding.storage)
    jax.block_until_ready(params)
    share = sum(shard.data.nbytes for x in params.values() for shard in x.addressable_shards)
    return {"before": baseline, "peak": _status_bytes("VmHWM"), "after": _status_bytes("VmRSS"), "share": share}


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
