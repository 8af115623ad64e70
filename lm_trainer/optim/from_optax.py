"""Optax transformations as optimizers for runs that are built in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.optimizer import Optimizer
from lm_trainer.optim.params import Arrays, Params

if TYPE_CHECKING:
    import jax
    import optax


class OptaxOptimizer(Optimizer):
    """Applies an optax transformation, which includes its own learning rate, clipping and weight decay."""

    type: Literal["optax"] = "optax"
    name: Annotated[str, Field(min_length=1)]
    """Name of the transformation in the record of the run."""
    elementwise_transform: bool = False
    """See `from_optax`."""
    transformation: Annotated[Any, Field(exclude=True, repr=False)]
    """An `optax.GradientTransformation`; it is not recorded, because it consists of functions."""

    @property
    def elementwise(self) -> bool:
        return self.elementwise_transform

    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> None:
        """Returns None, because the transformation has its own learning rate."""
        del num_train_steps, tokens

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation. Its `update` passes on the loss as `value`, the name that optax uses for it.

        Typed random keys in the state are stored as their key data, because a checkpoint contains numbers.
        """
        import jax
        import optax

        del params
        rule = optax.with_extra_args_support(self.transformation)

        def init(params: Arrays) -> optax.OptState:
            return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, rule.init(params))

        def update(
            updates: Arrays,
            state: optax.OptState,
            params: Arrays | None = None,
            /,
            *,
            loss: jax.Array,
            **extra_args: PyTree,
        ) -> tuple[PyTree, optax.OptState]:
            del extra_args
            like = jax.eval_shape(rule.init, params)
            typed = jax.tree.map(lambda x, data: jax.random.wrap_key_data(data) if _is_key(x) else data, like, state)
            new_updates, state = rule.update(updates, typed, params, value=loss)
            return new_updates, jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def metrics(self, opt_state: optax.OptState) -> dict[str, jax.Array]:
        """Reads the learning rate that `optax.inject_hyperparams` stores in the state, if there is exactly one."""
        import jax.numpy as jnp
        import optax

        states = [values for _, values in optax.tree_utils.tree_get_all_with_path(opt_state, "hyperparams")]
        rates = [values["learning_rate"] for values in states if "learning_rate" in values]
        return {"optim/learning_rate": rates[0].astype(jnp.float32)} if len(rates) == 1 else {}


def _is_key(x: PyTree) -> bool:
    import jax
    import jax.numpy as jnp

    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def from_optax(name: str, transformation: optax.GradientTransformation, *, elementwise: bool = False) -> OptaxOptimizer:
    """Makes an optimizer for `Trainer` that applies an optax transformation, such as `optax.adamw(1e-3)`, and nothing
    else.

    The transformation gets the parameters, and the mean gradients in their dtype, as flat dicts of arrays by dotted
    name. No clipping, weight decay or learning rate is added. A transformation that takes the argument `value` gets the
    loss.

    Args:
        name: name of the transformation in the record of the run. Resuming with another name, or with a state of
            another structure, is rejected. Hyperparameters are not compared, because a transformation does not expose
            them.
        transformation: maps gradients to updates, which are added to the parameters.
        elementwise: set to True only if each element of the update depends only on its own gradient, its own state and
            scalars, so there is no clipping by a norm. Each device then updates its own shard of the state. Otherwise
            every device computes the full update, which has the same bits on any number of devices for every
            transformation.

    Raises:
        UserError: if the transformation is not an optax transformation, or the name is empty.
    """
    import optax

    if not isinstance(transformation, optax.GradientTransformation):
        raise UserError(
            f"from_optax: expected a transformation of optax, such as optax.adamw(1e-3), not "
            f"{type(transformation).__name__}"
        )
    if not isinstance(name, str) or not name:
        raise UserError("from_optax: the first argument is a name of your choice for the optimizer, such as my-adamw")
    return OptaxOptimizer(name=name, elementwise_transform=elementwise, transformation=transformation)
