"""Base class of the optimizers' configurations: weight decay, clipping, skipping of bad steps, and the update rule."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, StrictBool, field_validator, model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.optim.decay import decay_weights, decays_by_default, matched_names
from lm_trainer.optim.learning_rate import LearningRateConfig
from lm_trainer.optim.optimizer import Optimizer
from lm_trainer.optim.params import Params
from lm_trainer.optim.safeguards import ClipUpdateNormConfig, SkipStepConfig

if TYPE_CHECKING:
    import jax
    import optax


class OptimizerConfig(LearningRateConfig, Optimizer):
    """Keys of every optimizer, and the update rule that they have in common.

    A new optimizer defines `transform`, and sets `elementwise_transform` where that is true. Where its paper differs in
    more than that, it overrides `clip_rule`, `decay_rule` or `rule`.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "build_weight_decay_mask": "use decay_mask(params), with a Param of lm_trainer.optim for each name",
    }

    elementwise_transform: ClassVar[bool] = False
    """True if `transform` computes each number's update from its own gradient and state and given scalars alone."""
    weights_in_state: ClassVar[bool] = False
    """True if the state holds weights, which need all their digits."""
    squares_in_state: ClassVar[tuple[str, ...] | None] = None
    """The fields of the state of `transform` that hold averages of squares, for `state_dtype: float8`; None where its
    state does not bear 8 bits."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    weight_decay_modules: str | tuple[str, ...] | None = None
    """Parameters that decay: a regular expression that matches a dotted name from its start, such as
    `.*attn.*weight|.*mlp.*weight`, or a list of parts of names. `attn`, `token_embeddings`, `position_embeddings` and
    `lm_head` may be written for `attention`, `embed.tokens`, `embed.positions` and `head`, and `.weight` after a name
    that does not end in it; so may the classes `Linear`, `Embedding`, `LayerNorm` and `RMSNorm`, and Levanter's names
    of modules, such as `c_attn` or `q_proj`. `lmt config show --decays` lists the parameters that are found. A pattern
    that matches no parameter is an error."""
    default_weight_decay_mask: bool | None = None
    """Decays matrices and heads, but no biases, norms and embedding tables. null: if no weight_decay_modules are set;
    true: in addition to weight_decay_modules; false: never, so that without weight_decay_modules everything decays."""
    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient is scaled down to this global norm; null: no clipping."""
    clip_update_norm: ClipUpdateNormConfig | None = None
    """Clips the norm of the update by the history of such norms; a milder form of skip_bad_steps. null: no clipping."""
    skip_bad_steps: StrictBool | Annotated[int, Field(strict=True, ge=2)] | SkipStepConfig = False
    """Skips steps whose loss or gradient norm is much larger than in the steps before, or not finite. true: with the
    defaults; a number: with a history of that many steps. The run still stops at a loss or gradient that is not finite
    while trainer.crash_on_nan and trainer.crash_on_inf say so."""
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """The dtype of the optimizer's arrays of the size of the parameters. bfloat16 halves their memory; they are rounded
    up or down by chance, so that small changes are not lost, and computed with in float32. Smaller arrays stay as they
    are, and with trainer.mp `p=bfloat16` all are bfloat16 anyway. float8 quarters it, where the
    optimizer can do with it: 8 bits, and one byte more for every 32 numbers (MXFP8 of the OCP Microscaling
    specification 1.0; squares without a sign), rounded in the same way. Weights of less than 4096 numbers, biases and
    scales of norms keep float32."""

    @model_validator(mode="after")
    def _weights_keep_their_digits(self) -> Self:
        if self.weights_in_state and self.state_dtype != "float32":
            raise ValueError(f"its state holds weights, which {self.state_dtype} would spoil; remove state_dtype")
        return self

    @model_validator(mode="after")
    def _state_bears_8_bits(self) -> Self:
        if self.state_dtype == "float8" and self.squares_in_state is None:
            able = ", ".join(sorted(_bearing_8_bits(OptimizerConfig)))
            raise ValueError(
                f"its state cannot be kept in 8 bits: write state_dtype: bfloat16, or take one of {able} for float8"
            )
        return self

    @field_validator("weight_decay_modules")
    @classmethod
    def _compiles(cls, value: Any) -> Any:
        # An empty pattern would be part of every name, and so decay all parameters without a word.
        if value is not None and (not value or "" in tuple(value)):
            raise ValueError("names nothing; write a regular expression, a list of parts of names, or null")
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"not a regular expression: {error}; write one such as '.*mlp.*weight', or a list of parts of names"
                ) from error
        return value

    @property
    def elementwise(self) -> bool:
        return self.elementwise_transform and self.clip_update_norm is None

    @property
    def skips_steps(self) -> bool:
        return self.skip_bad_steps is not False

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns clipping, `rule`, rounding and skipping as one rule; see `Optimizer.build`.

        Raises:
            UserError: when `weight_decay_modules` names no parameter, and for a number of steps in place of `params`.
        """
        import optax

        from lm_trainer.optim.low_precision import keep_in_bfloat16, keep_in_float8
        from lm_trainer.optim.skip import skip_bad_steps

        if isinstance(params, int):
            raise UserError(
                "OptimizerConfig.build takes parameters, as {name: Param(name, shape, axes)}, not a number of steps; "
                "lr_scheduler(num_train_steps) is the learning rate, which `update` gets as an argument"
            )
        whole = optax.chain(self.clip_rule(), self.rule(params))
        # Skipping is outermost: a skipped step must leave no trace in any state, that of the rounding included.
        if self.state_dtype == "bfloat16":
            whole = keep_in_bfloat16(whole)
        elif self.state_dtype == "float8":
            whole = keep_in_float8(whole, params, self.squares_in_state or ())
        if self.skip_bad_steps is False:
            return whole
        return skip_bad_steps(whole, SkipStepConfig.parse(self.skip_bad_steps))

    def build_one(self, name: str, params: Params) -> optax.GradientTransformationExtraArgs | None:
        """Returns `build` for one parameter, of one layer; None with `clip_update_norm`, whose norm is of all."""
        if self.clip_update_norm is not None:
            return None
        param, decays = params[name], self.decay_mask(params)[name]
        if param.axes[:1] == ("layers",):
            param = dataclasses.replace(param, shape=param.shape[1:], axes=param.axes[1:])
        # Patterns may name other parameters, which they would not find here.
        alone = {"weight_decay_modules": None, "default_weight_decay_mask": False}
        strength = self.weight_decay if decays else 0.0
        return self.model_copy(update={**alone, "weight_decay": strength}).build({name: param})

    def clip_rule(self) -> optax.GradientTransformation:
        """Returns the first transformation of the gradient: clipping by its global norm."""
        from lm_trainer.optim.clip import clip_by_given_norm

        return clip_by_given_norm(self.max_grad_norm)

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the rule from clipped gradients to updates: transform, weight decay, clipping, learning rate."""
        import optax

        from lm_trainer.optim.clip import clip_update_norm

        clip = optax.identity() if self.clip_update_norm is None else clip_update_norm(self.clip_update_norm)
        return optax.chain(self.transform(params), self.decay_rule(params), clip, scale_by_given_learning_rate())

    @abstractmethod
    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the update transform, as optax's `scale_by_*`: from the clipped gradient to the update, before weight
        decay and before the factor of minus the learning rate.
        """

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Returns the transformation that adds the weight decay."""
        return decay_weights(self.weight_decay, self.decay_mask(params))

    def decay_mask(self, params: Params) -> dict[str, bool]:
        """Says of each parameter whether it decays.

        Raises:
            UserError: when `weight_decay_modules` names no parameter.
        """
        named = matched_names(self.weight_decay_modules, params) if self.weight_decay_modules else frozenset()
        default = self.default_weight_decay_mask
        if not self.weight_decay_modules and default is False:
            return dict.fromkeys(params, True)
        use_default = not self.weight_decay_modules or default is True
        return {name: name in named or (use_default and decays_by_default(param)) for name, param in params.items()}

    def metrics(self, opt_state: Any) -> dict[str, jax.Array]:
        """Reads the scalars for the log from the state that `update` returned; meant to be called under `jit`."""
        import optax

        fields = {name: optax.tree_utils.tree_get(opt_state, name) for name in ("skipped_steps", "update_norm")}
        return {f"optim/{name}": value for name, value in fields.items() if value is not None}


def _bearing_8_bits(kind: type[OptimizerConfig]) -> Iterator[str]:
    """The types of the optimizers below `kind` that take `state_dtype: float8`."""
    for below in kind.__subclasses__():
        if below.squares_in_state is not None and "type" in below.model_fields:
            yield below.model_fields["type"].default
        yield from _bearing_8_bits(below)


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by minus the argument `learning_rate`."""
    import jax
    import optax

    def update(
        updates: Any, state: Any, params: Any = None, /, *, learning_rate: jax.Array, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        return jax.tree.map(lambda u: u * -learning_rate.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
