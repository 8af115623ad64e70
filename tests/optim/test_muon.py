"""Muon, its variants and Scion against plain NumPy twins and, for a plain matrix, against optax."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from lm_trainer.optim import AdamHConfig, MuonHConfig, NorMuonConfig, OptimizerConfig, Param
from lm_trainer.optim.muon import MuonConfig
from lm_trainer.optim.scion import ScionConfig
from tests.compiling import quick_jit
from tests.optim.common import PARAMS, Run, assert_close, changes_the_result, gradients, initial, rate, run, run_twin

Slot = dict[str, Any]


def newton_schulz(x: np.ndarray, steps: int, epsilon: float) -> np.ndarray:
    # Coefficients of Jordan et al. 2024: they trade convergence to exactly 1 for speed.
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / (np.linalg.norm(wide) + epsilon)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


def orthogonal(param: Param, m: np.ndarray, steps: int, epsilon: float) -> np.ndarray:
    """The orthogonalised matrices, [stacked, inputs, outputs]."""
    return np.stack([newton_schulz(x, steps, epsilon) for x in m.reshape(param.matrix_shape)])


def orthogonalised(param: Param, m: np.ndarray, steps: int, epsilon: float, scale: str = "width") -> np.ndarray:
    _, inputs, outputs = param.matrix_shape
    factor = math.sqrt(max(1, outputs / inputs)) if scale == "width" else 0.2 * math.sqrt(max(inputs, outputs))
    return factor * orthogonal(param, m, steps, epsilon).reshape(param.shape)


def muon_momentum(config: Any, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
    beta = config.momentum
    m = slot["m"] = beta * slot.get("m", 0) + (1 - beta) * g
    if not config.nesterov:
        return m / (1 - beta**step)
    return beta * m / (1 - beta ** (step + 1)) + (1 - beta) * g / (1 - beta**step)


def adam_direction(config: Any, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
    m = slot["m"] = config.beta1 * slot.get("m", 0) + (1 - config.beta1) * g
    v = slot["v"] = config.beta2 * slot.get("v", 0) + (1 - config.beta2) * g * g
    return (m / (1 - config.beta1**step)) / (np.sqrt(v / (1 - config.beta2**step)) + config.epsilon)


def muon_twin(config: MuonConfig) -> Any:
    def twin(param: Param, p: np.ndarray, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
        if param.role == "matrix":
            m = muon_momentum(config, g, slot, step)
            scale = "rms" if config.use_kimi_scaling else "width"
            return orthogonalised(param, m, config.backend_steps, config.muon_epsilon, scale)
        return other_rate(
            config, param, p, adam_direction(config, g, slot, step), config.adam_lr / config.learning_rate
        )

    return twin


def normuon_twin(config: NorMuonConfig) -> Any:
    """Algorithm 1 of Li et al. 2025; its rows are outputs."""

    def twin(param: Param, p: np.ndarray, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
        if param.role != "matrix":
            ratio = config.adam_lr / config.learning_rate
            return other_rate(config, param, p, adam_direction(config, g, slot, step), ratio)
        m = muon_momentum(config, g, slot, step)
        updates = []
        averages = slot.setdefault("v", [0.0] * param.matrix_shape[0])
        for layer, o in enumerate(orthogonal(param, m, config.backend_steps, config.muon_epsilon)):
            rows = o.T
            averages[layer] = config.neuron_beta2 * averages[layer] + (1 - config.neuron_beta2) * (rows**2).mean(axis=1)
            normalised = rows / (np.sqrt(averages[layer])[:, None] + config.neuron_epsilon)
            updates.append((0.2 * math.sqrt(rows.size) / np.linalg.norm(normalised) * normalised).T)
        return np.stack(updates).reshape(param.shape)

    return twin


def hyperball_twin(config: MuonHConfig | AdamHConfig) -> Any:
    """The update of Wen et al. 2026, as the difference that `run_twin` multiplies by minus the learning rate."""

    def twin(param: Param, p: np.ndarray, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
        if param.role != "matrix" or isinstance(config, AdamHConfig):
            u = adam_direction(config, g, slot, step)
        else:
            u = orthogonal(param, muon_momentum(config, g, slot, step), config.backend_steps, config.muon_epsilon)
        if param.role != "matrix":
            return other_rate(config, param, p, u, config.adam_lr / config.learning_rate)
        start, eta = slot.setdefault("start", p.copy()).reshape(param.matrix_shape), rate(step - 1)
        moved = np.empty(param.matrix_shape)
        for layer, (w, x) in enumerate(zip(p.reshape(param.matrix_shape), u.reshape(param.matrix_shape), strict=True)):
            radius = np.linalg.norm(start[layer])
            moved[layer] = w - eta * radius * x / np.linalg.norm(x)
            moved[layer] *= radius / np.linalg.norm(moved[layer])
        return (p - moved.reshape(param.shape)) / eta

    return twin


def other_rate(config: Any, param: Param, p: np.ndarray, update: np.ndarray, ratio: float) -> np.ndarray:
    """`run_twin` adds the decay afterwards; this makes up for its other learning rate."""
    decay = config.weight_decay * p if param.role == "head" else 0.0
    return ratio * update + (ratio - 1) * decay


def scion_twin(config: ScionConfig) -> Any:
    def twin(param: Param, p: np.ndarray, g: np.ndarray, slot: Slot, step: int) -> np.ndarray:
        beta = config.momentum if param.role == "matrix" else config.beta1
        m = slot["m"] = beta * slot.get("m", 0) + (1 - beta) * g
        if param.role == "matrix":
            return orthogonalised(param, m, config.backend_steps, config.scion_epsilon)
        return other_rate(config, param, p, np.sign(m), config.scion_to_signum_lr)

    return twin


@pytest.mark.parametrize(
    "config",
    [
        MuonConfig(weight_decay=0.1),
        MuonConfig(nesterov=False, use_kimi_scaling=True, momentum=0.8, backend_steps=3, max_grad_norm=None),
    ],
)
def test_muon_equals_the_numpy_twin(config: MuonConfig) -> None:
    assert_close(run(config), run_twin(config, muon_twin(config)), rtol=2e-4, atol=2e-5)


def test_scion_equals_the_numpy_twin() -> None:
    config = ScionConfig(weight_decay=0.1)
    assert_close(run(config), run_twin(config, scion_twin(config)), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        NorMuonConfig(weight_decay=0.1),
        NorMuonConfig(nesterov=False, neuron_beta2=0.5, neuron_epsilon=0.1, momentum=0.8, max_grad_norm=None),
    ],
)
def test_normuon_equals_the_numpy_twin(config: NorMuonConfig) -> None:
    assert_close(run(config), run_twin(config, normuon_twin(config)), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("config", [MuonHConfig(weight_decay=0.1), AdamHConfig(weight_decay=0.1)])
def test_hyperball_equals_the_numpy_twin(config: MuonHConfig | AdamHConfig) -> None:
    weights = run(config)
    twin = run_twin(config, hyperball_twin(config), decays=lambda param: param.role == "head")
    assert_close(weights, twin, rtol=2e-4, atol=2e-5)
    start = initial()
    for name, param in PARAMS.items():
        if param.role == "matrix":
            norms = [np.linalg.norm(x[name].reshape(param.matrix_shape), axis=(1, 2)) for x in (start, weights)]
            np.testing.assert_allclose(*norms, rtol=1e-6, err_msg=name)


def test_a_matrix_of_zeros_has_no_sphere_and_learns() -> None:
    param = Param("mlp.up.weight", (6, 9), ("embed", "mlp"))
    tx = AdamHConfig(max_grad_norm=None).build({param.name: param})
    zeros: Any = {param.name: np.zeros(param.shape, np.float32)}
    scalars = {"learning_rate": np.float32(0.1), "grad_norm": np.float32(1)}
    updates: Any = tx.update(gradients(0, {param.name: param}), tx.init(zeros), zeros, **scalars)[0]
    np.testing.assert_allclose(np.abs(updates[param.name]), 0.1, rtol=1e-4)


def test_muon_equals_optax_on_a_matrix() -> None:
    param = Param("mlp.up.weight", (6, 9), ("embed", "mlp"))
    training = Run(MuonConfig(max_grad_norm=None), {param.name: param})
    reference: Any = {param.name: training.params[param.name]}
    tx = optax.contrib.muon(1.0)
    state = tx.init(reference)
    for step in range(20):
        grads = gradients(step, {param.name: param})
        training.step(grads, lr=rate(step))
        updates, state = quick_jit(tx.update)(grads, state, reference)
        reference = optax.apply_updates(reference, optax.tree.scale(rate(step), updates))
    assert_close(training.weights(), reference)


def first_update(tx: Any, grads: Any) -> Any:
    """Not compiled: the order in which a program sums moves the last digits, which each iteration makes larger."""
    return jax.tree.map(np.asarray, tx.update(grads, tx.init(grads))[0])


def test_stacked_layers_are_matrices_of_their_own() -> None:
    stacked = Param("w", (3, 4, 5), ("layers", "embed", "mlp"))
    grads: Any = gradients(0, {"w": stacked})["w"]
    alone = MuonConfig().transform({"w": Param("w", (4, 5), ("embed", "mlp"))})
    stacked_update = first_update(MuonConfig().transform({"w": stacked}), {"w": grads})["w"]
    for layer in range(3):
        one = first_update(alone, {"w": grads[layer]})["w"]
        np.testing.assert_allclose(stacked_update[layer], one, rtol=1e-5, atol=1e-6)


def test_singular_values_become_one() -> None:
    tx = ScionConfig().transform(PARAMS)
    updates = quick_jit(lambda grads: tx.update(grads, tx.init(grads))[0])(gradients(0))
    for name in ("stack.blocks.0.attention.q.weight", "stack.blocks.0.attention.out.weight"):
        matrices = np.asarray(updates[name]).reshape(PARAMS[name].matrix_shape)
        width = math.sqrt(max(1, matrices.shape[2] / matrices.shape[1]))
        singular = np.linalg.svd(matrices / width, compute_uv=False)
        # The iteration ends in a band around 1, and not at it.
        assert np.all((singular > 0.6) & (singular < 1.3)), (name, singular)


def test_each_parameter_has_the_learning_rate_of_its_kind() -> None:
    weights, start = run(MuonConfig(adam_lr=1e-3), steps=1), initial()
    moved = {name: float(np.max(np.abs(weights[name] - start[name]))) for name in weights}
    for name, param in PARAMS.items():
        if param.role != "matrix":  # Adam's first update is the learning rate itself
            assert moved[name] == pytest.approx(rate(0) * 1e-3 / 0.02, rel=1e-2), name
        else:
            assert moved[name] > 5 * rate(0) * 1e-3 / 0.02, name


MUON_CHANGES = {
    "adam_lr": 1e-2,
    "weight_decay": 0.3,
    "momentum": 0.5,
    "nesterov": False,
    "backend_steps": 2,
    "muon_epsilon": 1.0,
    "use_kimi_scaling": True,
    "beta1": 0.5,
    "beta2": 0.5,
    "epsilon": 1e-1,
    "max_grad_norm": 0.01,
}
NORMUON_CHANGES = {
    **{name: value for name, value in MUON_CHANGES.items() if name != "use_kimi_scaling"},
    "neuron_beta2": 0.2,
    "neuron_epsilon": 1.0,
}
# Of the few weights that these runs have only matrices would decay, and these keep their norm.
MUONH_CHANGES = {
    name: value for name, value in NORMUON_CHANGES.items() if name in MUON_CHANGES and name != "weight_decay"
}
ADAMH_CHANGES = {name: MUON_CHANGES[name] for name in ("adam_lr", "beta1", "beta2", "epsilon", "max_grad_norm")}
SCION_CHANGES = {
    "scion_to_signum_lr": 1.0,
    "weight_decay": 0.3,
    "momentum": 0.5,
    "beta1": 0.3,
    "backend_steps": 3,
    "scion_epsilon": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), MUON_CHANGES.items())
def test_every_field_of_muon_matters(field: str, value: Any) -> None:
    # Clipping changes nothing where every step is rescaled anyway, but for epsilon.
    base = MuonConfig(epsilon=1e-2, max_grad_norm=None) if field == "max_grad_norm" else MuonConfig()
    assert changes_the_result(base, **{field: value})


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), SCION_CHANGES.items())
def test_every_field_of_scion_matters(field: str, value: Any) -> None:
    assert changes_the_result(ScionConfig(), **{field: value})


VARIANTS = ((NorMuonConfig(), NORMUON_CHANGES), (MuonHConfig(), MUONH_CHANGES), (AdamHConfig(), ADAMH_CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "field", "value"),
    [(config, field, value) for config, changes in VARIANTS for field, value in changes.items()],
)
def test_every_field_of_the_variants_matters(config: OptimizerConfig, field: str, value: Any) -> None:
    # Clipping changes nothing where every step is rescaled anyway, but for epsilon.
    base = config.model_copy(update={"epsilon": 1e-2, "max_grad_norm": None}) if field == "max_grad_norm" else config
    assert changes_the_result(base, **{field: value})
