"""Watching a step: right numbers, the same on every mesh, and nothing trained differently for it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.histogram import BINS, histogram
from lm_trainer.models import Gpt2Config
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.sharding import plan_shardings
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.norms import WatchedStep, Watcher
from lm_trainer.step.updates.watch import WatchConfig

LAYERS = 3
AXES = {
    "embed.weight": ("vocab", "embed"),
    "blocks.0.up.weight": ("layers", "embed", "mlp"),
    "blocks.0.up.bias": ("layers", "mlp"),
    "norm.scale": ("embed",),
}
SHAPES = {
    "embed.weight": (31, 16),
    "blocks.0.up.weight": (LAYERS, 16, 24),
    "blocks.0.up.bias": (LAYERS, 24),
    "norm.scale": (16,),
}
WEIGHT = 7.0
ALL = WatchConfig(watch_targets=("grads", "params", "updates", "opt_state"), include_histograms=True, interval=1)


def values(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Run:
    """A state on some devices, and a step that consumes it."""

    def __init__(self, config: WatchConfig, devices: int = 1):
        mesh = build_mesh(MeshShape(), jax.devices()[:devices])
        param_shardings = plan_shardings(
            {name: (SHAPES[name], AXES[name]) for name in SHAPES},
            mesh,
            param_rules={"embed": ("data",)},
            compute_rules={"batch": ("data",)},
            max_shards=8,
        )
        self.shardings = {
            name: NamedSharding(mesh, param_sharding.storage) for name, param_sharding in param_shardings.items()
        }
        sharding: Any = types.SimpleNamespace(mesh=mesh, params=param_shardings, measured=())
        self.watcher = Watcher(config, sharding, AXES)
        self.tx = optax.adam(0.1)
        params = self.put(values(0))
        self.state = TrainState(0, params, jax.jit(self.tx.init)(params))
        # Donated as in a real step, after which the old weights are gone.
        self._update = jax.jit(self._next, donate_argnums=(0, 1), out_shardings=None)

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.device_put(x, self.shardings[name]) for name, x in arrays.items()}

    def _next(self, params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(self, grads: dict[str, np.ndarray]) -> None:
        before = self.watcher.before_step(self.state)
        placed = self.put(grads)
        params, opt_state = self._update(self.state.params, self.state.opt_state, placed)
        self.state = TrainState(self.state.step + 1, params, opt_state)
        self.watcher.after_step(before, placed, jnp.float32(WEIGHT), self.state)


def watch(config: WatchConfig, devices: int = 1, seeds: Sequence[int] = (1,)) -> tuple[list[WatchedStep], Run]:
    run = Run(config, devices)
    for seed in seeds:
        run.step(values(seed))
    return run.watcher.report(), run


def norm(x: Any) -> float:
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


@pytest.fixture(scope="module")
def watched_run() -> tuple[WatchedStep, Run]:
    (watched,), run = watch(ALL)
    return watched, run


def test_norms_are_those_of_numpy(watched_run):
    watched, run = watched_run
    moments = run.state.opt_state[0]
    expected = {
        "grads": {name: x / WEIGHT for name, x in values(1).items()},
        "params": run.state.params,
        "updates": {name: np.asarray(run.state.params[name]) - x for name, x in values(0).items()},
        "opt_state": {f"{kind}/{name}": x for kind in ("mu", "nu") for name, x in getattr(moments, kind).items()},
    }
    scalars = {}
    for target, arrays in expected.items():
        scalars[f"{target}/norm/total"] = norm([norm(x) for x in arrays.values()])
        for name, x in arrays.items():
            layers = {f"{name}/{i}": x[i] for i in range(LAYERS)} if "blocks" in name else {name: x}
            scalars |= {f"{target}/norm/{n}": norm(layer) for n, layer in layers.items()}
    assert watched.step == 1
    assert watched.scalars == pytest.approx(scalars, rel=1e-6)


def test_histograms_count_every_value_of_a_layer(watched_run):
    watched, run = watched_run
    counts, edges = watched.histograms["params/histogram/blocks.0.up.weight/1"]
    layer = np.asarray(run.state.params["blocks.0.up.weight"])[1]
    assert counts.tolist() == np.histogram(layer, edges)[0].tolist()
    assert (edges[0], edges[-1]) == (layer.min(), layer.max())
    counts, edges = watched.histograms["grads/histogram/norm.scale"]
    assert counts.sum() == 16
    assert edges[0] == pytest.approx(values(1)["norm.scale"].min() / WEIGHT)
    assert len(watched.histograms) == len(watched.scalars) - 4


@pytest.mark.parametrize("devices", [8])
def test_every_mesh_sees_the_same_bits(watched_run, devices):
    (watched,), _ = watch(ALL, devices)
    assert watched.scalars == watched_run[0].scalars
    assert watched.histograms.keys() == watched_run[0].histograms.keys()
    for name, (counts, edges) in watched.histograms.items():
        assert counts.tolist() == watched_run[0].histograms[name][0].tolist(), name
        assert edges.tolist() == watched_run[0].histograms[name][1].tolist(), name


def test_it_compiles_once_and_reports_each_step(caplog):
    config = WatchConfig(include_per_parameter_norms=False, watch_targets=("updates",), interval=1)
    run = Run(config)
    run.step(values(1))
    with jax.log_compiles():
        run.step(values(2))
        run.step(values(3))
    assert [
        r.getMessage() for r in caplog.records if "Compiling jit" in r.getMessage() and "_next" not in r.getMessage()
    ] == []
    reports = [run.watcher.report(until=1), run.watcher.report()]
    assert [[watched.step for watched in report] for report in reports] == [[1], [2, 3]]
    assert [*reports[0][0].scalars] == ["updates/norm/total"]
    assert run.watcher.report() == []


def test_what_is_not_wanted_is_not_there():
    def names(**fields: Any) -> set[str]:
        (watched,), _ = watch(WatchConfig(interval=1, **fields))
        return {*watched.scalars, *watched.histograms}

    grads = ("grads",)
    split = {"grads/norm/blocks.0.up.weight/2", "grads/norm/blocks.0.up.bias/0"}
    unsplit = {"grads/norm/blocks.0.up.weight", "grads/norm/blocks.0.up.bias", "grads/norm/norm.scale"}
    default = names(watch_targets=grads)
    assert split | {"grads/norm/total", "grads/norm/embed.weight"} < default
    assert not unsplit & default - {"grads/norm/norm.scale"}
    assert unsplit < names(watch_targets=grads, split_scan_layers=False)
    assert names(watch_targets=grads, include_per_parameter_norms=False) == {"grads/norm/total"}
    assert "grads/norm/total" not in names(watch_targets=grads, include_norms=False)
    assert names(
        watch_targets=grads, include_norms=False, include_per_parameter_norms=False, include_histograms=True
    ) == {name.replace("norm", "histogram", 1) for name in default - {"grads/norm/total"}}


def test_layers_share_a_histogram_when_they_are_not_split():
    config = WatchConfig(interval=1, watch_targets=("params",), include_histograms=True, split_scan_layers=False)
    (watched,), run = watch(config)
    counts, edges = watched.histograms["params/histogram/blocks.0.up.weight"]
    assert counts.tolist() == np.histogram(np.asarray(run.state.params["blocks.0.up.weight"]), edges)[0].tolist()


@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({}, [10, 20, 30]),
        ({"interval": 15}, [15, 30]),
        ({"interval": 0}, []),
        ({"watch_targets": ()}, []),
        ({"include_norms": False, "include_per_parameter_norms": False}, []),
    ],
    ids=str,
)
def test_when_it_looks(fields, due):
    sharding: Any = types.SimpleNamespace(mesh=build_mesh(MeshShape(), jax.devices()[:1]), params={}, measured=())
    watcher = Watcher(WatchConfig(**fields), sharding, {})
    assert [step for step in range(1, 31) if watcher.due(step)] == due


def test_targets_may_be_one_text():
    targets: Any = "grads, opt_state"
    assert WatchConfig(watch_targets=targets).watch_targets == ("grads", "opt_state")
    targets = "gradients"
    with pytest.raises(ValidationError, match=r"'grads', 'params', 'updates' or 'opt_state'"):
        WatchConfig(watch_targets=targets)


@pytest.mark.parametrize(
    ("x", "counted", "ends"),
    [
        ([1.0, np.nan, 3.0, np.inf, -np.inf], 2, (1.0, 3.0)),
        ([2.0, 2.0], 2, (1.5, 2.5)),
        ([np.nan], 0, (-0.5, 0.5)),
        ([0.0, 1e-30], 2, (0.0, np.float32(1e-30))),
    ],
    ids=str,
)
def test_unusual_values_are_counted_right(x, counted, ends):
    counts, edges = jax.device_get(jax.jit(lambda x: histogram(x, shared_edges=False))(jnp.asarray([x], jnp.float32)))
    assert (counts.shape, edges.shape, counts.dtype) == ((1, BINS), (1, BINS + 1), np.int32)
    assert counts.sum() == counted
    assert (edges[0, 0], edges[0, -1]) == ends
    assert (np.diff(edges[0]) > 0).all()
    finite = np.asarray([v for v in x if np.isfinite(v)], np.float32)
    assert counts[0].tolist() == np.histogram(finite, edges[0])[0].tolist()


def trained(observed: bool) -> dict[str, bytes]:
    """The parameters after three steps of a tiny model."""
    model = Gpt2Config(seq_len=8, hidden_dim=16, num_layers=2, num_heads=2)
    trainer = TrainerConfig(train_batch_size=2, elastic_shards=1, num_train_steps=3)
    setup = build_setup(RunConfig(model=model, trainer=trainer), 31, jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 31, (2, 8)).astype(np.int32)
    positions, segments = np.tile(np.arange(8, dtype=np.int32), (2, 1)), np.zeros_like(tokens)
    batch = Batch(tokens, np.roll(tokens, -1, 1), np.ones((2, 8), np.float32), positions, segments)
    config = WatchConfig(watch_targets=("grads", "updates"), interval=1)
    watcher = Watcher(config, setup.sharding, setup.model.axes) if observed else None
    setup.step.compile(batch)
    state = setup.init()
    for _ in range(3):
        state, metrics = setup.step(state, setup.step.put(batch), 0.01, watcher)
        if watcher is not None:
            (watched,) = watcher.report()
            assert watched.scalars["grads/norm/total"] == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)
    return {name: np.asarray(x).tobytes() for name, x in state.params.items()}


@pytest.mark.slow
def test_watching_changes_no_bit_of_what_is_trained():
    assert trained(observed=True) == trained(observed=False)
