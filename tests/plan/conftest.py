"""Programs that are compiled once in a test, however often it plans them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lm_trainer.plan import run
from lm_trainer.plan.memory import StepMemory
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets plans of one test that differ in the budget alone share their programs."""
    programs_by_config = dict[tuple[str, int], MeasuredPrograms]()

    def sharing(config: RunConfig, vocab_size: int, devices: Sequence[Any], *further: Any) -> StepMemory:
        programs = programs_by_config.setdefault((config.model_dump_json(), len(devices)), MeasuredPrograms())
        return StepMemory(config, vocab_size, devices, *further, programs=programs)

    monkeypatch.setattr(run, "StepMemory", sharing)
