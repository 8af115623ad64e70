"""Transformations of optax as optimizers of a run that is built in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.optimizer import Optimizer
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import jax
    import optax


class OptaxOptimizer(Optimizer):
    """A transformation of optax that brings its own learning rate, clipping and weight decay."""

    type: Literal["optax"] = "optax"
    name: Annotated[str, Field(min_length=1)]
    """Stands for the transformation in the record of the run."""
    elementwise_transform: bool = False
    """As in `from_optax`."""
    transformation: Annotated[Any, Field(exclude=True, repr=False)]
    """An `optax.GradientTransformation`, of which no record is kept: it consists of functions."""

    @property
    def elementwise(self) -> bool:
        return self.elementwise_transform

    def schedule(self, num_train_steps: int, tokens: TokenSchedule | None = None) -> None:
        """Returns None: the transformation has its learning rate inside."""
        del num_train_steps, tokens

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation; its `update` hands the loss on as `value`, the name that optax gives it.

        Typed random keys are kept in the state as their data, because a checkpoint holds numbers.
        """
        import jax
        import optax

        del params
        rule = optax.with_extra_args_support(self.transformation)

        def init(params: Any) -> Any:
            return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, rule.init(params))

        def update(
            updates: Any, state: Any, params: Any = None, /, *, loss: jax.Array, **extra_args: Any
        ) -> tuple[Any, Any]:
            del extra_args
            like = jax.eval_shape(rule.init, params)
            typed = jax.tree.map(lambda x, held: jax.random.wrap_key_data(held) if _is_key(x) else held, like, state)
            updates, state = rule.update(updates, typed, params, value=loss)
            return updates, jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def metrics(self, opt_state: Any) -> dict[str, jax.Array]:
        """Reads the learning rate that `optax.inject_hyperparams` keeps in the state, if there is just one."""
        import jax.numpy as jnp
        import optax

        found = [held for _, held in optax.tree_utils.tree_get_all_with_path(opt_state, "hyperparams")]
        rates = [held["learning_rate"] for held in found if "learning_rate" in held]
        return {"optim/learning_rate": rates[0].astype(jnp.float32)} if len(rates) == 1 else {}


def _is_key(x: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def from_optax(name: str, transformation: optax.GradientTransformation, *, elementwise: bool = False) -> OptaxOptimizer:
    """Returns an optimizer for `Trainer` that updates by a transformation of optax alone, such as `optax.adamw(1e-3)`.

    It sees the parameters, and means of gradients in their dtype, as flat dicts of arrays by dotted name. Nothing is
    added to it: no clipping, no weight decay, no learning rate. Where it takes the argument `value`, it gets the loss.

    Args:
        name: stands for the transformation in the record of the run. A resume under another name, or with state of
            another structure, is refused; hyperparameters are not compared, since a transformation does not tell them.
        transformation: from gradients to what is added to the parameters.
        elementwise: True only if each number of the update follows from its own gradient, its own state and scalars
            alone, so without clipping by a norm: then each device updates its own shard of the state. Otherwise every
            device computes the whole update, which has the same bits on any number of devices for every transformation.

    Raises:
        UserError: for what is no transformation of optax, or an empty name.
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
