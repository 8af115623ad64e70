"""Runs drawn at random from everything that the promise of equal bits covers, and what one of them computes.

Shape letters: B rows of a microbatch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import TypeAdapter

from lm_trainer.core.batch import Batch
from lm_trainer.optim import OPTIMIZERS, AnyOptimizer
from lm_trainer.run.build.model import trace_module
from lm_trainer.run.build.setup import TrainingSetup, build_setup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.state.train_state import to_host
from tests.models.common import TINY

Plain = dict[str, Any]

STEPS = 4
VOCABULARIES = (61, 64, 97, 257)
BY_NAME = sorted(OPTIMIZERS, key=lambda config: config.model_fields["type"].default)
ELEMENTWISE, NOT_ELEMENTWISE = (
    [m.model_fields["type"].default for m in BY_NAME if m().elementwise is kind] for kind in (True, False)
)
"""Optimizers whose update each device computes of its part of the state, and those whose update it computes whole."""
DEVICES = (2, 4, 2, 8, 2, 2, 4, 2, 2, 2)
"""Mostly few, since every device compiles for itself."""
REMAT = (False, False, True, "dots", "dots_no_batch", {"save_block_internals": ["attention"]})


OneOf = Callable[..., Any]
"""Chooses among its arguments."""


@dataclass(frozen=True)
class RandomRun:
    """One configuration, and another mesh than one device to compare it on."""

    trainer: Plain
    optimizer: Plain
    devices: int
    mesh: Plain
    """Keys of the trainer section that change how the state lies on the devices, and no number."""
    model: Plain | None = None
    """A family; None: `shapes`."""
    vocab_size: int = 64
    shapes: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    """Parameters, as shapes and logical axes."""

    def __str__(self) -> str:
        model = self.shapes if self.model is None else self.model["type"]
        return f"{model}, {self.optimizer['type']}, {self.trainer['mp']}, {self.devices} devices, {self.mesh}"

    @property
    def seq_len(self) -> int:
        return 8 if self.model is None else self.model["seq_len"]


def draw_family(number: int) -> RandomRun:
    """The `number`-th run of a language model; families take turns, so that few numbers reach all of them."""
    one_of = _chooser(number)
    kinds = list(TINY)
    model = _draw_model(kinds[number % len(kinds)], one_of)
    return RandomRun(**_draw_rest(number, one_of), model=model, vocab_size=one_of(*VOCABULARIES))


def draw_layerwise(number: int) -> RandomRun:
    """The `number`-th run of a language model that is computed layer by layer, with any microbatches to a gather."""
    run, one_of = draw_family(number), _chooser(number + 2000)
    trainer = {**run.trainer, "determinism": "layerwise"}
    return replace(run, trainer=trainer, mesh={**run.mesh, "microbatches_per_gather": one_of(None, 1, 2)})


def draw_shapes(number: int) -> RandomRun:
    """The `number`-th run of parameters of random shapes, whose loss compiles in no time."""
    one_of = _chooser(number + 1000)
    sizes = (1, 3, 7, 8, 12, 16, 24, 33, 40, 56, 96, 136)

    def parameter() -> tuple[tuple[int, ...], tuple[str, ...]]:
        heads = ("embed", "heads", "head_size")
        names = one_of(("embed",), ("mlp", "embed"), ("embed", "mlp"), ("vocab", "embed"), heads)
        shape = tuple(one_of(*sizes) for _ in names)
        return ((3, *shape), ("layers", *names)) if one_of(True, False, False) else (shape, names)

    storage = _draw_rest(number, one_of)
    if storage["optimizer"]["type"] == "sophia-g":  # its estimate needs a language model
        storage["optimizer"]["type"] = "sophia-h"
    return RandomRun(**storage, shapes=tuple(parameter() for _ in range(3)))


def uneven(run: RandomRun) -> RandomRun:
    """`run` on a number of devices that is no power of two, few where each compiles an update of its own."""
    several = run.optimizer["type"] in ELEMENTWISE
    devices = (3, 5, 6, 7)[run.trainer["seed"] % 4] if several else 3
    mesh = {key: value for key, value in run.mesh.items() if not key.startswith("replica")}
    return replace(run, devices=devices, mesh=mesh)


def draw_uneven(number: int) -> RandomRun:
    """The `number`-th run of a language model, every second one layer by layer, on such a number of devices."""
    return uneven((draw_layerwise if number % 2 else draw_family)(number))


def _chooser(seed: int) -> OneOf:
    rng = np.random.default_rng(seed)
    return lambda *options: options[rng.integers(len(options))]


def _draw_rest(number: int, one_of: OneOf) -> Plain:
    """Everything but the model."""
    is_unsharded = number % 5 == 4
    optimizer = (
        NOT_ELEMENTWISE[number // 5 % len(NOT_ELEMENTWISE)] if is_unsharded else ELEMENTWISE[number % len(ELEMENTWISE)]
    )
    rows, runs = one_of(1, 2, 3), one_of(1, 1, 2, 3)
    trainer: Plain = {
        "seed": number,
        "num_train_steps": STEPS,
        "mp": one_of("f32", "f32", "p=f32,c=bfloat16", "bfloat16"),
        "train_batch_size": 8 * rows * runs,
        "per_device_parallelism": rows,
    }
    if rows > 1 and one_of(True, False, False):
        trainer |= {"train_batch_size": 8 * rows * runs - 1, "allow_nondivisible_batch_size": True}
    if one_of(True, False, False):
        trainer["model_averaging"] = {"type": "ema", "beta": 0.9}
    # Smaller steps round to nothing in weights of 8 significant bits.
    rate = 5e-2 if trainer["mp"] == "bfloat16" else 1e-2
    updates: Plain = {"type": optimizer, "learning_rate": rate, "warmup": 0}
    if optimizer.startswith("sophia"):
        updates["update_interval"] = 2
    # What every device computes whole is compiled for every device.
    devices = 2 if is_unsharded else DEVICES[number % len(DEVICES)]
    mesh: Plain = {"fsdp_axis": one_of("embed", "embed", "mlp", None)}
    if devices > 2 and one_of(True, False):
        mesh[one_of("replica_ici_axis_size", "replica_dcn_axis_size")] = 2
    return {"trainer": trainer, "optimizer": updates, "devices": devices, "mesh": mesh}


def _draw_model(kind: str, one_of: OneOf) -> Plain:
    tiny = TINY[kind]
    heads, size = one_of(2, 4), one_of(8, 16)
    # As many as the fewest that have every kind of layer.
    third = kind == "gemma3" or 2 in getattr(tiny, "mlp_only_layers", ())
    drawn: Plain = {
        "seq_len": one_of(8, 11, 16, 24),
        "num_layers": 3 if third else 2,
        "num_heads": heads,
        "num_kv_heads": one_of(1, 2, heads),
        "head_dim": size,
        "hidden_dim": heads * size,
        "intermediate_dim": one_of(20, 32, 48, 56),
        "moe_intermediate_dim": one_of(12, 20),
        "n_routed_experts": one_of(3, 4),
        "sliding_window": one_of(3, 5),
        "tie_word_embeddings": one_of(True, False),
        "embed_pdrop": one_of(0.0, 0.1),
        "resid_pdrop": one_of(0.0, 0.1),
        "attn_pdrop": one_of(0.0, 0.1),
        "gradient_checkpointing": one_of(*REMAT),
        "scan_layers": one_of(True, True, False),
        "cross_entropy_block_size": one_of(None, None, 24),
        "flash_attention_block_size": one_of(None, None, 5),
    }
    if kind in ("llama", "olmo3", "apertus"):
        del drawn["seq_len"]  # their scaling of positions goes with the length
    if (getattr(tiny, "n_group", None) or 1) > 1:
        del drawn["n_routed_experts"]  # the groups divide it
    fields = type(tiny).model_fields
    return {**tiny.model_dump(), **{name: value for name, value in drawn.items() if name in fields}}


class Shapes(nnx.Module):
    """Parameters, and nothing that computes with them."""

    def __init__(self, run: RandomRun) -> None:
        key = jax.random.key(run.trainer["seed"])
        for index, (shape, axes) in enumerate(run.shapes):
            value = 0.1 * jax.random.normal(jax.random.fold_in(key, index), shape)
            setattr(self, f"p{index}", nnx.Param(value, logical_axes=axes))


def shapes_loss(model: Shapes, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, dict]:
    """A loss to which every element of every parameter adds in every row, with dropout of some."""
    scale_B = 1 + batch.tokens.astype(jnp.float32).mean(axis=1)
    total = jnp.float32(0)
    for index, (_, param) in enumerate(sorted(nnx.to_flat_state(nnx.state(model, nnx.Param)))):
        x = param[...].astype(jnp.float32)
        dropout_mask = (
            jnp.ones(x.shape) if key is None else jax.random.bernoulli(jax.random.fold_in(key, index), 0.9, x.shape)
        )
        waves = jax.vmap(lambda scale, x=x, dropout_mask=dropout_mask: jnp.sum(jnp.sin(3 * x * scale) * dropout_mask))(
            scale_B
        )
        total = total + jnp.sum(waves)
    return total, jnp.sum(batch.weights), {}


def batches(run: RandomRun, config: TrainerConfig) -> list[Batch]:
    """Random tokens in rows that hold two documents and some padding."""
    rng, seq_len = np.random.default_rng(config.seed), run.seq_len
    drawn = []
    for step in range(STEPS):
        rows = config.batch_schedule.at(step)
        tokens = rng.integers(0, run.vocab_size, (rows, seq_len + 1), dtype=np.int32)
        ends = rng.integers(1, seq_len, (rows, 1))
        columns = np.arange(seq_len, dtype=np.int32)
        second = columns >= ends
        padding = columns >= seq_len - rng.integers(0, 3, (rows, 1))
        segments = np.where(padding, -1, second).astype(np.int32)
        positions = np.where(second, columns - ends, columns).astype(np.int32)
        weights = (~padding & (columns != ends - 1)).astype(np.float32)
        drawn.append(Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments))
    return drawn


@dataclass(frozen=True)
class Outcome:
    """All bits that a run computes."""

    losses: tuple[bytes, ...]
    """Loss and gradient norm of each step."""
    state: dict[str, str]
    """A hash of each weight and of each array of the optimizer."""
    finite: bool
    moved: bool
    """True if every weight changed, except scales of 1, which need a large step to change in bfloat16."""

    def first_difference(self, other: Outcome) -> str | None:
        """The first step or array in which two runs differ; None where they are equal."""
        for step, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)):
            if a != b:
                return f"loss or gradient norm of step {step}: {struct.unpack('<ff', a)}, {struct.unpack('<ff', b)}"
        return next((name for name in self.state if self.state[name] != other.state[name]), None)


def _plan(run: RandomRun, devices: int, mesh: Plain) -> tuple[TrainingSetup, TrainerConfig]:
    on, trainer = jax.devices()[:devices], {**run.trainer, **mesh}
    if run.model is not None:
        config = RunConfig.model_validate({"model": run.model, "trainer": trainer, "optimizer": run.optimizer})
        return build_setup(config, run.vocab_size, on), config.trainer
    settings = TrainerConfig.model_validate(trainer)
    definition = trace_module(lambda: Shapes(run), settings.mp.param_dtype)
    optimizer = TypeAdapter(AnyOptimizer).validate_python(run.optimizer)
    return plan_training(settings, optimizer, definition, shapes_loss, devices=on), settings


def outcome(run: RandomRun, devices: int, mesh: Plain) -> Outcome:
    """The outcome of `run` on this many devices."""
    setup, trainer = _plan(run, devices, mesh)
    state, losses = setup.init(), []
    start = to_host(state.params)
    for step, batch in enumerate(batches(run, trainer)):
        if not setup.step.is_compiled(step):
            setup.step.compile(batch, step)
        state, metrics = setup.step(state, setup.step.put(batch, step), run.optimizer["learning_rate"] / (step + 1))
        losses.append(struct.pack("<ff", float(metrics["loss"]), float(metrics["grad_norm"])))
    end = to_host(state.params)
    averaged = to_host(state.averaged or {})
    moments = jax.tree_util.tree_leaves_with_path(state.opt_state)
    arrays = {
        **{f"weight {name}": x for name, x in end.items()},
        **{f"average {name}": x for name, x in averaged.items()},
        **{f"optimizer {jax.tree_util.keystr(path)}": np.asarray(x) for path, x in moments},
    }
    return Outcome(
        tuple(losses),
        {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in arrays.items()},
        finite=all(np.isfinite(struct.unpack("<ff", bits)).all() for bits in losses),
        moved=all((start[name] != x).any() for name, x in end.items() if (start[name] != 1).any()),
    )


_REFERENCES: dict[str, Outcome] = {}


def reference_of(run: RandomRun) -> Outcome:
    """The outcome of `run` on one device, computed once for all meshes that it is compared on."""
    key = repr(replace(run, devices=1, mesh={}))
    if key not in _REFERENCES:
        _REFERENCES[key] = outcome(run, 1, {})
    return _REFERENCES[key]


def difference(run: RandomRun) -> str | None:
    """The first difference between the run on its devices and on one device; None where they are equal.

    Raises:
        AssertionError: when the run does nothing whose bits could differ.
    """
    reference = reference_of(run)
    assert reference.finite, run
    assert reference.moved, run
    return reference.first_difference(outcome(run, run.devices, run.mesh))
