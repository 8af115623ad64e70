"""The law of learning rates: known laws are recovered, intervals cover, a ladder uses it, and bad runs are refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.fit.rate import BestRate, fit_rate_law
from lm_trainer.ladder.rate_law import RateLaw
from lm_trainer.ladder.rungs import rung_optimizer
from tests.conftest import Lmt

SEQ_LEN = 32
STEPS, ROWS = (100, 200, 400), (8, 16)


def best_rate(tokens: float, batch_size: float) -> float:
    """A law by hand."""
    return 0.01 * (tokens / 50_000) ** -0.4 * (batch_size / 512) ** 0.5


def groups(noise: float = 0.0, seed: int = 0) -> list[BestRate]:
    rng = np.random.default_rng(seed)
    best = []
    for steps, rows in itertools.product(STEPS, ROWS):
        batch_size = rows * SEQ_LEN
        rate = best_rate(steps * batch_size, batch_size) * math.exp(noise * rng.standard_normal())
        best.append(BestRate(steps * batch_size, batch_size, rate, 2.0, 5))
    return best


def test_intervals_contain_exponents_and_rates_at_their_rate() -> None:
    """90 % of 300, of which two standard deviations are 3.5 %."""
    held = []
    for seed in range(300):
        fit = fit_rate_law(groups(0.1, seed))
        tokens, batch, rate = fit.exponent("tokens"), fit.exponent("batch_size"), fit.predict(1e6, 1024)
        assert tokens is not None
        assert batch is not None
        assert rate is not None
        held.append((tokens.contains(-0.4), batch.contains(0.5), rate.contains(best_rate(1e6, 1024))))
    assert (np.abs(np.mean(held, axis=0) - 0.9) < 0.035).all(), np.mean(held, axis=0)


def test_a_fixed_exponent_is_not_fitted() -> None:
    fit = fit_rate_law(groups(), fixed={"tokens": -0.32})
    assert fit.law.tokens_exponent == -0.32
    assert fit.fitted == ("batch_size",)
    assert fit.exponent("tokens") is None


def test_what_does_not_vary_has_no_exponent_and_few_groups_have_no_interval() -> None:
    of_one_batch = [group for group in groups() if group.batch_size == 8 * SEQ_LEN]
    assert fit_rate_law(of_one_batch).law.batch_exponent == 0
    fit = fit_rate_law(of_one_batch[:2])
    assert fit.law.tokens_exponent == pytest.approx(-0.4)
    assert fit.exponent("tokens") is None
    assert fit.predict(1e6, 256) is None


def test_quantities_that_change_together_are_refused() -> None:
    together = [BestRate(25_600, 256, 0.02, 2.0, 5), BestRate(51_200, 512, 0.01, 2.0, 5)]
    with pytest.raises(UserError, match="change together"):
        fit_rate_law(together)
    assert fit_rate_law(together, fixed={"batch_size": 0.5}).fitted == ("tokens",)


def write_run(directory: Path, rate: float, loss: float, steps: int = 100, rows: Any = 8, **changes: Any) -> None:
    """Writes what the command reads of a run."""
    identity = {
        "optimizer": {"type": "adam", "learning_rate": rate},
        "trainer": {"seed": 0, "num_train_steps": steps, "train_batch_size": rows},
        "model": {"seq_len": SEQ_LEN},
        **changes,
    }
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"id": directory.name, "identity": identity}))
    (directory / "metrics.jsonl").write_text(json.dumps({"step": min(steps, 400), "eval/loss": loss}) + "\n")


def write_runs(path: Path) -> list[str]:
    for steps, rows, rate in itertools.product(STEPS, ROWS, (0.0025, 0.005, 0.01, 0.02, 0.04)):
        best = best_rate(steps * rows * SEQ_LEN, rows * SEQ_LEN)
        write_run(path / "logs" / f"{steps}-{rows}-{rate}", rate, 2 + 0.1 * math.log(rate / best) ** 2, steps, rows)
    return sorted(directory.name for directory in (path / "logs").iterdir())


def test_the_command_recovers_a_law_and_prints_it_for_a_ladder(in_tmp_path: Path, lmt: Lmt) -> None:
    names = write_runs(in_tmp_path)
    plain = json.loads(lmt("ladder", "rate", *names, "--tokens", "1e6", "--batch-size", "1024", "--json").stdout)
    law = RateLaw.model_validate(plain["learning_rate_law"])
    assert (law.tokens_exponent, law.batch_exponent) == pytest.approx((-0.4, 0.5))
    assert plain["predicted"]["rate"] == pytest.approx(best_rate(1e6, 1024))
    text = lmt("ladder", "rate", *names).stdout
    assert "exponent of tokens, 90%: -0.4 (-0.4 to -0.4)" in text
    section = yaml.safe_load(text[text.index("run_configurator:") :])["run_configurator"]["learning_rate_law"]
    assert RateLaw.model_validate(section).rate(1e6, 1024) == pytest.approx(best_rate(1e6, 1024), rel=1e-4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"steps": 500}, "ends at step 400 of 500"),
        ({"rows": [[0, 8], [50, 16]]}, "changes its batch during the run"),
        ({"model": {"seq_len": 64}}, "differ in model.seq_len; a law of learning rates is of runs that differ in"),
        ({"rows": 32}, "at an end of the rates 0.01; add runs with a lower rate"),
    ],
)
def test_other_runs_are_refused(in_tmp_path: Path, lmt: Lmt, run: dict[str, Any], message: str) -> None:
    names = write_runs(in_tmp_path)
    write_run(in_tmp_path / "logs" / "other", **{"rate": 0.01, "loss": 2.0, **run})
    result = lmt("ladder", "rate", *names, "other")
    assert result.returncode == 2
    assert message in result.stderr


def test_the_metric_has_to_exist(in_tmp_path: Path, lmt: Lmt) -> None:
    result = lmt("ladder", "rate", *write_runs(in_tmp_path), "--metric", "eval/none")
    assert result.returncode == 2
    assert "no positive number eval/none" in result.stderr


BASE = {"hidden_dim": 32, "intermediate_dim": 96, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1}


@pytest.mark.parametrize("parametrization", [{"type": "standard"}, {"type": "completep", "base": BASE}])
def test_a_ladder_has_the_rate_of_the_length_and_batch_of_each_size(parametrization: Any) -> None:
    path = Path(__file__).parents[2] / "configs/ladder_nano.yaml"
    plain = yaml.safe_load(path.read_text())
    law = {"learning_rate": 0.02, "tokens": 1e6, "batch_size": 4096, "batch_exponent": 0.5}
    plain["run_configurator"] |= {"learning_rate_law": law, "lr_multiplier": 2.0}
    ladder = ModelLadder.model_validate({**plain, "parametrization": parametrization})
    rates = []
    for size in ladder.sizes:
        num_params = ladder.get_num_params(size, 256)
        batch = ladder.batch_shape(size, vocab_size=256).batch_size
        tokens = ladder.run_configurator.configure_duration(num_params, batch)
        rates.append(rung_optimizer(ladder, size, batch, 256).learning_rate)
        assert rates[-1] == pytest.approx(2 * 0.02 * (tokens / 1e6) ** -0.32 * (batch / 4096) ** 0.5)
    assert len(set(rates)) == len(rates)


def test_an_exponent_of_the_batch_needs_a_batch() -> None:
    with pytest.raises(ValidationError, match=r"batch_exponent=0\.5 needs batch_size"):
        RateLaw(learning_rate=0.01, tokens=1e6, batch_exponent=0.5)
