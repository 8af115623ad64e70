"""Golden files: the exact numbers of a configuration's first steps, to compare with later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import write_atomically
from lm_trainer.reproduce.record import is_bitwise_equal
from lm_trainer.reproduce.verify import find_differing_names
from lm_trainer.trackers.json_lines import decode_non_finite
from lm_trainer.trackers.jsonl import encode_non_finite

FORMAT = 1
"""Version of the file format."""
BATCH, WEIGHTS, STATE = "batch", "weights", "state"
"""Names of digests: of the rows of a step, of each parameter, and of every array that a checkpoint would have."""
_KEYS = {
    "config": str,
    "overrides": list[str],
    "devices": list[int],
    "environment": dict,
    "code": dict,
    "identity": dict,
    "parameters": list[str],
    "steps": list[dict],
}
"""Keys of a file with the type of their value."""


@dataclass(frozen=True)
class StepRecord:
    """The exact results of one step. Step 0 has only the initial weights."""

    step: int
    """Number of completed steps."""
    values: Mapping[str, float | str]
    """Digest of the batch, metrics as in metrics.jsonl and, at the last step, the digest of the state and the run's
    fingerprint; in the order in which a step computes them."""
    weights: Mapping[str, str]
    """Digest of each parameter after the step, by name."""


@dataclass(frozen=True)
class Golden:
    """The content of a golden file."""

    config: str
    """Path of the configuration, relative to the file, or the name of a configuration that ships with lm_trainer."""
    overrides: Sequence[str]
    """Settings `KEY=VALUE` that override the configuration."""
    devices: Sequence[int]
    """Numbers of devices that gave these results."""
    environment: Mapping[str, Any]
    """Versions, kind of device and CPU threads, from `describe_numeric_environment`."""
    code: Mapping[str, str | None]
    """Commit and hash of the source code."""
    program: str | None
    """Hash of the compiled step."""
    identity: Mapping[str, Any]
    """The part of the configuration that affects the numbers."""
    steps: Sequence[StepRecord]
    """The steps from step 0 on."""

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.steps[-1].step


@dataclass(frozen=True)
class StepDifference:
    """The first step whose results differ, and the differing quantities in the order in which a step computes them."""

    step: int
    quantity: str
    """Name of the first quantity that differs: `batch`, a metric, `weights` or `state`."""
    recorded: Any
    now: Any
    equal: list[str]
    """Names of the quantities that the step computes before this one, all of which are equal."""
    others: list[str]
    """Names of further quantities that differ at this step."""
    parameters: list[str]
    """Names of the parameters that differ after this step."""


def compare_steps(recorded: StepRecord, now: StepRecord) -> StepDifference | None:
    """Compares the results of a step; None if all bits are equal."""
    common = [name for name in recorded.values if name in now.values and name not in (STATE, "fingerprint")]
    # The order in which a step computes them. The fingerprint differs exactly if another quantity does.
    order = [*common, WEIGHTS, *(name for name in (STATE,) if name in recorded.values and name in now.values)]
    parameters = find_differing_parameters(recorded.weights, now.weights)
    differing = [
        name
        for name in order
        if (parameters if name == WEIGHTS else not is_bitwise_equal(recorded.values[name], now.values[name]))
    ]
    if not differing:
        return None
    quantity, *others = differing
    old, new = recorded.values.get(quantity), now.values.get(quantity)
    if quantity == WEIGHTS:
        old, new = (weights.get(parameters[0]) for weights in (recorded.weights, now.weights))
    return StepDifference(recorded.step, quantity, old, new, order[: order.index(quantity)], others, parameters)


def find_differing_parameters(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of parameters that differ, or that only one of the mappings has."""
    missing = [name for name in {**recorded, **now} if name not in recorded or name not in now]
    return [*find_differing_names(recorded, now), *missing]


def write_golden(file: Path, golden: Golden) -> int:
    """Writes a golden file with one line per step, and returns its size in bytes."""
    names = list(golden.steps[0].weights)
    head = {
        "format": FORMAT,
        "config": golden.config,
        "overrides": list(golden.overrides),
        "devices": list(golden.devices),
        "environment": golden.environment,
        "code": golden.code,
        "program": golden.program,
        "identity": golden.identity,
        "parameters": names,
    }
    steps = [{"step": s.step, **s.values, WEIGHTS: [s.weights[name] for name in names]} for s in golden.steps]
    lines = ",\n".join(f"  {json.dumps(encode_non_finite(step))}" for step in steps)
    text = f'{json.dumps(encode_non_finite(head), indent=1)[:-2]},\n "steps": [\n{lines}\n ]\n}}\n'
    write_atomically(file, text)
    return len(text.encode())


def read_golden(file: Path) -> Golden:
    """Reads a golden file.

    Raises:
        UserError: if the file is missing, damaged, no golden file, or of another format version.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); `lmt golden record CONFIG -o {file}` writes it"
        ) from None
    except ValueError as error:
        raise _damaged_error(file, f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{file}: this is no golden file; `lmt golden record` writes one")
    if content["format"] != FORMAT:
        raise UserError(
            f"{file}: the file has format {content['format']}, and this version of lm_trainer reads format {FORMAT}; "
            f"record it again, or use the version that wrote it"
        )
    if invalid := [key for key, kind in _KEYS.items() if not _has_type(content.get(key), kind)]:
        raise _damaged_error(file, f"{', '.join(invalid)} missing or of another type")
    try:
        steps = [_parse_step(content["parameters"], step) for step in content["steps"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged_error(file, "a step is incomplete") from None
    if [step.step for step in steps] != list(range(len(steps))) or len(steps) < 2:
        raise _damaged_error(file, "steps are missing")
    return Golden(
        content["config"],
        content["overrides"],
        content["devices"],
        content["environment"],
        content["code"],
        content.get("program"),
        content["identity"],
        steps,
    )


def _has_type(value: object, kind: Any) -> bool:
    """Returns True for a value of a type in `_KEYS`."""
    if not (elements := get_args(kind)):
        return isinstance(value, kind)
    return isinstance(value, list) and all(isinstance(element, elements) for element in value)


def _parse_step(parameters: Sequence[str], step: Mapping[str, Any]) -> StepRecord:
    values = {name: decode_non_finite(value) for name, value in step.items() if name not in ("step", WEIGHTS)}
    return StepRecord(step["step"], values, dict(zip(parameters, step[WEIGHTS], strict=True)))


def _damaged_error(file: Path, reason: str) -> UserError:
    return UserError(f"{file} is damaged: {reason}; put back a copy, or record it again with `lmt golden record`")
