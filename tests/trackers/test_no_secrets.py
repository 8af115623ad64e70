"""No secret gets from the environment, the configuration or the command line into anything that a run writes."""

from __future__ import annotations

import contextlib
import gzip
import os
import pydoc_data.topics
import secrets
import sqlite3
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.trackers.test_wandb import read_frames

# Drawn at random, because the source code that is saved with a run may hold this file.
ENVIRONMENT = {
    "HF_TOKEN": f"hf_{secrets.token_hex(16)}",
    "WANDB_API_KEY": secrets.token_hex(20),
    "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
    "MY_PASSWORD": secrets.token_hex(8),
}
IN_CONFIG, ON_COMMAND_LINE, IN_REMOTE = (secrets.token_hex(8) for _ in range(3))
CANARIES = [c.encode() for c in (*ENVIRONMENT.values(), IN_CONFIG, ON_COMMAND_LINE, IN_REMOTE)]


def contents(file: Path) -> Iterator[bytes]:
    """The bytes of a file, and of what is packed in it."""
    raw = file.read_bytes()
    yield raw
    if raw[:2] == b"\x1f\x8b":
        yield gzip.decompress(raw)
    if file.suffix == ".wandb":
        yield from read_frames(file)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    if raw.startswith(b"SQLite format 3"):
        with contextlib.closing(sqlite3.connect(file)) as connection:
            yield "\n".join(connection.iterdump()).encode()


def leaks(root: Path) -> list[tuple[str, bytes]]:
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [(str(f.relative_to(root)), c) for f in files for text in contents(f) for c in CANARIES if c in text]


@pytest.mark.slow
def test_no_secret_is_written_anywhere(run_lmt, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    inputs, out = tmp_path / "in", tmp_path / "out"
    out.mkdir()
    # fsspec takes what follows file:// for a relative path, so these are files on this machine.
    for name, password in (("train", IN_CONFIG), ("validation", ON_COMMAND_LINE)):
        directory = inputs / f"me:{password}@host"
        directory.mkdir(parents=True)
        (directory / f"{name}.txt").write_text(pydoc_data.topics.topics["strings"] * 4, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=inputs, check=True)
    remote = f"https://{IN_REMOTE}:x-oauth-basic@github.com/o/r.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=inputs, check=True)
    config = {
        "model": {
            "type": "gpt2",
            "seq_len": 16,
            "hidden_dim": 16,
            "num_layers": 1,
            "num_heads": 2,
            "scan_layers": True,
        },
        "data": {
            "tokenizer": "bytes",
            "num_workers": 0,
            "cache_dir": str(out / "cache"),
            "train_urls": [f"file://me:{IN_CONFIG}@host/train.txt"],
        },
        "trainer": {
            "id": "run",
            "num_train_steps": 2,
            "train_batch_size": 8,
            "sample_tokens": 4,
            "log_dir": str(out / "logs"),
            "watch": {"interval": 1, "watch_targets": ["grads"], "include_histograms": True},
            "profiler": True,
            "profiler_start_step": 1,
            "profiler_num_steps": 1,
            "tracker": [
                {"type": "wandb", "mode": "offline"},
                {"type": "tensorboard", "logdir": str(out / "boards")},
                {"type": "trackio", "project": "canary"},
                {"type": "jsonl", "path": str(out / "copies")},
            ],
            "checkpointer": {"base_path": str(out / "checkpoints")},
        },
    }
    (inputs / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {
        **ENVIRONMENT,
        "TRACKIO_DIR": str(out / "trackio"),
        "WANDB_DATA_DIR": str(out / "wandb-data"),
        "WANDB_CACHE_DIR": str(out / "wandb-cache"),
        "HOME": str(out / "home"),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
    }
    command_line = f"--data.validation_urls=[file://me:{ON_COMMAND_LINE}@host/validation.txt]"
    done = run_lmt("train", "run.yaml", command_line, cwd=inputs, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "sample (" in done.stdout
    assert [c for c in CANARIES if c in (done.stdout + done.stderr).encode()] == []
    for tracker in ("logs/run/wandb", "boards/run", "trackio/canary.db", "copies/run/metrics.jsonl", "checkpoints/run"):
        assert (out / tracker).exists(), tracker
    assert leaks(out) == []
