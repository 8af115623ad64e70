"""`lmt bench` on a configuration that takes a moment."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.bench.dispatch import time_dispatch
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.conftest import Lmt, RunLmt, refused

CONFIG = """
model: {type: gpt2, seq_len: 32, hidden_dim: 16, num_layers: 1, num_heads: 2}
data: {tokenizer: bytes}
trainer: {train_batch_size: 8, max_devices: 1}
"""


@pytest.fixture
def config(in_tmp_path: Path) -> Path:
    path = in_tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_json_agrees_with_itself_and_with_a_hand_count(lmt: Lmt, config: Path):
    result = lmt("bench", "mfu", config, "--steps", "3", "--warmup", "1", "--json", "model.num_layers=2")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    vocabulary = (values["num_params"] - 32 * 16 - 2 * 16 - 2 * 3280) // 16
    layer = 2 * 16 * 3 * 16 + 4 * 32 * 16 + 3 * 32 * 2 + 2 * 16 * 16 + 4 * 16 * 64
    assert vocabulary in range(257, 300)
    assert values["flops_per_token"] == 3 * (2 * layer + 2 * 16 * vocabulary)
    assert values["tokens_per_step"] == 8 * 32
    assert (values["device_count"], values["dtype"], values["datasheet"]) == (1, "float32", None)
    step = values["step_seconds"]
    assert 0 < step["minimum"] <= step["lower_quartile"] <= step["median"] <= step["upper_quartile"] <= step["maximum"]
    assert values["tokens_per_second"] == pytest.approx(8 * 32 / step["median"])
    achieved = values["tokens_per_second"] * values["flops_per_token"]
    assert values["achieved_flops_per_second"] == pytest.approx(achieved)
    assert values["matmul"]["fraction"] == pytest.approx(achieved / values["matmul"]["flops_per_second"]["median"])
    assert values["matmul"]["size"] == 2048


@pytest.mark.slow
def test_the_table_says_what_is_not_known_and_nothing_is_written(lmt: Lmt, config: Path):
    result = lmt("bench", "mfu", config, "--steps", "2", "--warmup", "1")
    assert result.returncode == 0, result.stderr
    assert "n/a: no datasheet figure for float32 on 'cpu'" in result.stdout
    assert "of measured matmul peak" in result.stdout
    assert list(config.parent.iterdir()) == [config]


def measured(run: Lmt | RunLmt, benchmark: str, *arguments: str | Path) -> dict[str, Any]:
    result = run("bench", benchmark, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("determinism", "recompute"),
    [
        pytest.param("elastic", False, marks=pytest.mark.slow),
        pytest.param("layerwise", False, marks=pytest.mark.exhaustive),
        pytest.param("layerwise", True, marks=pytest.mark.slow),
    ],
)
def test_the_roofline_counts_the_products_of_the_model(
    run_lmt: RunLmt, config: Path, tmp_path: Path, determinism: str, recompute: bool
):
    model = ["model.hidden_dim=64", "model.num_layers=3", f"model.gradient_checkpointing={str(recompute).lower()}"]
    settings = [*model, f"trainer.determinism={determinism}"]
    options = ["--steps", "2", "--roofline", "--trace", str(tmp_path / "trace")]
    # A program that was compiled elsewhere would bring the names of its parts from there.
    fresh = [f"trainer.jax_compilation_cache_dir={tmp_path}/cache"]
    values = measured(run_lmt, "mfu", config, *settings, *fresh, *options)
    roofline = values["roofline"]
    flops = roofline["gradients_per_step"] * sum(part["flops"] for part in roofline["parts"])
    # Layers that are computed again lack their last product, which no gradient needs.
    last = 3 * 2 * 4 * 64**2 if recompute else 0
    per_token = values["flops_per_token"] + values["recomputed_flops_per_token"] - last
    assert (values["recomputed_flops_per_token"] > 0) == recompute
    assert flops == pytest.approx(per_token * values["tokens_per_step"], rel=0.03)
    assert {"attention, forward", "attention, backward", "mlp, forward", "mlp, backward", "loss, forward"} <= {
        part["name"] for part in roofline["parts"]
    }
    least = roofline["gradients_per_step"] * sum(part["seconds"] for part in roofline["parts"])
    assert roofline["least_step_seconds"] == pytest.approx(least)
    assert list((tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.slow
def test_data_are_loaded_as_training_loads_them(lmt: Lmt, config: Path):
    values = measured(lmt, "data", config, "--batches", "4", "--repeats", "2")
    assert values["tokens_per_batch"] == 8 * 32
    assert values["tokens_per_second"] == pytest.approx(8 * 32 / values["batch_seconds"]["median"])
    waiting = values["waiting_fraction"]
    assert 0 <= waiting["minimum"] <= waiting["median"] <= waiting["maximum"] < 1
    assert values["step_seconds"]["minimum"] > 0


@pytest.mark.slow
def test_writing_reads_all_weights_for_each_token(lmt: Lmt, config: Path):
    values = measured(lmt, "decode", config, "--rows", "2", "--prompt", "8", "--new", "16", "--repeats", "2")
    parameters = values["num_params"]
    assert parameters == 16 * ByteTokenizer().vocab_size + 32 * 16 + 2 * 16 + 3280
    assert values["bytes_read_per_token"] == 4 * (parameters + 2 * 24 * 2 * 16)
    assert values["prefill_tokens_per_second"] == pytest.approx(2 * 8 / values["prefill_seconds"]["median"])
    assert values["copy_bytes_per_second"]["median"] > 0


@pytest.mark.optimised
@pytest.mark.slow
def test_recomputing_saves_the_memory_of_a_loop(lmt: Lmt, config: Path):
    deep = ["model.num_layers=4", "model.scan_layers=true", "model.gradient_checkpointing=false"]
    values = measured(lmt, "memory", config, *deep, "--repeats", "1")
    temporary = {name: entry["temporary_bytes"] for name, entry in values["gradient"].items()}
    assert temporary["gradient_checkpointing: recompute"] < temporary["as configured"] / 2
    assert "gradient_checkpointing: save_all" not in temporary, "that is what is configured"
    held = values["bytes_per_device"]
    # Adam has two moments for each parameter, and some counts.
    assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=1e-3)


@pytest.mark.slow
def test_checkpoints_are_measured_and_removed(lmt: Lmt, config: Path):
    # Parents that are made go again, and those that were there stay, though they are empty.
    (config.parent / "there").mkdir()
    override = "trainer.checkpointer.base_path=there/made/checkpoints"
    values = measured(lmt, "checkpoint", config, override, "--repeats", "1", "--steps", "2")
    parameters = 16 * ByteTokenizer().vocab_size + 32 * 16 + 2 * 16 + 3280
    # Adam has two moments for each parameter, and some counts.
    assert values["bytes"] == pytest.approx(3 * 4 * parameters, rel=1e-2)
    assert values["finished_seconds"]["median"] >= values["blocked_seconds"]["median"] > 0
    assert {path.name for path in config.parent.rglob("*")} == {config.name, "there"}


def test_waiting_is_no_work_of_the_host():
    def work():
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    waiting, working = time_dispatch(lambda: time.sleep(0.03), steps=3), time_dispatch(work, steps=3)
    assert waiting.step.minimum >= 0.03
    assert waiting.host.median < 0.01 <= working.host.minimum
    assert working.share == working.host.median / working.step.median


@pytest.mark.slow
def test_dispatching_takes_a_part_of_a_step(lmt: Lmt, config: Path):
    values = measured(lmt, "dispatch", config, "--steps", "3")
    # Processor time of one thread within the step.
    assert 0 < values["host_seconds"]["minimum"] <= values["step_seconds"]["minimum"]
    assert values["share"] == values["host_seconds"]["median"] / values["step_seconds"]["median"]


@pytest.mark.slow
# What compiles in less than half a second is not kept.
@pytest.mark.optimised
def test_the_second_start_finds_what_the_first_compiled(run_lmt: RunLmt, config: Path):
    values = measured(run_lmt, "compile", config, "--repeats", "1")
    assert values["cache_bytes"] > 0
    for kind in ("cold", "warm"):
        phases = {phase: values[kind][phase]["median"] for phase in ("imports", "compile", "initialise", "first_step")}
        assert 0 < sum(phases.values()) <= values[kind]["total"]["median"] * 1.01


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["decode", "--prompt", "30", "--new", "3"], ["--prompt 30", "33 tokens", "32"]),
        (["compile", "trainer.train_batch_size=12", "trainer.elastic_shards=8"], ["12"]),
        (["data", "data.train_urls=nothing.txt"], ["nothing.txt"]),
        (["checkpoint", "--steps", "0"], ["--steps"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_cannot_be_measured_is_refused(lmt: Lmt, config: Path, command: list[str], words: list[str]):
    benchmark, *arguments = command
    refused(lmt("bench", benchmark, config, *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.hiden_dim=3"], ["model.hiden_dim", "hidden_dim"]),
        (["trainer.train_batch_size=12", "trainer.elastic_shards=8"], ["12"]),
        (["--steps", "0"], ["--steps"]),
    ],
    ids=str,
)
def test_mistakes_are_refused(lmt: Lmt, config: Path, arguments: list[str], words: list[str]):
    refused(lmt("bench", "mfu", config, *arguments), *words)
