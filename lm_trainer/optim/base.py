"""What every optimizer shares: the learning rate over time, weight decay, clipping, skipping of bad steps."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import jax
import optax
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    field_validator,
    model_validator,
)

from lm_trainer.core.config import Config, FractionOrSteps, fraction_or_steps
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.clip import ClipUpdateNormConfig, clip_by_given_norm, clip_update_norm
from lm_trainer.optim.cycles import Lengths, cycle_ends, plan_cycles
from lm_trainer.optim.decay import decay_weights, decays_by_default, matched_names
from lm_trainer.optim.low_precision import keep_in_bfloat16
from lm_trainer.optim.params import Params
from lm_trainer.optim.schedule import Schedule, ScheduleName
from lm_trainer.optim.skip import SkipStepConfig, skip_bad_steps


class OptimizerConfig(Config):
    """Fields that all optimizers have.

    To add one: give `direction`, and `elementwise_direction` where it holds. What is left is the same for all.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        "cooldown": "deprecated; use `decay`",
        "haps": "deprecated; use `cycles`",
        "warmup_ratio": "renamed; use `warmup`",
    }
    elementwise_direction: ClassVar[bool] = False
    """Whether `direction` moves each number by nothing but its own gradient and state and given scalars."""
    weights_in_state: ClassVar[bool] = False
    """Whether the state holds weights, which need all their digits."""

    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    weight_decay_modules: str | tuple[str, ...] | None = None
    """Which parameters decay: a regular expression that matches a dotted name from its start, such as
    `.*attn.*weight|.*mlp.*weight`, or a list of parts of names. `attn`, `token_embeddings`, `position_embeddings` and
    `lm_head` may be written for `attention`, `embed.tokens`, `embed.positions` and `head`, and `.weight` after what
    is a weight without saying so. `lmt config show --decays` lists what is found. A pattern that matches no parameter
    is an error."""
    default_weight_decay_mask: bool | None = None
    """Whether matrices and heads decay, but no biases, norms and embedding tables. null: if no weight_decay_modules
    are set; true: in addition to weight_decay_modules; false: never, so that without weight_decay_modules everything
    decays."""
    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient is scaled down to this global norm; null: no clipping."""
    clip_update_norm: ClipUpdateNormConfig | None = None
    """Clips the norm of the update by the history of such norms; a milder form of skip_bad_steps. null: no clipping."""
    skip_bad_steps: StrictBool | Annotated[int, Field(strict=True, ge=2)] | SkipStepConfig = False
    """Skips steps whose loss or gradient norm is much larger than in the steps before, or not finite. true: with the
    defaults; a number: with a history of that many steps. The run still stops at what is not finite while
    trainer.crash_on_nan and trainer.crash_on_inf say so."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the optimizer keeps arrays of the size of the parameters in. bfloat16 halves their memory; they are rounded
    up or down by chance, so that small changes are not lost, and computed with in float32. Smaller arrays stay as they
    are, and with trainer.mp `p=bfloat16` all are bfloat16 anyway."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end of the decay, as a part of the peak."""
    warmup: FractionOrSteps = 0.01
    """Linear warm-up from 0 in the first cycle: a fraction of the cycle (a float up to 1.0) or a number of steps."""
    rewarmup: FractionOrSteps = 0.0
    """Linear warm-up of the other cycles from the learning rate at the end of the one before, like `warmup`; 0: the
    learning rate jumps back to the peak."""
    decay: FractionOrSteps | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Length of the decay at the end of each cycle, as a fraction of the cycle or in steps, or a list of steps, one for
    each cycle; null: everything after the warm-up. What is left between the two is at the peak."""
    cycles: PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """How many times warm-up, peak and decay repeat, or the steps at which each ends and the learning rate is lowest;
    the end of the run need not be listed."""
    cycle_length: PositiveInt | PositiveFloat | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Instead of `cycles`, how long each is: a fraction of the run (a float up to 1.0), a number of steps, or a list of
    numbers of steps. What is left of the run is a last, shorter cycle."""
    cycle_peaks: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    """The peak of each cycle as a multiple of `learning_rate`; null: all 1."""
    lr_schedule: ScheduleName = "cosine"
    """The shape of the decay: `constant`, `linear`, `cosine`, `inv_sqrt` (inverse square root), `inv` (inverse) or
    `power` (by the batch size and the number of tokens, with `learning_rate` as its limit)."""

    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> Schedule:
        """The learning rate as a function of the step, from 0.

        Args:
            num_train_steps: steps of the run.
            tokens: the tokens of each step; only `power` needs them.

        Raises:
            ValueError: when cycles or phases do not fit into the run.
        """
        ends = cycle_ends(num_train_steps, cycles=self.cycles, cycle_length=self.cycle_length)
        cycles = plan_cycles(ends, Lengths(self.warmup, self.rewarmup, self.decay))
        peaks = self.cycle_peaks or ()
        return Schedule(self.lr_schedule, cycles, self.learning_rate, self.min_lr_ratio, tokens, peaks)

    @field_validator("cycle_length")
    @classmethod
    def _is_a_length(cls, value: Any) -> Any:
        if isinstance(value, float):
            fraction_or_steps(value, 1)
        return value

    @model_validator(mode="after")
    def _cycles_are_said_once(self) -> Self:
        if self.cycles is not None and self.cycle_length is not None:
            raise ValueError("set cycles (how many, or where they end) or cycle_length (how long they are), not both")
        if self.rewarmup and self.cycles is None and self.cycle_length is None:
            raise ValueError("rewarmup has no effect on a single cycle; set cycles or cycle_length too")
        return self

    @model_validator(mode="after")
    def _weights_keep_their_digits(self) -> Self:
        if self.weights_in_state and self.state_dtype != "float32":
            raise ValueError("its state holds weights, which bfloat16 would spoil; remove state_dtype")
        return self

    @field_validator("weight_decay_modules")
    @classmethod
    def _compiles(cls, value: Any) -> Any:
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
        """Whether the update of a number depends on nothing but its own gradient and state and given scalars.

        Only then can every device update its part of the state alone. Otherwise each computes the whole update, in one
        program that is the same on every mesh, because a sum over a part that the mesh decides would change its bits.
        """
        return self.elementwise_direction and self.clip_update_norm is None

    @property
    def curvature(self) -> Literal["hutchinson", "gauss_newton_bartlett"] | None:
        """Which estimate of the loss's curvature the update takes, as its keyword argument `curvature`."""
        return None

    @property
    def curvature_interval(self) -> int:
        """Steps from one estimate to the next; between them `curvature` is None."""
        return 1

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """The update rule for these parameters, on flat dicts of arrays by the same names.

        Its `update` takes keyword arguments, all of them float32 scalars that were computed once, outside, so that no
        device computes them differently: `learning_rate`, `grad_norm` (the global norm of the gradient) and `loss`. It
        takes and ignores others. In its state, arrays that are like parameters are found by
        `optax.tree_utils.tree_map_params`.

        Raises:
            UserError: when `weight_decay_modules` names no parameter.
        """
        whole = optax.chain(self.clip_rule(), self.rule(params))
        if self.state_dtype == "bfloat16":
            whole = keep_in_bfloat16(whole)
        if self.skip_bad_steps is False:
            return whole
        return skip_bad_steps(whole, SkipStepConfig.parse(self.skip_bad_steps))

    def clip_rule(self) -> optax.GradientTransformation:
        """What happens to the gradient first."""
        return clip_by_given_norm(self.max_grad_norm)

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """From clipped gradients to updates: direction, weight decay, clipping, times minus the learning rate."""
        clip = optax.identity() if self.clip_update_norm is None else clip_update_norm(self.clip_update_norm)
        return optax.chain(self.direction(params), self.decay_rule(params), clip, scale_by_given_learning_rate())

    @abstractmethod
    def direction(self, params: Params) -> optax.GradientTransformation:
        """From clipped gradients to what is subtracted after multiplication by the learning rate, but for the decay."""

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Adds the weight decay."""
        return decay_weights(self.weight_decay, self.decay_mask(params))

    def decay_mask(self, params: Params) -> dict[str, bool]:
        """Which parameters decay.

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
        """Scalars for the log, from the state that `update` returned; meant to be called under `jit`."""
        fields = {name: optax.tree_utils.tree_get(opt_state, name) for name in ("skipped_steps", "update_norm")}
        return {f"optim/{name}": value for name, value in fields.items() if value is not None}

    def eval_params(self, params: Any, opt_state: Any) -> Any:
        """The weights to evaluate and to export, from those that are trained and the optimizer's state."""
        del opt_state
        return params


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by minus the argument `learning_rate`."""

    def update(
        updates: Any, state: Any, params: Any = None, /, *, learning_rate: jax.Array, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        return jax.tree.map(lambda u: u * -learning_rate.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
