"""Finds the first step at which two runs differ and the likely causes, from their run directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.reproduce.record import RunRecord, is_bitwise_equal
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.environment import environment_differences


@dataclass
class Divergence:
    """The first step at which the numbers of two runs differ."""

    step: int
    after: int | None
    """The last step before it that both runs recorded, with equal numbers; None if there is no such step."""
    values: dict[str, tuple[Any, Any]]
    """Values of both runs for each metric that differs, by name; empty if only the parameters in checkpoints differ."""


@dataclass
class Comparison:
    """Result of the comparison of two runs, `a` and `b`."""

    a: str
    b: str
    common: int
    """Number of steps that both runs recorded."""
    last: int
    """Last step that both runs recorded."""
    divergence: Divergence | None
    causes: dict[str, list[str]] = field(default_factory=dict)
    """Differences that may affect the numbers, as `NAME: A -> B`, under the keys `configuration`, `data` and `code and
    packages`, in order of likelihood. If the runs are equal, these differences had no effect."""
    harmless: list[str] = field(default_factory=list)
    """Differences in the number of devices and of processes, which do not affect the numbers."""
    checkpoint: int | None = None
    """First step at which the parameters in the checkpoints of the two runs differ."""
    parameters: list[str] = field(default_factory=list)
    """Names of the parameters that differ, in the order of the model."""
    unchanged: int = 0
    """Number of parameters that are equal at step `checkpoint`."""
    shared: int | None = None
    """Last step that both runs share, because one is a branch of the other or both have a common ancestor; None if they
    share no step."""


def compare_runs(a: RunRecord, b: RunRecord) -> Comparison:
    """Compares the steps that both runs recorded, and the checkpoints that both have of the same step.

    The steps that a branch shares with its ancestors are compared too.

    Raises:
        UserError: if the runs have no step in common.
    """
    a, b = a.with_past(), b.with_past()
    common = [step for step in a.computed if step in b.computed and _shared_metrics(a, b, step)]
    if not common:
        raise UserError(
            f"{a.id} and {b.id} have no step in common: {a.id} has recorded {_describe_steps(a)}, {b.id} "
            f"{_describe_steps(b)}; trainer.steps_per_log says which steps are"
        )
    result = Comparison(a.id, b.id, len(common), common[-1], _first_difference(a, b, common))
    _compare_checkpoints(a, b, result)
    compared_step = result.divergence.step if result.divergence else result.last
    result.shared = find_shared_step(a, b)
    x, y = a.owner(compared_step), b.owner(compared_step)
    config, data = _config_differences(x, y, compared_step), _data_differences(a, b)
    software = environment_differences(x.attempt_at(compared_step), y.attempt_at(compared_step))
    causes = {"configuration": config, "data": data, "code and packages": software}
    result.causes = {kind: lines for kind, lines in causes.items() if lines}
    result.harmless = _harmless_differences(x.attempt_at(compared_step), y.attempt_at(compared_step))
    return result


def find_shared_step(a: RunRecord, b: RunRecord) -> int | None:
    """Returns the last step that two runs share as branches; None if neither is related to the other."""
    lines = [_ancestors(run) for run in (a, b)]
    shared = [min(lines[0][location], lines[1][location]) for location in lines[0].keys() & lines[1].keys()]
    return max(shared, default=None) if a.location != b.location else None


def _ancestors(run: RunRecord) -> dict[str, int]:
    """Returns the last step that a run shares with itself and each of its ancestors, by location."""
    steps, shared = {run.location: run.last}, run.last
    while run.branch is not None and run.parent is not None:
        shared, run = min(shared, run.branch.step), run.parent
        steps[run.location] = shared
    return steps


def _shared_metrics(a: RunRecord, b: RunRecord, step: int) -> list[str]:
    """Returns the names of the metrics of a step that both runs recorded and that can be compared.

    Fingerprints can only be compared if they cover the same steps in both runs.
    """
    alike = a.start == b.start or (a.covers_all_steps and b.covers_all_steps)
    return [name for name in a.computed[step] if name in b.computed[step] and (alike or name != "fingerprint")]


def _describe_steps(run: RunRecord) -> str:
    return f"steps {min(run.computed)} to {run.last}" if run.computed else "none"


def _first_difference(a: RunRecord, b: RunRecord, common: list[int]) -> Divergence | None:
    last_equal = None
    for step in common:
        x, y = a.computed[step], b.computed[step]
        values = {
            name: (x[name], y[name]) for name in _shared_metrics(a, b, step) if not is_bitwise_equal(x[name], y[name])
        }
        if values:
            return Divergence(step, last_equal, values)
        last_equal = step
    return None


def _compare_checkpoints(a: RunRecord, b: RunRecord, result: Comparison) -> None:
    # Compares the checkpoints in ascending order, and stops at the first ones that differ.
    for step in sorted({*a.checkpoint_steps()} & {*b.checkpoint_steps()}):
        x, y = (run.read_checkpoint(step).get("hashes", {}) for run in (a, b))
        # Checkpoints of older versions contain no hashes to compare.
        differing = [name for name in {**x, **y} if x.get(name) != y.get(name)]
        if x and y and differing:
            # If parameters differ before any recorded metric does, they are the first divergence.
            result.checkpoint, result.parameters, result.unchanged = step, differing, len({**x, **y}) - len(differing)
            if result.divergence is None or step < result.divergence.step:
                result.divergence = Divergence(step, max((s for s in a.computed if s < step), default=None), {})
            return


def _config_differences(a: RunRecord, b: RunRecord, step: int) -> list[str]:
    """Lists the keys that differ, and the configuration changes up to the step."""
    x, y = a.identity_at(step), b.identity_at(step)
    # Compares in both directions, because the code of one run may have keys that the other code does not have. Only
    # keys that differ in both directions count.
    forward, backward = (
        changed_keys(x, y, _load_config_or_none(b, step)),
        changed_keys(y, x, _load_config_or_none(a, step)),
    )
    lines = [f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in forward.items() if key in backward]
    for run, other in ((a, b), (b, a)):
        lines += [
            f"of {run.id} from step {change['step']} on: {'; '.join(change['differences'])}"
            for change in run.changes
            if change["step"] < step and change not in other.changes
        ]
    return lines


def _load_config_or_none(run: RunRecord, step: int) -> Any:
    try:
        return run.load_config(step)
    except UserError:  # a run with a custom training loop records only its identity
        return None


def _data_differences(a: RunRecord, b: RunRecord) -> list[str]:
    """Lists the differences in the data.

    Compares the first checkpoints that both runs have of the same step, or otherwise the newest checkpoint of each run.
    """
    common = sorted({*a.checkpoint_steps()} & {*b.checkpoint_steps()})
    fingerprints = []
    for run in (a, b):
        steps = common[:1] or run.checkpoint_steps()[-1:]
        fingerprints.append(
            _fingerprint_by_name(run.read_checkpoint(steps[0]).get("data_fingerprint") if steps else None)
        )
    names = [
        name for name in fingerprints[0] if name in fingerprints[1] and fingerprints[0][name] != fingerprints[1][name]
    ]
    return [f"{name}: {fingerprints[0][name]} -> {fingerprints[1][name]}" for name in names[:1]]


def _fingerprint_by_name(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"tokens": value} if value else {}


def _harmless_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    counts = {
        "devices": (len(a.get("devices", ())), len(b.get("devices", ()))),
        "processes": (a.get("processes"), b.get("processes")),
    }
    return [f"{name}: {x} -> {y}" for name, (x, y) in counts.items() if x != y]
