"""`lmt plan` of several configurations on several kinds of devices."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.core.errors import UserError
from lm_trainer.plan import Assumptions, parse_devices, plan_run
from lm_trainer.plan.comparison import PlannedConfig, comparison_lines, find_price, parse_prices
from lm_trainer.plan.table import plan_lines
from tests.conftest import RunLmt

MODEL = {"type": "gpt2", "seq_len": 32, "hidden_dim": 64, "num_layers": 1, "num_heads": 2}
TRAINER = {"train_batch_size": 8, "elastic_shards": 4, "num_train_steps": 10, "mp": "p=f32,c=bfloat16"}


def test_a_price_is_of_all_kinds_or_of_one():
    price_list = parse_prices(["3", "H100=2.5", "v5p=4.2"])
    for written, price in (("8xH100", 2.5), ("8 x h100", 2.5), ("v5p:2x2x2", 4.2), ("64xv5p", 4.2), ("8xA100", 3.0)):
        assert find_price(parse_devices(written), written, price_list) == price
    assert find_price(parse_devices("8xH100"), "8xH100", parse_prices(["NVIDIA H100 80GB HBM3=2"])) == 2
    assert find_price(parse_devices("8xH100"), "8xH100", parse_prices(["v5p=2"])) is None


@pytest.mark.parametrize("text", ["cheap", "H100=", "H100=-1", "=", "nan", "H100=inf"])
def test_other_prices_are_refused(text: str):
    with pytest.raises(UserError, match=r"--price .*H100=2\.5"):
        parse_prices([text])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_table_has_a_row_for_each_pair():
    config, group = config_of({"model": MODEL, "trainer": TRAINER}), parse_devices("2xH100")
    plan = plan_run(config, group, jax.devices()[:2], Assumptions(price=2.5, vocab_size=VOCAB, memory=10**9))
    small = plan_run(config, group, jax.devices()[:2], Assumptions(vocab_size=VOCAB, memory=1))
    refused = PlannedConfig("b.yaml", "64xH100", None, "they cannot share 8 microbatches")
    head, *rows, reason, _ = comparison_lines(
        [PlannedConfig("a.yaml", "2xH100", plan), PlannedConfig("c.yaml", "x", small), refused]
    )
    assert head.split() == ["configuration", "devices", "peak", "of", "fits", "step", "tokens/s", "time", "cost"]
    first = rows[0].split()
    assert first[:2] == ["a.yaml", "2xH100"]
    assert "yes" in first
    assert plan.time is not None
    assert f"{8 * 32 / plan.time.step_seconds:,.0f}" in first
    assert plan.time.expected is not None
    expected = next(line for line in plan_lines(plan) if line.startswith("expected"))
    assert f"{plan.time.step_seconds:.3g} s a step, {plan.time.mfu:.0%} MFU" in expected
    assert "tokens/s a device, with products" in expected
    assert plan.as_dict()["time"]["expected"]["memory"] == plan.time.expected.memory
    assert "NO" in rows[1].split()
    assert "none:" in rows[2]
    assert reason == "b.yaml on 64xH100: they cannot share 8 microbatches"


@pytest.mark.slow
def test_the_command_plans_all_of_them(run_lmt: RunLmt, in_tmp_path: Path):
    for name in ("a.yaml", "b.yaml"):
        (in_tmp_path / name).write_text(
            json.dumps({"model": MODEL, "trainer": TRAINER, "data": {"tokenizer": "bytes"}})
        )
    pairs = ("a.yaml", "b.yaml", "trainer.train_batch_size=4", "--devices", "2xH100", "--devices", "8xv5p")
    done = run_lmt("plan", *pairs, "--price", "H100=2", "--json")
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert [(plan["config"], plan["wanted"]) for plan in plans] == [
        (name, devices) for name in ("a.yaml", "b.yaml") for devices in ("2xH100", "8xv5p")
    ]
    first, second = plans[:2]
    assert first["work"]["tokens_per_step"] == 4 * 32
    assert first["fits"]
    assert first["time"]["cost"] == pytest.approx(2 * first["time"]["device_hours"])
    assert "8 devices along the data axes cannot share 4 microbatches" in second["refused"]
    forgotten = run_lmt("plan", "a.yaml", "trainer.seed", "--devices", "2xH100")
    assert forgotten.returncode == 2
    assert "trainer.seed" in forgotten.stderr
    assert "no such file" not in forgotten.stderr
    absent = run_lmt("plan", "a.yaml", "absent.yaml", "--devices", "2xH100")
    assert absent.returncode == 2
    assert "absent.yaml: no such file" in absent.stderr
