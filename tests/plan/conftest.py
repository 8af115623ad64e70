"""Programs that are compiled once in a test, however often it plans them."""

from __future__ import annotations

import pytest

from lm_trainer.plan.memory import StepMemory
from lm_trainer.step.dispatch.memory import ProgramBytes


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets plans of one test that differ in the budget alone share their programs."""
    compile_all, kept = StepMemory.compile, dict[tuple[str, int, str, int | None], dict[str, ProgramBytes]]()

    def compile_new(memory: StepMemory, rows: int | None = None) -> dict[str, ProgramBytes]:
        key = (memory.config.model_dump_json(), memory.program.sharding.mesh.size, memory._platform, rows)
        if key not in kept:
            kept[key] = compile_all(memory, rows)
        return kept[key]

    monkeypatch.setattr(StepMemory, "compile", compile_new)
