"""Parametrizations: rules for hyperparameters of a model that were chosen for a smaller model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from lm_trainer.config.document import did_you_mean
from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.models import DecoderConfig
from lm_trainer.nn.transfer import ForwardFactors, forward_factors
from lm_trainer.objectives.base import PreferenceLossConfig
from lm_trainer.optim.base import OptimizerConfig

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig

_DEPTH = "num_layers"


class StandardConfig(Config):
    """The initial values of the model section and the learning rate of the optimizer section, for all parameters."""

    type: Literal["standard"] = "standard"

    def describe(self) -> str:
        """Returns a short description."""
        return self.type


class TransferConfig(Config):
    """A base model, for which the initial values and the optimizer section of the run were chosen."""

    type: str
    base: Mapping[str, Any] = Field(min_length=1)
    """Keys of the model section with the values of the base, such as `{hidden_dim: 256, num_heads: 4}`. All other
    settings of the base are the settings of the model section."""

    @field_validator("base")
    @classmethod
    def _has_a_size(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if "type" in value:
            raise ValueError("base.type: base and model are of one family; remove it")
        return value

    def describe(self) -> str:
        """Returns the rules and the sizes of the base: `mup, base hidden_dim 256`."""
        sizes = ", ".join(f"{key} {value}" for key, value in self.base.items())
        return f"{self.type}, base {sizes}"

    def base_model(self, model: DecoderConfig, *, num_layers: int | None = None) -> DecoderConfig:
        """Returns the model section of the base.

        Args:
            model: model section of the run.
            num_layers: number of layers, if it is not the base's.

        Raises:
            UserError: if the model family refuses a key of `base`.
        """
        depth = {} if num_layers is None else {_DEPTH: num_layers}
        values = {**model.model_dump(mode="json", include=model.model_fields_set), **self.base, **depth}
        try:
            return type(model).model_validate(values)
        except ValidationError as error:
            raise UserError("; ".join(_describe(problem, model) for problem in error.errors())) from None

    def factors(self, model: DecoderConfig, vocab_size: int) -> ForwardFactors:
        """Returns the factors of the forward pass. Raises `UserError` if there is no rule for the model."""
        as_deep, base = self.base_model(model, num_layers=model.num_layers), self.base_model(model)
        return forward_factors(model.spec(vocab_size), as_deep.spec(vocab_size), base.spec(vocab_size))


class MupConfig(TransferConfig):
    """Maximal update parametrization (Yang et al. 2022, arXiv 2203.03466): transfer over widths."""

    type: Literal["mup"] = "mup"

    @model_validator(mode="after")
    def _keeps_the_depth(self) -> Self:
        if _DEPTH in self.base:
            raise ValueError("base.num_layers: mup transfers over widths alone; remove it, or write type: completep")
        return self


class CompletePConfig(TransferConfig):
    """CompleteP (Dey et al. 2025, arXiv 2505.01618), with alpha = 1: transfer over widths and depths."""

    type: Literal["completep"] = "completep"

    @model_validator(mode="after")
    def _has_a_depth(self) -> Self:
        if _DEPTH not in self.base:
            raise ValueError("base.num_layers is missing: completep needs the depth of the base; or write type: mup")
        return self


AnyParametrization = Annotated[StandardConfig | MupConfig | CompletePConfig, Field(discriminator="type")]
"""The parametrizations that `parametrization:` accepts, distinguished by `type`."""


def check_parametrization(config: RunConfig) -> None:
    """Checks that there are rules for all parts of a run.

    Raises:
        ValueError: if there is no rule for a part; names the part.
    """
    parametrization = config.parametrization
    if isinstance(parametrization, StandardConfig):
        return
    name = f"parametrization: {parametrization.type}"
    if isinstance(config.optimizer, OptimizerConfig) and (problem := config.optimizer.transfer_problem()):
        raise ValueError(f"{name} and optimizer.type: {config.optimizer.type}: {problem}")
    if config.adapter is not None:
        raise ValueError(f"{name} has no rule for adapters; remove parametrization or adapter")
    if isinstance(config.loss, PreferenceLossConfig):
        raise ValueError(f"{name} is for training from random weights; remove it, or write loss: {{type: next_token}}")
    if config.model.own_code:
        raise ValueError(f"{name} has no rules for a model with code of your own; remove it")
    if config.use_hf_model_config:
        raise ValueError(f"{name} needs the model section; remove use_hf_model_config")
    try:
        parametrization.factors(config.model, vocab_size=1)
    except UserError as error:
        raise ValueError(f"{name}: {error}") from None


def _describe(problem: Any, model: DecoderConfig) -> str:
    key = ".".join(map(str, problem["loc"]))
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        reason = f"model type {model.type} has no such key{did_you_mean(key, type(model).model_fields)}"
    return f"base.{key}: {reason}" if key else f"base: {reason}"
