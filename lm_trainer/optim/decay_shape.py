"""Configuration blocks for `lr_schedule`: the shape of the decay and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from lm_trainer.core.config import Config, IgnoredKey
from lm_trainer.optim.schedule import POWER_EXPONENT, POWER_SCALE, Constants, ScheduleName


class PlainShape(Config):
    """A shape that has no constants."""

    type: Literal["constant", "linear", "inv"]

    @property
    def constants(self) -> Constants:
        return Constants()


class CosineShape(Config):
    """A cosine that is raised to a power."""

    type: Literal["cosine"] = "cosine"
    exponent: PositiveFloat = 1.0
    """The power to which the cosine is raised; above 1, the learning rate falls earlier."""

    @property
    def constants(self) -> Constants:
        return Constants(exponent=self.exponent)


class InvSqrtShape(Config):
    """Inverse square root of the number of steps of warm-up and decay, divided by a timescale."""

    type: Literal["inv_sqrt"] = "inv_sqrt"
    timescale: PositiveFloat = 10_000.0
    """Number of steps of warm-up and decay up to which the learning rate stays at the peak."""

    @property
    def constants(self) -> Constants:
        return Constants(timescale=self.timescale)


_FROM_RUN = IgnoredKey("the run itself says how many tokens each step has")


class PowerShape(Config):
    """Power law of the number of tokens since the start of the cycle."""

    ignored_keys: ClassVar[Mapping[str, IgnoredKey]] = {"batch_size": _FROM_RUN, "seq_length": _FROM_RUN}

    type: Literal["power"] = "power"
    a: PositiveFloat = POWER_SCALE
    """Learning rate at one token, per row of the batch."""
    b: float = Field(default=POWER_EXPONENT, lt=0)
    """The exponent of the number of tokens."""

    @property
    def constants(self) -> Constants:
        return Constants(power_scale=self.a, power_exponent=self.b)


_WSD = "lr_schedule: linear with decay: 0.1, which holds the peak until the last tenth of the run"
_ELSEWHERE = {
    "wsd": _WSD,
    "wsd_s": f"{_WSD}; with cycles: N it does so N times",
    "warmup_stable_decay": _WSD,
    "trapezoidal": _WSD,
    "cosine_with_warmup": "lr_schedule: cosine with warmup",
    "linear_with_warmup": "lr_schedule: linear with warmup",
    "constant_with_warmup": "lr_schedule: constant with warmup",
    "cosine_with_restarts": "lr_schedule: cosine with cycles",
    "cosine_with_min_lr": "lr_schedule: cosine with min_lr_ratio",
    "inverse_sqrt": "lr_schedule: inv_sqrt",
}
"""Maps the names of schedules in other frameworks to the equivalent configuration here."""


def _refuse_names_of_others(value: object) -> object:
    name = value.get("type") if isinstance(value, dict) else value
    spelling = _ELSEWHERE.get(name.lower().replace("-", "_")) if isinstance(name, str) else None
    if spelling is not None:
        raise ValueError(f"{name!r} is written here as {spelling}")
    return value


AnyShape = Annotated[CosineShape | InvSqrtShape | PowerShape | PlainShape, Field(discriminator="type")]
DecayShape = Annotated[ScheduleName | AnyShape, BeforeValidator(_refuse_names_of_others)]
"""The name of a shape, or a block with a shape and its constants."""
