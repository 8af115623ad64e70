"""The first divergence of two runs and its likely causes, from their directories alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.reproduce.record import RunRecord, equal_bits
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.environment import environment_differences


@dataclass
class Divergence:
    """The first step whose numbers differ."""

    step: int
    after: int | None
    """The last step before it that both runs have recorded, with equal numbers; None if there is none."""
    values: dict[str, tuple[Any, Any]]
    """The metrics that differ, by name, of both runs; empty if only the parameters of the checkpoints differ."""


@dataclass
class Comparison:
    """Result of the comparison of two runs, `a` and `b`."""

    a: str
    b: str
    common: int
    """The number of steps that both have recorded."""
    last: int
    """The last of them."""
    divergence: Divergence | None
    causes: dict[str, list[str]] = field(default_factory=dict)
    """Differences that may decide numbers, as `NAME: A -> B`, under `configuration`, `data` and `code and packages`, in
    this order of likelihood. If the runs are equal all the same, they made no difference."""
    harmless: list[str] = field(default_factory=list)
    """Differences that decide no number: of the numbers of devices and processes."""
    checkpoint: int | None = None
    """The first step whose checkpoints, of both runs, hold other parameters."""
    parameters: list[str] = field(default_factory=list)
    """Their names, in the order of the model."""
    unchanged: int = 0
    """The number of parameters that are equal there."""


def compare(a: RunRecord, b: RunRecord) -> Comparison:
    """Compares the steps that both runs have recorded, and the checkpoints of the same steps.

    Raises:
        UserError: when there is no such step.
    """
    common = [step for step in a.computed if step in b.computed and _shared(a, b, step)]
    if not common:
        raise UserError(
            f"{a.id} and {b.id} have no step in common: {a.id} has recorded {_range(a)}, {b.id} {_range(b)}; "
            f"trainer.steps_per_log says which steps are"
        )
    result = Comparison(a.id, b.id, len(common), common[-1], _first_difference(a, b, common))
    _compare_checkpoints(a, b, result)
    at = result.divergence.step if result.divergence else result.last
    config, data = _configuration(a, b, at), _data(a, b)
    software = environment_differences(a.attempt(at), b.attempt(at))
    causes = {"configuration": config, "data": data, "code and packages": software}
    result.causes = {kind: lines for kind, lines in causes.items() if lines}
    result.harmless = _harmless(a.attempt(at), b.attempt(at))
    return result


def _shared(a: RunRecord, b: RunRecord, step: int) -> list[str]:
    """The metrics of a step that both runs have recorded, and that are of the same steps in both."""
    alike = a.start == b.start or (a.covers_all_steps and b.covers_all_steps)
    return [name for name in a.computed[step] if name in b.computed[step] and (alike or name != "fingerprint")]


def _range(run: RunRecord) -> str:
    return f"steps {min(run.computed)} to {run.last}" if run.computed else "none"


def _first_difference(a: RunRecord, b: RunRecord, common: list[int]) -> Divergence | None:
    before = None
    for step in common:
        x, y = a.computed[step], b.computed[step]
        values = {name: (x[name], y[name]) for name in _shared(a, b, step) if not equal_bits(x[name], y[name])}
        if values:
            return Divergence(step, before, values)
        before = step
    return None


def _compare_checkpoints(a: RunRecord, b: RunRecord, result: Comparison) -> None:
    # In order, so that the first checkpoints that differ end the search.
    for step in sorted({*a.saved()} & {*b.saved()}):
        x, y = (run.checkpoint(step).get("hashes", {}) for run in (a, b))
        # Old checkpoints have no hashes; they tell nothing.
        other = [name for name in {**x, **y} if x.get(name) != y.get(name)]
        if x and y and other:
            # Parameters that differ earlier than any recorded metric does are the first divergence.
            result.checkpoint, result.parameters, result.unchanged = step, other, len({**x, **y}) - len(other)
            if result.divergence is None or step < result.divergence.step:
                result.divergence = Divergence(step, max((s for s in a.computed if s < step), default=None), {})
            return


def _configuration(a: RunRecord, b: RunRecord, step: int) -> list[str]:
    """The keys that differ, and the changes on the way to the step."""
    x, y = a.identity_at(step), b.identity_at(step)
    # Each run's configuration is compared in the light of the other's, whose code may know keys that this one lacks:
    # only keys that differ both ways count.
    there, back = changed_keys(x, y, _config(b, step)), changed_keys(y, x, _config(a, step))
    lines = [f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in there.items() if key in back]
    for run, other in ((a, b), (b, a)):
        lines += [
            f"of {run.id} from step {change['step']} on: {'; '.join(change['differences'])}"
            for change in run.changes
            if change["step"] < step and change not in other.changes
        ]
    return lines


def _config(run: RunRecord, step: int) -> Any:
    try:
        return run.config(step)
    except UserError:  # a loop of one's own, whose configuration is known by its identity alone
        return None


def _data(a: RunRecord, b: RunRecord) -> list[str]:
    """Differences of the data, as the first checkpoint of a step that both have tells, else the newest of each."""
    both = sorted({*a.saved()} & {*b.saved()})
    found = []
    for run in (a, b):
        steps = both[:1] or run.saved()[-1:]
        found.append(_flat(run.checkpoint(steps[0]).get("data_fingerprint") if steps else None))
    names = [name for name in found[0] if name in found[1] and found[0][name] != found[1][name]]
    return [f"{name}: {found[0][name]} -> {found[1][name]}" for name in names[:1]]


def _flat(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"tokens": value} if value else {}


def _harmless(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    counts = {
        "devices": (len(a.get("devices", ())), len(b.get("devices", ()))),
        "processes": (a.get("processes"), b.get("processes")),
    }
    return [f"{name}: {x} -> {y}" for name, (x, y) in counts.items() if x != y]
