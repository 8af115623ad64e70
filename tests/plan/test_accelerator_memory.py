"""The memory of an accelerator in a plan, from what a CPU's compiler says of the same programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.plan import Assumptions, plan_run
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.memory import StepMemory
from lm_trainer.profile.flops import parameter_count
from tests.plan.test_plan import FAST, LLAMA


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_an_accelerator_holds_nothing_while_it_updates_element_by_element():
    phases, config = {}, config_of({"model": LLAMA, "trainer": {"train_batch_size": 8}})
    for kind in ("cpu", "gpu"):
        memory = StepMemory(config, VOCAB, jax.devices()[:1], kind)
        phases[kind] = {phase.name: phase.parts for phase in memory.plan().phases}
    assert phases["gpu"]["update"]["temporary"] == 0 < phases["cpu"]["update"]["temporary"]
    assert phases["gpu"]["microbatch"]["temporary"] > 0


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("trainer", "share"),
    [({"mp": "p=f32,c=bfloat16"}, 0.7), ({"mp": "p=f32,c=bfloat16", **FAST}, 0.85), ({"mp": "f32"}, 1.0)],
)
def test_a_microbatch_in_bfloat16_takes_less_than_on_a_cpu(
    trainer: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
):
    # The largest microbatch that fits, which is not looked at here, would take further programs.
    monkeypatch.setattr("lm_trainer.plan.run.find_fitting_microbatch", lambda *_: None)

    def temporary() -> int:
        config = config_of({"model": LLAMA, "trainer": {"train_batch_size": 8, **trainer}})
        plan = plan_run(config, parse_devices("1xA100"), jax.devices()[:1], Assumptions(vocab_size=64))
        (phase,) = (phase for phase in plan.memory.phases if phase.name in ("microbatch", "step"))
        return phase.parts["temporary"]

    planned = temporary()
    monkeypatch.setattr("lm_trainer.plan.run._GROWING", 1.0)
    monkeypatch.setattr("lm_trainer.plan.run._GROWING_FAST", 1.0)
    assert planned == round(share * temporary())


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_tpu_casts_whole_layers_before_the_loop_over_them():
    model = {**LLAMA, "num_layers": 3, "scan_layers": True}
    config = config_of({"model": model, "trainer": {"train_batch_size": 8, "mp": "p=f32,c=bfloat16"}})
    temporary = {}
    for kind in ("gpu", "tpu"):
        memory = StepMemory(config, VOCAB, jax.devices()[:1], kind)
        phases = {phase.name: phase.parts for phase in memory.plan().phases}
        temporary[kind] = phases["microbatch"]["temporary"]
    spec = config.model.spec(VOCAB)
    layers = parameter_count(spec) - parameter_count(replace(spec, blocks=()))
    assert temporary["tpu"] == temporary["gpu"] + 2 * layers


@pytest.mark.slow
def test_recomputing_saves_memory_on_a_gpu_also_where_layers_are_unrolled():
    def microbatch(remat: bool) -> int:
        model = {**LLAMA, "num_layers": 4, "scan_layers": False, "gradient_checkpointing": remat}
        config = config_of({"model": model, "trainer": {"train_batch_size": 8}})
        plan = plan_run(config, parse_devices("1xH100"), jax.devices()[:1], Assumptions(vocab_size=64))
        (phase,) = (phase for phase in plan.memory.phases if phase.name == "microbatch")
        return phase.parts["temporary"]

    assert microbatch(remat=True) < 0.6 * microbatch(remat=False)
