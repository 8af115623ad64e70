"""The page of speeds: its estimates come from the program, its commands are valid, and what was sent is readable."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from docs.generate.speed import CASES, SHARED, Case, estimate, read_estimates, shared_table, speed_table
from lm_trainer.bench.share import read_shared_result, write_shared_result
from lm_trainer.config.loader import load
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.run import Assumptions, plan_run
from lm_trainer.plan.search import estimate_run
from lm_trainer.run.config.run_config import RunConfig
from tests.cli.test_bench_share import example
from tests.conftest import ROOT

OF_EACH_MACHINE = {case.devices: case for case in CASES}
"""A case for each kind of machine."""


def test_there_is_an_estimate_of_each_case_and_it_fits() -> None:
    estimates = read_estimates()
    assert list(estimates) == [case.key for case in CASES]
    for key, figures in estimates.items():
        assert figures["memory_bytes"] < figures["limit_bytes"], key
        assert figures["bound_seconds"] < figures["step_seconds"], key
    assert speed_table().count("| not sent yet |") == len(CASES) - sum((SHARED / c.bench[-1]).is_file() for c in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_command_of_a_case_has_the_configuration_of_its_estimate(case: Case) -> None:
    load(ROOT / f"configs/{case.recipe}.yaml", case.settings, RunConfig)
    assert case.bench[:3] == ["bench", "mfu", case.recipe]
    assert [*case.settings] == case.bench[3 : 3 + len(case.settings)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.key, marks=pytest.mark.slow if case in OF_EACH_MACHINE.values() else pytest.mark.exhaustive
        )
        for case in CASES
    ],
)
def test_the_estimates_are_current(case: Case) -> None:
    """`python -m docs.generate.speed` writes them again."""
    assert estimate(case) == pytest.approx(read_estimates()[case.key], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["model", "layer"])
def test_an_estimate_has_the_time_of_the_plan(tmp_path: Path, gather: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {type: llama, hidden_dim: 64, intermediate_dim: 128, num_layers: 2, num_heads: 2, num_kv_heads: 2, "
        "seq_len: 64}\n"
        f"trainer: {{train_batch_size: 8, elastic_shards: 8, mp: 'p=f32,c=bfloat16', gather: {gather}}}\n"
    )
    config, group = load(file, (), RunConfig).config, parse_devices("4xH100")
    assumptions = Assumptions(vocab_size=512)
    plan, estimated = plan_run(config, group, jax.devices()[:4], assumptions), estimate_run(config, group, assumptions)
    assert plan.time is not None
    assert plan.time.expected == estimated.candidate.cost
    assert plan.time.step_seconds == pytest.approx(estimated.candidate.cost.seconds)
    assert plan.time.bound_seconds == pytest.approx(estimated.bound_seconds)
    assert plan.time.mfu == pytest.approx(estimated.mfu)
    assert plan.time.tokens_per_second_per_device == pytest.approx(estimated.tokens_per_second)
    assert 0 < estimated.bound_seconds < estimated.candidate.cost.seconds


def test_what_was_sent_is_readable_and_is_shown(tmp_path: Path) -> None:
    for path in SHARED.glob("*.json"):
        read_shared_result(path)
    assert shared_table(tmp_path) == "Nobody has sent a result yet."
    write_shared_result(example(tmp_path), tmp_path / "a.json")
    (row,) = shared_table(tmp_path).splitlines()[2:]
    cells = row.strip("| ").split(" | ")
    assert cells[0] == "8 x NVIDIA H100 80GB HBM3"
    assert cells[4] == "62"  # 500 tokens a second on 8 devices
