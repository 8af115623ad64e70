"""Parts that tests of optimizers share: a small set of parameters, a run, and a plain NumPy twin in float64.

A twin is a function that computes the update transform of one parameter from its gradient. `run_twin` adds what is the
same for all: clipping to the global norm before it, weight decay and minus the learning rate after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lm_trainer.optim import OptimizerConfig, Param, decays_by_default
from tests.compiling import quick_jit

Arrays = dict[str, np.ndarray]

AXES = {
    "embed.tokens": ("vocab", "embed"),
    "embed.positions": ("position", "embed"),
    "stack.blocks.0.attention.q.weight": ("layers", "embed", "heads", "head_size"),
    "stack.blocks.0.attention.q.bias": ("layers", "heads", "head_size"),
    "stack.blocks.0.attention.out.weight": ("layers", "heads", "head_size", "embed"),
    "stack.blocks.0.mlp.up.weight": ("layers", "embed", "mlp"),
    "stack.blocks.0.norm.scale": ("layers", "embed"),
    "final_norm.scale": ("embed",),
    "head.weight": ("embed", "vocab"),
}
SIZES = {"vocab": 11, "position": 5, "embed": 6, "layers": 2, "heads": 2, "head_size": 4, "mlp": 7}
PARAMS = {name: Param(name, tuple(SIZES[axis] for axis in axes), axes) for name, axes in AXES.items()}
FEW = {
    name: PARAMS[name]
    for name in (
        "embed.tokens",
        "stack.blocks.0.attention.q.weight",
        "stack.blocks.0.mlp.up.weight",
        "final_norm.scale",
    )
}
STEPS = 25


class Twin(Protocol):
    """One parameter's update in float64; `slot` is its own dict for its state, empty at step 1."""

    def __call__(self, param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray: ...


def initial(params: Mapping[str, Param] = PARAMS) -> Arrays:
    """Weights to start from, float32."""
    rng = np.random.default_rng(99)
    return {name: rng.standard_normal(param.shape).astype(np.float32) for name, param in params.items()}


def gradients(step: int, params: Mapping[str, Param] = PARAMS) -> Arrays:
    """The gradients of a step, counted from 0; they are larger for later parameters, float32."""
    rng = np.random.default_rng(step)
    return {
        name: (0.2 * (1 + i) * rng.standard_normal(param.shape)).astype(np.float32)
        for i, (name, param) in enumerate(params.items())
    }


def norm(arrays: Mapping[str, np.ndarray]) -> float:
    """The global norm."""
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays.values())))


def rate(step: int) -> float:
    """A learning rate that changes with every step, from 0."""
    return 0.01 * (1 + step % 7)


def applied(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """`(gradients, state, weights, **scalars) -> (weights, state)`: an update that is added to the weights."""

    def update(grads: Any, state: Any, weights: Any, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, weights, **extra_args)
        return optax.apply_updates(weights, updates), state

    return update


class Run:
    """An optimizer at work on `params`: compiled once, stepped with any gradients.

    Not `compiled` it is far quicker for a few steps, because operations are compiled once for all optimizers.
    """

    def __init__(self, config: OptimizerConfig, params: Mapping[str, Param] = PARAMS, *, compiled: bool = True):
        self.config = config
        self.tx = config.build(params)
        self.params: Any = {name: jnp.asarray(x) for name, x in initial(params).items()}
        self.state: Any = quick_jit(self.tx.init)(self.params)
        self._update = quick_jit(applied(self.tx)) if compiled else applied(self.tx)

    def step(self, grads: Arrays, *, lr: float = 0.01, loss: float = 1.0, grad_norm: float | None = None) -> Arrays:
        """Takes one step; `grad_norm` is that of `grads` unless it is given. Returns the new weights."""
        extra_args = {"learning_rate": lr, "loss": loss, "grad_norm": norm(grads) if grad_norm is None else grad_norm}
        scalars = {name: jnp.float32(x) for name, x in extra_args.items()}
        self.params, self.state = self._update(grads, self.state, self.params, **scalars)
        return self.weights()

    def repeat(self, grads: Arrays, steps: int, *, lr: float = 0.01) -> None:
        """Takes many steps with the same gradients, as one program."""
        scalars = {"learning_rate": jnp.float32(lr), "loss": jnp.float32(1.0), "grad_norm": jnp.float32(norm(grads))}

        update = applied(self.tx)

        def step(_: Any, reached: tuple[Any, Any]) -> tuple[Any, Any]:
            return update(grads, reached[1], reached[0], **scalars)

        loop = quick_jit(lambda *reached: jax.lax.fori_loop(0, steps, step, reached))
        self.params, self.state = loop(self.params, self.state)

    def weights(self) -> Arrays:
        return {name: np.asarray(x) for name, x in self.params.items()}

    def metrics(self) -> dict[str, float]:
        return {name: float(x) for name, x in self.config.metrics(self.state).items()}


def run_in_float64(config: OptimizerConfig, params: Mapping[str, Param], *, steps: int) -> Arrays:
    """The weights after `steps` steps with `gradients` and `rate`, float64."""
    with jax.enable_x64(True):
        tx = config.build(params)
        weights: Any = {name: np.float64(x) for name, x in initial(params).items()}
        state, update = quick_jit(tx.init)(weights), quick_jit(applied(tx))
        for step in range(steps):
            grads: Any = {name: np.float64(g) for name, g in gradients(step, params).items()}
            scalars = {"learning_rate": np.float64(rate(step)), "grad_norm": np.float64(norm(grads))}
            weights, state = update(grads, state, weights, **scalars)
        return {name: np.asarray(x) for name, x in weights.items()}


def run(
    config: OptimizerConfig, params: Mapping[str, Param] = PARAMS, *, steps: int = STEPS, compiled: bool = True
) -> Arrays:
    """The weights after `steps` steps with `gradients` and `rate`; the same run again is taken from memory."""
    kind: Any = type(config)
    return dict(_run(kind, config.model_dump_json(), tuple(params.values()), steps, compiled))


@functools.cache
def _run(kind: type[OptimizerConfig], config: str, params: tuple[Param, ...], steps: int, compiled: bool) -> Arrays:
    named = {param.name: param for param in params}
    training = Run(kind.model_validate_json(config), named, compiled=compiled)
    for step in range(steps):
        training.step(gradients(step, named), lr=rate(step))
    return training.weights()


def run_twin(
    config: OptimizerConfig,
    twin: Twin,
    params: Mapping[str, Param] = PARAMS,
    *,
    steps: int = STEPS,
    decays: Callable[[Param], bool] = decays_by_default,
) -> Arrays:
    """The weights that `run` should return, in float64."""
    weights = {name: x.astype(np.float64) for name, x in initial(params).items()}
    slots: dict[str, dict[str, Any]] = {name: {} for name in params}
    for step in range(steps):
        grads = gradients(step, params)
        clip = min(1.0, config.max_grad_norm / norm(grads)) if config.max_grad_norm else 1.0
        for name, param in params.items():
            p = weights[name]
            update = twin(param, p, grads[name].astype(np.float64) * clip, slots[name], step + 1)
            decay = config.weight_decay * p if decays(param) else 0.0
            weights[name] = p - rate(step) * (update + decay)
    return weights


def assert_close(actual: Mapping[str, np.ndarray], reference: Mapping[str, Any], *, rtol=2e-5, atol=2e-6) -> None:
    assert set(actual) == set(reference)
    for name, x in actual.items():
        np.testing.assert_allclose(x, np.asarray(reference[name]), rtol=rtol, atol=atol, err_msg=name)


def differs(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], *, atol: float = 1e-5) -> bool:
    """True if any weight differs."""
    return any(not np.allclose(a[name], b[name], rtol=0, atol=atol) for name in a)


def changes_the_result(base: OptimizerConfig, **change: Any) -> bool:
    """True if six steps end elsewhere when these fields of `base` are changed."""
    changed = base.model_validate({**base.model_dump(), **change})
    return differs(*(run(config, FEW, steps=6, compiled=False) for config in (base, changed)))


def check_resumed(config: OptimizerConfig, params: Mapping[str, Param]) -> None:
    """Makes sure that steps in another process, from the state in between, end with the same bits."""
    one, resumed = (Run(config, params) for _ in range(2))
    for step in range(3):
        one.step(gradients(step, params))
    resumed.params, resumed.state = one.params, one.state
    for step in range(3, 6):
        for training in (one, resumed):
            training.step(gradients(step, params))
    for name, x in one.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], x)
