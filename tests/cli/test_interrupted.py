"""Signals that end a command while it tokenises."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lm_trainer.core.errors import EXIT_PREEMPTED
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenizer import TrainedBpe, train_bpe
from lm_trainer.health.signals import InterruptHandler
from tests.conftest import lmt_command, lmt_environment
from tests.hangs import HANG_SECONDS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files that take the slower tokenizer some seconds each, and a configuration of them."""
    directory = tmp_path_factory.mktemp("corpus")
    shards = Embedded().shards("validation")
    train_bpe(TrainedBpe(vocab_size=512, sample_bytes=100_000), shards).save(directory / "tokenizer")
    texts = [row.text for shard in shards for row in shard.rows() if isinstance(row, Row)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for name in ("a.jsonl", "b.jsonl"):
        (directory / name).write_text(lines * (1 + 30_000_000 // len(lines)))
    (directory / "run.yaml").write_text(
        "data: {train_urls: ['*.jsonl'], tokenizer: tokenizer/tokenizer.json, tokenizer_backend: tokenizers}\n"
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, EXIT_PREEMPTED, "what was tokenised is kept")],
)
def test_a_build_ends_at_once_and_goes_on_later(
    corpus: Path, tmp_path: Path, workers: int, number: signal.Signals, code: int, message: str
) -> None:
    command = lmt_command(
        "data", "build", "run.yaml", f"data.cache_dir={tmp_path}/cache", f"data.num_workers={workers}"
    )
    build = subprocess.Popen(
        command, cwd=corpus, env=lmt_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(tmp_path.glob("cache/train/parts/*.json")):
        assert build.poll() is None, build.communicate()[1]
        time.sleep(0.02)
    os.killpg(build.pid, number)
    _, errors = build.communicate(timeout=HANG_SECONDS)
    assert build.returncode == code, errors
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "cache/train/builder.json").exists(), "the next one need not wait"


def test_a_signal_whose_exception_python_loses_can_still_be_asked_for() -> None:
    def signal_now(phase: str, _info: object) -> None:
        if phase == "start" and not signals.is_interrupted():
            signal.raise_signal(signal.SIGTERM)

    # Not always Python's own: under `nohup` it is ignored.
    previous_handler = signal.getsignal(signal.SIGINT)
    with InterruptHandler("all is kept") as signals:
        gc.callbacks.append(signal_now)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(signal_now)
        assert signals.is_interrupted()
        assert "stopped by SIGTERM; all is kept" in str(signals.to_exception())
    assert signal.getsignal(signal.SIGINT) is previous_handler
