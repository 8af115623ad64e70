"""Devices that compute wrong gradients are found by others, named, and do no harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.lying_devices import Lies, LyingDevice, always, lying, now_and_then, once
from lm_trainer.core.errors import HardwareError
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.step.check.cross_check import CrossCheck, Mismatch
from lm_trainer.step.check.digests import checksum
from lm_trainer.step.check.settings import CrossCheckConfig
from lm_trainer.step.check.verdict import Vote, judge
from lm_trainer.step.dispatch.mesh_group import MeshWide, dispatching_for
from lm_trainer.step.state.train_state import to_host
from tests.conftest import Lmt, RunLmt, refused, run_here
from tests.reproduce.conftest import metrics, write_config
from tests.step.test_layerwise import GPT2, LLAMA, VOCAB, config_of

# Without XLA's optimisations, a layer that exchanges gradients meanwhile is compiled differently.
pytestmark = pytest.mark.optimised

STEPS = 4
_SETUPS: dict[Any, tuple[TrainingSetup, Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    yield
    _SETUPS.clear()


def prepared(devices: int, *, wide: bool = False, **trainer: Any) -> tuple[TrainingSetup, Any]:
    """A compiled step on some devices, shared by the tests, and its batch."""
    model = trainer.pop("model", {**GPT2, "attn_pdrop": 0.1})
    key = json.dumps([model, devices, wide, trainer])
    if key not in _SETUPS:
        with dispatching_for("gpu" if wide else "cpu"):
            setup = build_setup(config_of(model, **trainer), VOCAB, jax.devices()[:devices])
        batch = random_batch(len(setup.step.local_rows()), 16, VOCAB)
        setup.step.compile(batch)
        _SETUPS[key] = setup, batch
    return _SETUPS[key]


class Outcome:
    """The outcome of some steps: the weights, the mismatches, and the step at which they stopped."""

    def __init__(self, mismatches: list[Mismatch], stopped: str | None, weights: dict[str, bytes], steps: int):
        self.mismatches, self.stopped, self.weights, self.steps = mismatches, stopped, weights, steps


def train(devices: int, liar: LyingDevice | None = None, mismatch: str = "stop", **options: Any) -> Outcome:
    every, check = options.pop("every", 1), options.pop("check", True)
    setup, batch = prepared(devices, **options)
    reports: list[Mismatch] = []
    config = CrossCheckConfig.model_validate({"every": every, "on_mismatch": mismatch})
    cross_check = CrossCheck(config, 7, reports.append)
    state, stopped = setup.init(), None
    with nullcontext() if liar is None else lying(liar):
        for step in range(1, STEPS + 1):
            due = cross_check if check and cross_check.is_due(step) else None
            try:
                state, _ = setup.take_step(state, batch, None, due)
            except HardwareError as error:
                stopped = str(error)
                break
    weights = {name: np.asarray(x).tobytes() for name, x in to_host(state.params).items()}
    return Outcome(reports, stopped, weights, state.step)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        pytest.param(2, {"gather": "model"}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(2, {"gather": "layer", "model": {**LLAMA, "num_layers": 4}}, marks=pytest.mark.slow),
        pytest.param(4, {"wide": True}, marks=pytest.mark.slow),
        pytest.param(3, {"wide": True}, marks=pytest.mark.slow),
        pytest.param(2, {"wide": True, "gather": "layer", "model": {**LLAMA, "num_layers": 4}}, marks=pytest.mark.slow),
        pytest.param(4, {"model_axis_size": 2, "tensor_parallel_axes": ["mlp"]}, marks=pytest.mark.slow),
    ],
)
def test_a_check_finds_nothing_on_sound_devices_and_changes_no_bit(devices: int, options: dict[str, Any]) -> None:
    checked, plain = train(devices, **options), train(devices, check=False, **options)
    assert (checked.mismatches, checked.stopped, checked.steps) == ([], None, STEPS)
    assert checked.weights == plain.weights
    if options.get("wide"):
        step: Any = prepared(devices, **options)[0].step
        assert isinstance(step._computing, MeshWide)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"gather": "model"}, {"wide": True, "gather": "model"}, {}, {"wide": True}],
    ids=["model", "model, wide", "layer", "layer, wide"],
)
@pytest.mark.parametrize("lies", [once(0), once(1), always(0), now_and_then(0.4, 1)])
def test_the_device_that_lies_is_named(options: dict[str, Any], lies: Lies) -> None:
    liar = LyingDevice(2, lies, seed=3)
    # As many microbatches as devices, so every gradient is checked.
    outcome = train(4, liar, elastic_shards=4, **options)
    (mismatch,) = outcome.mismatches
    assert liar.lied
    assert (mismatch.wrong, mismatch.decided, mismatch.repaired) == ([2], True, False)
    assert outcome.stopped is not None
    assert f"Wrong: device {jax.devices()[2].id} " in outcome.stopped
    assert outcome.steps == mismatch.step - 1, "the weights were not updated"
    assert all(verdict.right for verdict in mismatch.verdicts)
    json.dumps(mismatch.as_dict())


@pytest.mark.slow
def test_with_two_devices_one_that_does_not_repeat_is_named_and_otherwise_both() -> None:
    outcome = train(2, LyingDevice(1, once(0)), elastic_shards=2)
    assert (outcome.mismatches[0].wrong, outcome.mismatches[0].decided) == ([1], True)

    class Steady(LyingDevice):
        """Flips the same bit of the same element each time."""

        def corrupt(self, sums: Any, row: int) -> Any:
            self._random.seed(0)
            return super().corrupt(sums, row)

    outcome = train(2, Steady(1, always(0)), elastic_shards=2)
    assert (outcome.mismatches[0].wrong, outcome.mismatches[0].decided) == ([0, 1], False)
    assert outcome.stopped is not None
    assert "one of them is wrong" in outcome.stopped


@pytest.mark.slow
def test_a_single_device_finds_what_it_does_not_repeat() -> None:
    outcome = train(1, LyingDevice(0, once(0)), elastic_shards=1)
    assert (outcome.mismatches[0].wrong, outcome.mismatches[0].decided) == ([0], True)


@pytest.mark.slow
def test_a_repaired_step_has_the_right_bits_and_a_device_that_keeps_lying_stops_the_run() -> None:
    clean = train(4, elastic_shards=4)
    sound = LyingDevice(3, once(-1))
    train(4, sound, check=False, elastic_shards=4)
    for number in (0, sound.computed // STEPS):  # the gradient of the step, and the one that checks another device
        outcome = train(4, LyingDevice(3, once(number)), "repair", elastic_shards=4)
        (mismatch,) = outcome.mismatches
        assert (mismatch.wrong, mismatch.repaired, outcome.stopped) == ([3], True, None)
        assert outcome.weights == clean.weights
    outcome = train(4, LyingDevice(3, always(0)), "repair", elastic_shards=4)
    assert outcome.stopped is not None
    assert [m.repaired for m in outcome.mismatches] == [False]
    assert outcome.steps == 0


def test_only_due_steps_are_checked() -> None:
    sound = LyingDevice(1, once(-1))
    train(2, sound, check=False, elastic_shards=2)
    liar = LyingDevice(1, once(0))
    outcome = train(2, liar, every=2, elastic_shards=2)
    assert liar.lied == [0]
    assert outcome.mismatches == []
    per_step = sound.computed // STEPS
    assert liar.computed == (STEPS + 2) * per_step, "two of four steps are checked, by one more gradient of each device"


@pytest.mark.parametrize(
    ("votes", "right", "wrong"),
    [
        ([(0, "a"), (1, "b"), (2, "a")], "a", [1]),
        ([(0, "b"), (1, "a"), (2, "a")], "a", [0]),
        ([(0, "a"), (1, "b"), (2, "c")], None, [0, 1, 2]),
        ([(0, "a"), (1, "b"), (0, "a"), (1, "b")], None, [0, 1]),
        ([(0, "a"), (1, "b"), (0, "b"), (1, "b")], "b", [0]),
        ([(0, "a"), (0, "b"), (0, "b")], "b", [0]),
        ([(0, "a"), (0, "b"), (0, "c")], None, [0]),
    ],
)
def test_who_is_judged_wrong(votes: list[tuple[int, str]], right: str | None, wrong: list[int]) -> None:
    verdict = judge(5, [Vote(*vote) for vote in votes])
    assert (verdict.microbatch, verdict.right, [*verdict.wrong]) == (5, right, wrong)


@pytest.mark.slow
def test_a_run_stops_with_everything_saved_and_goes_on_with_the_same_bits(lmt: Lmt) -> None:
    trainer = {"max_devices": 3, "elastic_shards": 3, "train_batch_size": 6, "cross_check": {"every": 2}}
    config = write_config(Path.cwd(), trainer=trainer)
    assert lmt("train", config, "trainer.id=clean", "trainer.cross_check=null").returncode == 0
    # Two gradients of steps 1 to 3, the check of step 2, then the gradient of step 4.
    with lying(LyingDevice(1, once(4))):
        result = lmt("train", config)
    assert result.returncode == 77, result.stdout + result.stderr
    assert "step 4: loss or gradient of microbatch 1 differ between devices. Wrong: device" in result.stderr
    assert sorted(path.name for path in Path("checkpoints/run").iterdir() if path.name.isdigit()) == ["2", "3"]
    (line,) = [json.loads(text) for text in Path("logs/run/hardware.jsonl").read_text().splitlines()]
    assert (line["step"], line["wrong"], line["decided"], line["repaired"]) == (4, [1], True, False)
    assert len({vote["digest"] for vote in line["microbatches"][0]["votes"]}) == 2
    (alert,) = [line for line in metrics(Path(), "run") if line.get("alert") == "hardware"]
    assert alert["step"] == 4
    assert lmt("train", config).returncode == 0
    assert run_here("diff", "clean", "run").returncode == 0
    final = [
        [line["fingerprint"] for line in metrics(Path(), run) if "fingerprint" in line][-1] for run in ("clean", "run")
    ]
    assert final[0] == final[1]


def test_what_is_refused_and_said(lmt: Lmt) -> None:
    config = write_config(Path.cwd())
    check = "trainer.cross_check.every=2"
    refused(lmt("config", "check", config, check, "trainer.determinism=fast"), "cross_check has no effect")
    refused(lmt("config", "check", config, "trainer.cross_check.every=0"), "cross_check.every")
    result = lmt("train", config, check, "trainer.num_train_steps=2")
    assert "errors that repeat are not found" in result.stdout


@pytest.mark.slow
def test_processes_check_one_another(tmp_path: Path, run_lmt: RunLmt) -> None:
    config = write_config(tmp_path, trainer={"max_devices": None, "cross_check": {"every": 1}})
    for run, processes in (("one", 1), ("three", 3)):
        command = ("launch", "local", "-n", str(processes), config, f"trainer.id={run}", "trainer.cpu_threads=2")
        result = run_lmt(*command)
        assert result.returncode == 0, result.stdout + result.stderr
        assert not (tmp_path / "logs" / run / "hardware.jsonl").exists()
    assert run_lmt("diff", "one", "three").returncode == 0


@pytest.mark.slow
def test_the_burn_in_names_the_device_that_differs(lmt: Lmt) -> None:
    config = write_config(Path.cwd(), trainer={"max_devices": 3, "elastic_shards": 3, "train_batch_size": 6})
    command = ("bench", "hardware", config, "--minutes", "0", "--json")
    report = json.loads(lmt(*command).stdout)
    assert (report["equal"], report["rounds"], report["groups"], len(report["devices"])) == (True, 2, 3, 3)
    with lying(LyingDevice(2, always(1))):
        result = lmt(*command)
    assert result.returncode == 77, result.stderr
    report = json.loads(result.stdout)
    assert [name.split(",")[0] for name in report["wrong"]] == [f"device {jax.devices()[2].id} (cpu)"]
    assert [mismatch["step"] for mismatch in report["mismatches"]] == [2]
    refused(lmt(*command, "trainer.determinism=fast"), "one program over all devices")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_errors_in_many_elements_do_not_cancel(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(dtype)
    wrong_signs = x.copy()
    wrong_signs[0, 1, [3, 5]] *= -1
    first = checksum(jnp.asarray(x)).tolist()
    for wrong in (wrong_signs, -x, x * dtype(2), x / dtype(2), x[:, ::-1], np.zeros_like(x)):
        assert checksum(jnp.asarray(wrong)).tolist() != first
    # Batch shards have the same checksums as alone.
    assert checksum(jnp.asarray(np.concatenate([wrong_signs, x]))).tolist()[1:] == first
