"""Result of `lmt bench mfu` as a small file that can be sent to others: figures and settings, and nothing private.

A file has only the fields below. Its texts are kinds of devices, versions, names of settings and their choices, so that
paths and names of files, machines, users, data and models cannot be part of it.
"""

from __future__ import annotations

import json
import platform
import typing
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

import lm_trainer
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import write_atomically
from lm_trainer.profile.mfu import MfuReport
from lm_trainer.run.config.run_config import RunConfig

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_Version = Annotated[str, Field(pattern=r"^[\w.+-]{1,40}$")]
_Kind = Annotated[str, Field(pattern=r"^[A-Za-z0-9 .()+-]{1,60}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
_Key = Annotated[str, Field(pattern=r"^(model|trainer|optimizer)\.[a-z0-9_]{1,60}$")]
_Field = Annotated[str, Field(pattern=r"^[a-z0-9_.]{1,80}$")]
_Setting = bool | int | float | Annotated[str, Field(pattern=r"^[\w.-]{1,40}$")]


class SharedDevices(Config):
    """Devices of a measurement."""

    kind: _Kind
    """Kind as in `jax.Device.device_kind`."""
    count: int = Field(gt=0)
    processes: int = Field(gt=0)
    mesh: dict[_Name, int]
    """Mesh axes with more than one device."""


class SharedStep(Config):
    """Settings of the step that was measured."""

    recipe: _Name | None
    """Name of a configuration that ships with the program, if it was measured."""
    changed: tuple[_Key, ...]
    """Keys that the command line set. Keys of data and of sections with names of their own are left out."""
    model: dict[_Field, _Setting]
    """Numbers and choices of the model section, by dotted key."""
    parameters: int
    vocabulary: int
    rows: int
    """Number of rows in the global batch."""
    seq_len: int
    microbatches: int
    dtype: _Name
    """Compute dtype of the matrix products."""
    determinism: _Name
    gather: _Name
    optimizer: _Name


class SharedFigures(Config):
    """Measured figures, in SI units."""

    samples: int
    step_seconds: float = Field(gt=0)
    """Median time of a step."""
    step_quartiles: tuple[float, float]
    tokens_per_second: float
    mfu: float | None
    """Share of the datasheet's peak; None if there is no datasheet figure for the device."""
    hfu: float | None
    of_matmul: float
    """Share of the FLOP/s of a matrix product that was timed in the same run."""


class SharedResult(Config):
    """A measurement that was sent."""

    format: Literal[1] = 1
    lm_trainer: _Version
    python: _Version
    system: Literal["Linux", "Darwin", "other"]
    packages: dict[Literal["jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"], _Version]
    devices: SharedDevices
    step: SharedStep
    figures: SharedFigures


def shared_result(
    config: RunConfig,
    report: MfuReport,
    mesh: Mapping[str, int],
    *,
    processes: int = 1,
    recipe: str | None = None,
    settings: Iterable[str] = (),
) -> SharedResult:
    """Returns the part of a measurement that may be sent to others.

    Args:
        config: configuration that was measured, with its model section and `trainer.gather` resolved.
        report: the measurement.
        mesh: mesh axis -> number of devices.
        processes: number of processes of the measurement.
        recipe: name of the configuration, if it ships with the program.
        settings: dotted keys that the command line has set.
    """
    work, step, trainer = report.workload, report.step_seconds, config.trainer
    schedule = trainer.batch_schedule
    return SharedResult(
        lm_trainer=lm_trainer.__version__,
        python=platform.python_version(),
        system=platform.system() if platform.system() in ("Linux", "Darwin") else "other",  # pyright: ignore[reportArgumentType]
        packages=dict(_package_versions()),  # pyright: ignore[reportArgumentType]
        devices=SharedDevices(
            kind=work.device_kind,
            count=work.device_count,
            processes=processes,
            mesh={axis: size for axis, size in mesh.items() if size > 1},
        ),
        step=SharedStep(
            recipe=recipe,
            changed=tuple(sorted({key for key in map(_public_key, settings) if key})),
            model={"type": config.model.type, **dict(_public_settings(config.model))},
            parameters=work.num_params,
            vocabulary=work.vocab_size,
            rows=schedule.at(0),
            seq_len=config.model.seq_len,
            microbatches=trainer.step_plan.microbatches.at(0).count,
            dtype=work.dtype,
            determinism=trainer.determinism,
            gather=trainer.gather,
            optimizer=config.optimizer.type,
        ),
        figures=SharedFigures(
            samples=report.samples,
            step_seconds=step.median,
            step_quartiles=(step.lower_quartile, step.upper_quartile),
            tokens_per_second=report.tokens_per_second,
            mfu=report.datasheet_fraction,
            hfu=report.hardware_fraction,
            of_matmul=report.matmul_fraction,
        ),
    )


def write_shared_result(result: SharedResult, path: Path) -> int:
    """Writes a result as JSON, and returns the number of bytes.

    Raises:
        UserError: if the file cannot be written.
    """
    text = json.dumps(result.model_dump(mode="json"), indent=1) + "\n"
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"--share {path}: cannot be written ({error.strerror})") from None
    return len(text.encode())


def read_shared_result(path: Path) -> SharedResult:
    """Reads a result that somebody sent.

    Raises:
        UserError: if the file is not such a result, or has anything else in it.
    """
    try:
        return TypeAdapter(SharedResult).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path}: not a file of `lmt bench mfu --share`: {error}") from None


def _package_versions() -> Iterable[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _public_key(setting: str) -> str | None:
    """Returns the first two parts of a key of the model, trainer or optimizer section; None for any other key."""
    section, _, name = setting.lstrip("-").partition("=")[0].partition(".")
    name = name.partition(".")[0]
    is_public = section in ("model", "trainer", "optimizer") and name.replace("_", "").isalnum()
    return f"{section}.{name}" if is_public else None


def _public_settings(section: BaseModel, prefix: str = "") -> Iterable[tuple[str, _Setting]]:
    """Yields the numbers of a section that differ from their defaults, and the choices among names of this program.

    Free text and dictionaries with names that a user gives are left out: they may be paths or names.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _public_settings(value, f"{prefix}{name}.")
        elif value == field.default or not isinstance(value, int | float | str):
            continue
        elif not isinstance(value, str) or value in _choices(field.annotation):
            yield f"{prefix}{name}", value


def _choices(annotation: Any) -> set[Any]:
    """Returns the values of the literals in an annotation."""
    if typing.get_origin(annotation) is Literal:
        return {*typing.get_args(annotation)}
    return {value for part in typing.get_args(annotation) for value in _choices(part)}
