"""The base class of all configuration models, and the types of values that users write in YAML."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    WrapValidator,
)
from pydantic_core import CoreSchema, core_schema

from lm_trainer.core.bucket import STORAGE_SCHEMES
from lm_trainer.core.docstrings import field_docs
from lm_trainer.core.files import HUB_NAME, path_problem


@dataclass(frozen=True)
class IgnoredKey:
    """The reason why a key has no effect, and the values that it may have; None means all values."""

    reason: str
    values: tuple[Any, ...] | None = None


def _raise_unknown_attribute(config: type, name: str) -> None:
    """Raises AttributeError with the replacement if the name is known from other frameworks."""
    for base in config.__mro__:
        if name in base.__dict__.get("absent", {}):
            raise AttributeError(f"there is no {config.__name__}.{name}: {base.__dict__['absent'][name]}")


class _ConfigType(type(BaseModel)):
    """Metaclass with which absent methods are also explained when they are accessed on the class."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            _raise_unknown_attribute(cls, name)
            return super().__getattr__(name)


class Config(BaseModel, metaclass=_ConfigType):
    """Base of frozen configuration values. An unknown key is an error, and is never ignored."""

    model_config = ConfigDict(
        frozen=True,
        # Otherwise, a misspelt key would silently leave the default in effect.
        extra="forbid",
        # The input may be long or contain a secret; `lm_trainer.config.explain` shows the relevant part.
        hide_input_in_errors=True,
        validate_default=True,
        allow_inf_nan=False,
        # pydantic reserves the prefix `model_`, which several keys have.
        protected_namespaces=(),
        # Most classes are only validated as part of the full configuration.
        defer_build=True,
    )

    refused_keys: ClassVar[Mapping[str, str]] = {}
    """Maps keys of other frameworks that are refused here to the reason or the replacement."""
    ignored_keys: ClassVar[Mapping[str, IgnoredKey]] = {}
    """Keys of other frameworks that are accepted with a note but have no effect. Values that are not listed are
    refused."""
    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """Maps keys of other frameworks to the equivalent key here, which a note reports."""

    respelt_keys: ClassVar[Mapping[str, Mapping[Any, tuple[str, Any]]]] = {}
    """Maps keys of other frameworks and their values to the equivalent (key, value) here."""

    replaced_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Maps keys to other keys of the file that an override of the key replaces. A key of another framework also
    replaces them if it is in the file. Replaced keys are dropped with a note."""

    refused_types: ClassVar[Mapping[str, str]] = {}
    """Maps values of `type` that other frameworks have but unions with this class do not to the reason or the
    replacement."""

    absent: ClassVar[Mapping[str, str]] = {
        "default_choice_name": "it is the default of the field `type`",
    }
    """Maps methods and properties that only other frameworks' configurations have to the replacement. Subclasses
    inherit the entries of their bases."""

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            _raise_unknown_attribute(type(self), name)
            return super().__getattr__(name)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the JSON schema of the class, with field docstrings as descriptions."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for name, text in field_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return json_schema

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies as pydantic does, but drops cached values (`cached_property`) that depend on the old fields."""
        copy = super().model_copy(update=update, deep=deep)
        for name in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[name]
        return copy

    @property
    def changed_fields(self) -> set[str]:
        """Keys whose value differs from the default.

        Unlike `model_fields_set`, it is the same after writing and reading.
        """
        fields = type(self).model_fields.items()
        return {name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)}


def or_instance_of(base: type[Config]) -> WrapValidator:
    """Accepts instances of `base` that were made in Python unchanged, and validates other values by the annotation."""
    return WrapValidator(lambda value, validate: value if isinstance(value, base) else validate(value))


Name = Annotated[str, "name"]
"""A key of a mapping that is a name, such as the name of an axis, so that `token` is not treated as a secret here."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION_PATTERN = (
    r"^\s*(?=\d)(\d+(\.\d+)?\s*(ms|s|m|h|hr|d|w)"
    r"|(\d+\s*w\s*)?(\d+\s*d\s*)?(\d+\s*(h|hr)\s*)?(\d+\s*m\s*)?(\d+(\.\d+)?\s*s)?)\s*$"
)
_CLOCK = re.compile(r"(?:(\d+)\s*days?,?\s*)?(\d+):(\d\d):(\d\d)")
_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)hr?)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_duration(value: Any) -> timedelta:
    """Parses a duration such as `15m`, `1h30m`, `90s`, `0.5h`, `2d`, `1w2d` or `172 hr`.

    Raises:
        ValueError: if the value is a bare number, whose unit would be a guess, or anything else.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"a bare number is ambiguous; write {value}s, {value}m or {value}h")
    if isinstance(value, str):
        text = re.sub(r"(?<=\d)\s+(?=[a-z])|(?<=[a-z])\s+(?=\d)", "", value.strip().lower())
        if single := re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", text.removesuffix("r")):
            return timedelta(seconds=float(single[1]) * _UNIT_SECONDS[single[2]])
        if text and (parts := _DURATION.fullmatch(text)) and any(parts.groups()):
            weeks, days, hours, minutes, seconds = (float(p or 0) for p in parts.groups())
            return timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
    meant = f"; write {text}" if (text := _to_duration_text(value)) else ""
    raise ValueError(f"expected a duration such as 90s, 15m or 1h30m, got {value!r}{meant}")


def _to_duration_text(value: Any) -> str:
    """Converts the notations `2 days, 4:13:02` and `+32 m 1 s` to the text of a duration; empty for anything else."""
    if not isinstance(value, str):
        return ""
    if clock := _CLOCK.fullmatch(value.strip()):
        return "".join(
            f"{int(part)}{unit}" for part, unit in zip(clock.groups(), "dhms", strict=True) if int(part or 0)
        )
    signed = re.sub(r"\s", "", value.lower().removeprefix("+"))
    return signed if value.startswith("+") and _DURATION.fullmatch(signed) else ""


def format_duration(value: timedelta) -> str:
    """Formats a duration as a short text, from which `parse_duration` restores the same duration."""
    seconds = value.total_seconds()
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{int(seconds // _UNIT_SECONDS[unit])}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration, json_schema_input_type=str),
    PlainSerializer(format_duration, return_type=str),
    Field(json_schema_extra={"pattern": _DURATION_PATTERN, "examples": ["15m", "1h30m"]}),
]
"""A duration such as `15m`, `1h30m` or `90s`."""


def _check_positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(f"expected a duration above zero, got {format_duration(value)}")
    return value


PositiveDuration = Annotated[Duration, AfterValidator(_check_positive)]
"""A duration above zero."""


def resolve_steps(value: float, total: int) -> int:
    """Converts a fraction of `total` steps (a float up to 1.0), or a number of steps, to a number of steps.

    An `int` is always a number of steps. A `float` up to 1.0 is a fraction, which is evaluated in decimal and rounded
    down, so that 0.29 of 100 steps is 29.

    Raises:
        ValueError: if the value is negative, or is above 1 and not a whole number.
    """
    if value < 0:
        raise ValueError(f"expected a fraction or a number of steps, got {value}")
    if isinstance(value, int):
        return value
    if value <= 1.0:
        # Computed in decimal, because in binary, 0.29 * 100 is 28.999999999999996.
        return int(Decimal(repr(float(value))) * total)
    if value != int(value):
        raise ValueError(f"{value} is neither a fraction (at most 1.0) nor a whole number of steps")
    return int(value)


def _check_fraction_or_steps(value: float) -> float:
    resolve_steps(value, 1)
    return value


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True)
class PathType:
    """Annotation of a key that holds a path as text. Callers in Python may pass a `Path`.

    A `~` is kept, and is expanded where the path is used. See `lm_trainer.core.files.expand_home`.
    """

    schemes: tuple[str, ...] = ()
    """URL schemes that are accepted in addition to paths."""
    name: str = ""
    """Description of a kind of name that is accepted in addition to paths."""
    instead: str = ""
    """Advice to add to the error for a URL."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.no_info_before_validator_function(_path_as_text, handler(source))
        return core_schema.no_info_after_validator_function(self._check_path, text)

    def _check_path(self, value: str) -> str:
        if problem := path_problem(value, self.schemes, self.name):
            raise ValueError(f"{problem}. {self.instead}" if self.instead else problem)
        return value


LocalPath = Annotated[str, PathType()]
"""A path on this machine. A URL would be taken for a directory name, so it is refused."""

StorageLocation = Annotated[str, PathType(schemes=STORAGE_SCHEMES)]
"""A path on this machine, or an object storage URL."""

LocalPathOrHubName = Annotated[str, PathType(name=HUB_NAME)]
"""A path on this machine, or a name on the Hugging Face hub."""

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Seed of random numbers. JAX uses at most 32 bits."""

FractionOrSteps = Annotated[NonNegativeInt | NonNegativeFloat, AfterValidator(_check_fraction_or_steps)]
"""A fraction or a number of steps: `0.1` is a tenth of all steps, and `100` is 100 steps."""
