"""Base class of optimizer configurations: weight decay, clipping, skipping of bad steps, and the update rule."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, StrictBool, field_validator, model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.decay import decay_weights, decays_by_default, match_names
from lm_trainer.optim.learning_rate import LearningRateConfig
from lm_trainer.optim.optimizer import Optimizer
from lm_trainer.optim.params import Arrays, Params
from lm_trainer.optim.safeguards import ClipUpdateNormConfig, SkipStepConfig

if TYPE_CHECKING:
    import jax
    import optax


class OptimizerConfig(LearningRateConfig, Optimizer):
    """Configuration keys of every optimizer, and the update rule they share.

    A new optimizer defines `transform`, and sets `elementwise_transform` if the transform is elementwise. If more than
    the transform differs, it also overrides `clip_rule`, `decay_rule` or `rule`.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "build_weight_decay_mask": "use decay_mask(params), with a Param of lm_trainer.optim for each name",
    }

    elementwise_transform: ClassVar[bool] = False
    """True if `transform` computes the update of each element only from the element's own gradient and state and from
    scalars."""
    weights_in_state: ClassVar[bool] = False
    """True if the state contains weights, which must not be rounded."""
    transfers: ClassVar[bool] = False
    """True if `parametrization` has rules for the optimizer. A constant factor of all gradients of a parameter, and its
    square as factor of their curvature, must not change the update, apart from epsilon."""
    squares_in_state: ClassVar[tuple[str, ...] | None] = None
    """Fields of the state of `transform` that hold averages of squares, for `state_dtype: float8`; None if the state
    cannot be stored in 8 bits."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    weight_decay_modules: str | tuple[str, ...] | None = None
    """Parameters that decay: a regular expression that matches a dotted name from its start, such as
    `.*attn.*weight|.*mlp.*weight`, or a list of parts of names. Patterns may use `attn`, `token_embeddings`,
    `position_embeddings` and `lm_head` for `attention`, `embed.tokens`, `embed.positions` and `head`, and may append
    `.weight` to a name that does not end in it. They may also use the classes `Linear`, `Embedding`, `LayerNorm` and
    `RMSNorm`, and Levanter's names of modules, such as `c_attn` or `q_proj`. `lmt config show --decays` lists the
    matched parameters. A pattern that matches no parameter is an error."""
    default_weight_decay_mask: bool | None = None
    """Decay matrices and heads, but not biases, norms and embedding tables. null: only if weight_decay_modules is not
    set; true: in addition to weight_decay_modules; false: never, so that all parameters decay if weight_decay_modules
    is not set."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of the gradient; a gradient with a larger norm is scaled down to it. null: no clipping."""
    clip_update_norm: ClipUpdateNormConfig | None = None
    """Clip the norm of the update, based on the norms of previous updates; milder than skip_bad_steps. null: no
    clipping."""
    skip_bad_steps: StrictBool | Annotated[int, Field(strict=True, ge=2)] | SkipStepConfig = False
    """Skip steps whose loss or gradient norm is not finite or is much larger than in previous steps. true: with the
    default settings; a number: with a history of this many steps. A non-finite loss or gradient still stops the run if
    trainer.crash_on_nan and trainer.crash_on_inf are set."""
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"
    """Dtype of the optimizer's arrays that have the size of the parameters. bfloat16 halves their memory; stochastic
    rounding preserves small changes, and computation is in float32. Smaller arrays stay float32. With trainer.mp
    `p=bfloat16`, all arrays are bfloat16 anyway. float8, for optimizers that support it, quarters the memory: it stores
    8 bits per number and one more byte for every 32 numbers (MXFP8 of the OCP Microscaling specification 1.0; squares
    without a sign), with stochastic rounding. Weights with fewer than 4096 numbers, biases and scales of norms stay
    float32."""

    @model_validator(mode="after")
    def _weights_keep_their_digits(self) -> Self:
        if self.weights_in_state and self.state_dtype != "float32":
            raise ValueError(f"its state holds weights, which {self.state_dtype} would spoil; remove state_dtype")
        return self

    @model_validator(mode="after")
    def _state_bears_8_bits(self) -> Self:
        if self.state_dtype == "float8" and self.squares_in_state is None:
            able = ", ".join(sorted({*_types_with_8_bit_state(OptimizerConfig)}))
            raise ValueError(
                f"its state cannot be kept in 8 bits: write state_dtype: bfloat16, or take one of {able} for float8"
            )
        return self

    @field_validator("weight_decay_modules")
    @classmethod
    def _compiles(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        # An empty pattern is part of every name and would silently make all parameters decay.
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
        """Combines clipping, `rule`, rounding and skipping. See `Optimizer.build`.

        Raises:
            UserError: if `weight_decay_modules` matches no parameter, or `params` is a number of steps.
        """
        import optax

        from lm_trainer.optim.low_precision import keep_in_bfloat16, keep_in_float8
        from lm_trainer.optim.skip import skip_bad_steps

        if isinstance(params, int):
            raise UserError(
                "OptimizerConfig.build takes parameters, as {name: Param(name, shape, axes)}, not a number of steps; "
                "lr_scheduler(num_train_steps) is the learning rate, which `update` gets as an argument"
            )
        rule = optax.chain(self.clip_rule(), self.rule(params))
        # Skipping is outermost, because a skipped step must not change any state, including the state of rounding.
        if self.state_dtype == "bfloat16":
            rule = keep_in_bfloat16(rule)
        elif self.state_dtype == "float8":
            rule = keep_in_float8(rule, params, self.squares_in_state or ())
        if self.skip_bad_steps is False:
            return rule
        return skip_bad_steps(rule, SkipStepConfig.parse(self.skip_bad_steps))

    def build_one(self, name: str, params: Params) -> optax.GradientTransformationExtraArgs | None:
        """Returns the rule of `build` for one layer of one parameter; None with `clip_update_norm`, a global norm."""
        if self.clip_update_norm is not None:
            return None
        param, decays = params[name], self.decay_mask(params)[name]
        if param.axes[:1] == ("layers",):
            param = dataclasses.replace(param, shape=param.shape[1:], axes=param.axes[1:])
        # Patterns may match other parameters that are missing here.
        no_mask = {"weight_decay_modules": None, "default_weight_decay_mask": False}
        strength = self.weight_decay if decays else 0.0
        return self.model_copy(update={**no_mask, "weight_decay": strength}).build({name: param})

    def clip_rule(self) -> optax.GradientTransformation:
        """Returns the first transformation of the gradient, which clips it by its global norm."""
        from lm_trainer.optim.clip import clip_by_given_norm

        return clip_by_given_norm(self.max_grad_norm)

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the rule from clipped gradients to updates: transform, weight decay, clipping and learning rate."""
        import optax

        from lm_trainer.optim.clip import clip_update_norm
        from lm_trainer.optim.multipliers import with_multipliers

        clip = optax.identity() if self.clip_update_norm is None else clip_update_norm(self.clip_update_norm)
        # Before the decay, so that learning rate times decay is the same for all parameters.
        transform = with_multipliers(self.transform(params), params, self.curvature)
        return optax.chain(transform, self.decay_rule(params), clip, scale_by_given_learning_rate())

    @abstractmethod
    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the transformation that computes updates, like `scale_by_*` in optax.

        It maps the clipped gradient to the update before weight decay and before multiplication by the negative
        learning rate.
        """

    def transfer_problem(self) -> str | None:
        """Describes the reason why `parametrization` has no rule for this optimizer; None if it has one."""
        return None if self.transfers else "there is no rule for this optimizer"

    def matrix_update_norm(self, inputs: int, outputs: int) -> float | None:
        """Returns the spectral norm of an update of a matrix at a learning rate of 1, up to a constant factor.

        None if the elements of the update have a size of about 1 for any size of the matrix, as in Adam.
        """
        del inputs, outputs

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Returns the transformation that adds the weight decay."""
        return decay_weights(self.weight_decay, self.decay_mask(params))

    def decay_mask(self, params: Params) -> dict[str, bool]:
        """Maps the name of each parameter to true if the parameter decays.

        Raises:
            UserError: if `weight_decay_modules` matches no parameter.
        """
        named = match_names(self.weight_decay_modules, params) if self.weight_decay_modules else frozenset()
        default = self.default_weight_decay_mask
        if not self.weight_decay_modules and default is False:
            return dict.fromkeys(params, True)
        use_default = not self.weight_decay_modules or default is True
        return {name: name in named or (use_default and decays_by_default(param)) for name, param in params.items()}

    def metrics(self, opt_state: optax.OptState) -> dict[str, jax.Array]:
        """Reads scalars to log from the state returned by `update`. Must be called under `jit`."""
        import optax

        fields = {name: optax.tree_utils.tree_get(opt_state, name) for name in ("skipped_steps", "update_norm")}
        return {f"optim/{name}": value for name, value in fields.items() if value is not None}


def _types_with_8_bit_state(kind: type[OptimizerConfig]) -> Iterator[str]:
    """Yields the types of `kind` and its subclasses that support `state_dtype: float8`."""
    for subclass in kind.__subclasses__():
        if subclass.squares_in_state is not None and "type" in subclass.model_fields:
            yield subclass.model_fields["type"].default
        yield from _types_with_8_bit_state(subclass)


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by the negative of the argument `learning_rate`."""
    import jax
    import optax

    def update(
        updates: Arrays,
        state: optax.OptState,
        params: Arrays | None = None,
        /,
        *,
        learning_rate: jax.Array,
        **extra_args: PyTree,
    ) -> tuple[Arrays, optax.OptState]:
        del params, extra_args
        return jax.tree.map(lambda u: u * -learning_rate.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
