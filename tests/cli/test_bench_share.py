"""`lmt bench mfu --share`: a small file with the figures, and nothing private."""

from __future__ import annotations

import getpass
import json
import platform
import socket
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.bench.share import SharedResult, read_shared_result, shared_result, write_shared_result
from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.profile.mfu import MfuReport
from lm_trainer.profile.peaks import datasheet_peak
from lm_trainer.profile.timing import Spread
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import RunLmt, refused

SECRET = "xyzzy"
CONFIG = f"""
model:
  type: custom
  family: llama
  mlp: {SECRET}_model.py:{SECRET.title()}
  seq_len: 32
  hidden_dim: 16
  intermediate_dim: 32
  num_layers: 1
  num_heads: 2
  num_kv_heads: 2
data:
  configs:
    {SECRET}_set: {{train_urls: [/data/{SECRET}/*.jsonl]}}
  train_weights: {{{SECRET}_set: 1.0}}
  tokenizer: bytes
trainer:
  id: {SECRET}-run
  train_batch_size: 8
  max_devices: 1
  tracker: {{type: tensorboard, logdir: /logs/{SECRET}}}
optimizer: {{learning_rate: 0.125, weight_decay_modules: ".*{SECRET}|.*"}}
hf_save_path: /models/{SECRET}
"""
MODEL = f"""
from lm_trainer.nn.mlp import Mlp

class {SECRET.title()}(Mlp):
    pass
"""


@pytest.mark.slow
def test_a_file_for_others_has_the_figures_and_nothing_private(run_lmt: RunLmt, tmp_path: Path) -> None:
    directory = tmp_path / f"{SECRET}_directory"
    directory.mkdir()
    (directory / f"{SECRET}.yaml").write_text(CONFIG)
    (directory / f"{SECRET}_model.py").write_text(MODEL)
    settings = [f"data.configs.{SECRET}_set.validation_urls=[/data/{SECRET}.txt]", "trainer.seed=3"]
    options = ["--steps", "2", "--warmup", "1", "--share", f"{SECRET}.json", "--json"]
    done = run_lmt("bench", "mfu", f"{SECRET}.yaml", *settings, *options, cwd=directory)
    assert done.returncode == 0, done.stderr
    path = directory / f"{SECRET}.json"
    text = path.read_text()
    assert f"wrote {len(text):,} bytes to {SECRET}.json" in done.stderr
    assert len(text) < 3000
    private = [SECRET, socket.gethostname(), platform.node(), str(tmp_path), str(Path.home())]
    if len(getpass.getuser()) > 4:  # `root` may be a part of another word
        private.append(getpass.getuser())
    assert [word for word in private if word.lower() in text.lower()] == []
    shared, printed = read_shared_result(path), json.loads(done.stdout)
    assert shared.figures.tokens_per_second == printed["tokens_per_second"]
    assert shared.figures.of_matmul == printed["matmul"]["fraction"]
    assert (shared.step.parameters, shared.step.rows, shared.step.seq_len) == (printed["num_params"], 8, 32)
    assert (shared.devices.kind, shared.devices.count, shared.devices.mesh) == ("cpu", 1, {})
    assert shared.step.changed == ("trainer.seed",)
    assert shared.step.model["type"] == "custom"
    assert shared.step.gather == "model"


class Work:
    """A workload of known figures."""

    tokens_per_step, flops_per_token, recomputed_flops_per_token = 1000.0, 1e9, 0.0
    device_kind, device_count, dtype = "NVIDIA H100 80GB HBM3", 8, "bfloat16"
    num_params, vocab_size = 12_345, 678

    def run_step(self) -> None: ...


def report(work: Any = None) -> MfuReport:
    return MfuReport(
        workload=work or Work(),
        step_seconds=Spread.from_values([1.0, 2.0, 3.0]),
        matmul_flops=Spread.from_values([1e12]),
        matmul_fractions=Spread.from_values([0.5]),
        matmul_size=8192,
        samples=3,
        steps_per_sample=1,
        warmup=1,
        peak=datasheet_peak("NVIDIA H100 80GB HBM3", "bfloat16"),
    )


def example(
    tmp_path: Path, text: str = "model: {type: llama, rope: {theta: 5e5}, attn_backend: cudnn}"
) -> SharedResult:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    config = load(file, (), RunConfig).config
    settings = ("trainer.seed=1", "--model.num_layers=2", "data.configs.mine.tags=[x]", "trainer.jax_config.mine=1")
    return shared_result(config, report(), {"data": 8, "model": 1}, recipe="llama_8b", settings=settings)


def test_the_figures_are_those_of_the_report(tmp_path: Path) -> None:
    shared = example(tmp_path)
    assert shared.figures.tokens_per_second == 500
    assert shared.figures.mfu == pytest.approx(500 * 1e9 / (8 * 989.5e12))
    assert shared.figures.step_quartiles == (1.5, 2.5)
    assert shared.step.model == {"type": "llama", "rope.theta": 5e5, "attn_backend": "cudnn"}
    assert shared.step.changed == ("model.num_layers", "trainer.jax_config", "trainer.seed")
    assert shared.devices.mesh == {"data": 8}


def test_a_file_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    shared = example(tmp_path)
    size = write_shared_result(shared, tmp_path / "shared.json")
    assert size == (tmp_path / "shared.json").stat().st_size
    assert read_shared_result(tmp_path / "shared.json") == shared


@pytest.mark.parametrize(
    "change",
    [
        {"host": "mine"},
        {"format": 2},
        {"python": "3.11 in /home"},
        {"devices": {"kind": "<b>H100</b>", "count": 1, "processes": 1, "mesh": {}}},
    ],
)
def test_a_file_with_anything_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """The page of results shows text of these files, so that there may be no text but names of known kinds."""
    plain = {**example(tmp_path).model_dump(mode="json"), **change}
    (tmp_path / "sent.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"sent\.json: not a file of `lmt bench mfu --share`"):
        read_shared_result(tmp_path / "sent.json")


@pytest.mark.slow
def test_a_file_that_cannot_be_written(run_lmt: RunLmt, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {type: gpt2, seq_len: 16, hidden_dim: 8, num_layers: 1, num_heads: 1}\n")
    tiny = ["data.tokenizer=bytes", "trainer.train_batch_size=8", "--steps", "1", "--warmup", "1"]
    refused(run_lmt("bench", "mfu", "c.yaml", *tiny, "--share", "nowhere/result.json"), "--share nowhere/result.json")
