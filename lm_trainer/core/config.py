"""The base of every configuration model, and the value types that users write in YAML."""

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

from lm_trainer.core.bucket import PLACES
from lm_trainer.core.docstrings import field_docs
from lm_trainer.core.files import HUB_NAME, path_problem


@dataclass(frozen=True)
class Ignored:
    """Reason for which a key has no effect, and the values for which that is so; None: all."""

    reason: str
    values: tuple[Any, ...] | None = None


def _refuse_absent(config: type, name: str) -> None:
    """Raises AttributeError with what to use, for a name that other frameworks have."""
    for each in config.__mro__:
        if name in each.__dict__.get("absent", {}):
            raise AttributeError(f"there is no {config.__name__}.{name}: {each.__dict__['absent'][name]}")


class _ConfigType(type(BaseModel)):
    """The type of the classes, of which methods may be asked as well as of their objects."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            _refuse_absent(cls, name)
            return super().__getattr__(name)


class Config(BaseModel, metaclass=_ConfigType):
    """A frozen value that knows all its keys: an unknown key is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True,
        # A misspelt key would otherwise be a default that nobody notices.
        extra="forbid",
        # The input may be long, or hold a secret; `config.explain` shows what a person has to see of it.
        hide_input_in_errors=True,
        validate_default=True,
        allow_inf_nan=False,
        # pydantic reserves `model_`, with which several keys begin.
        protected_namespaces=(),
        # Most classes are only ever checked as a part of the whole configuration.
        defer_build=True,
    )

    refused_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other frameworks' configurations that are refused here, each with the reason or the replacement."""
    ignored_keys: ClassVar[Mapping[str, Ignored]] = {}
    """Such keys that may stand in a file and have no effect; said in a note. With another value than those that are
    named they are refused."""
    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """Such keys that mean the same as one of the keys here; said in a note."""

    respelt_keys: ClassVar[Mapping[str, Mapping[Any, tuple[str, Any]]]] = {}
    """Such keys that with some value mean that one of the keys here has another; by key and value."""

    replaced_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys of which an override, or a foreign one among them also in the file, takes the place of others that the file
    holds; those are dropped with a note."""

    refused_types: ClassVar[Mapping[str, str]] = {}
    """Values of `type` that a union with this class has not and other frameworks have, each with the reason or the
    replacement."""

    absent: ClassVar[Mapping[str, str]] = {
        "default_choice_name": "it is the default of the field `type`",
    }
    """Methods and properties that other frameworks' configurations have and these have not, each with what to use. A
    class inherits its bases' names."""

    # Hidden from type checkers, for which any attribute would exist otherwise.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            _refuse_absent(type(self), name)
            return super().__getattr__(name)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of the class, with the docstrings of its fields as their descriptions."""
        shown = handler(schema)
        properties = handler.resolve_ref_schema(shown).get("properties", {})
        for name, text in field_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return shown

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies as pydantic does, but for what this object has computed of its fields (`cached_property`)."""
        copy = super().model_copy(update=update, deep=deep)
        for name in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[name]
        return copy

    @property
    def changed_fields(self) -> set[str]:
        """The keys that differ from the defaults; unlike `model_fields_set` the same after writing and reading."""
        fields = type(self).model_fields.items()
        return {name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)}


def or_instance_of(base: type[Config]) -> WrapValidator:
    """Takes objects of `base` that were made in Python as they are, and checks all else as the annotation says."""
    return WrapValidator(lambda value, listed: value if isinstance(value, base) else listed(value))


Name = Annotated[str, "name"]
"""A key of a mapping that names one of several things, such as an axis: `token` there is no secret."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION_PATTERN = (
    r"^\s*(?=\d)(\d+(\.\d+)?\s*(ms|s|m|h|hr|d|w)"
    r"|(\d+\s*w\s*)?(\d+\s*d\s*)?(\d+\s*(h|hr)\s*)?(\d+\s*m\s*)?(\d+(\.\d+)?\s*s)?)\s*$"
)
_CLOCK = re.compile(r"(?:(\d+)\s*days?,?\s*)?(\d+):(\d\d):(\d\d)")
_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)hr?)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_duration(value: Any) -> timedelta:
    """Reads `15m`, `1h30m`, `90s`, `0.5h`, `2d`, `1w2d` or `172 hr`.

    Raises:
        ValueError: for a bare number (its unit would be a guess) or anything else.
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
    meant = f"; write {text}" if (text := _duration_of(value)) else ""
    raise ValueError(f"expected a duration such as 90s, 15m or 1h30m, got {value!r}{meant}")


def _duration_of(value: Any) -> str:
    """The text for a duration as others write it: `2 days, 4:13:02`, `+32 m 1 s`; empty for anything else."""
    if not isinstance(value, str):
        return ""
    if clock := _CLOCK.fullmatch(value.strip()):
        return "".join(
            f"{int(part)}{unit}" for part, unit in zip(clock.groups(), "dhms", strict=True) if int(part or 0)
        )
    signed = re.sub(r"\s", "", value.lower().removeprefix("+"))
    return signed if value.startswith("+") and _DURATION.fullmatch(signed) else ""


def format_duration(value: timedelta) -> str:
    """Writes a duration as a short text that `parse_duration` reads back as the same duration."""
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
"""A span of time as people write it: `15m`, `1h30m`, `90s`."""


def _is_positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(f"expected a duration above zero, got {format_duration(value)}")
    return value


PositiveDuration = Annotated[Duration, AfterValidator(_is_positive)]
"""Such a span that is not empty."""


def fraction_or_steps(value: float, total: int) -> int:
    """Turns a setting that is a fraction of `total` steps (<= 1.0 as a float) or a number of steps into steps.

    An `int` is always a number of steps; a `float` up to 1.0 is a fraction, as it is written in decimal, rounded down:
    0.29 of 100 steps are 29.

    Raises:
        ValueError: for a negative value or a fractional number of steps above 1.
    """
    if value < 0:
        raise ValueError(f"expected a fraction or a number of steps, got {value}")
    if isinstance(value, int):
        return value
    if value <= 1.0:
        # As decimals: in binary, 0.29 * 100 is 28.999999999999996.
        return int(Decimal(repr(float(value))) * total)
    if value != int(value):
        raise ValueError(f"{value} is neither a fraction (at most 1.0) nor a whole number of steps")
    return int(value)


def _is_fraction_or_steps(value: float) -> float:
    fraction_or_steps(value, 1)
    return value


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True)
class Takes:
    """The mark of a key that takes a path as text; callers in Python may give a `Path`.

    A `~` stays as it was written, for whoever uses the path: see `lm_trainer.core.files.expanded`.
    """

    schemes: tuple[str, ...] = ()
    """Schemes of the URLs that work in its place."""
    name: str = ""
    """A name that works in its place."""
    instead: str = ""
    """Advice to those who write a URL."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.no_info_before_validator_function(_path_as_text, handler(source))
        return core_schema.no_info_after_validator_function(self._checked, text)

    def _checked(self, value: str) -> str:
        if problem := path_problem(value, self.schemes, self.name):
            raise ValueError(f"{problem}. {self.instead}" if self.instead else problem)
        return value


LocalPath = Annotated[str, Takes()]
"""A path on this machine; a URL, which would be taken for the name of a directory, is refused."""

PlacePath = Annotated[str, Takes(schemes=PLACES)]
"""A path on this machine, or a URL of object storage."""

LocalPathOrHubName = Annotated[str, Takes(name=HUB_NAME)]
"""A path on this machine, or a name on the Hugging Face hub."""

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Seed of random numbers; JAX takes no more than 32 bits of it."""

FractionOrSteps = Annotated[NonNegativeInt | NonNegativeFloat, AfterValidator(_is_fraction_or_steps)]
"""A part of a length as people write it: `0.1` is a tenth, `100` so many steps."""
