"""The memory of a step without compiling it: from shapes, shardings and a formula, and without any device.

Only the phase that computes gradients is estimated, which is the largest of most runs. Its parts are those that
`lm_trainer.step.elastic.ElasticStep.phases` gives and `lm_trainer.plan.memory` adds up; the other phases hold nothing
that grows with the microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.ring_layout import RingLayout
from lm_trainer.nn.spec import MoeSpec
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.flops import parameter_count
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, recomputes_layers, trace_model
from lm_trainer.run.build.program import build_program, shard_state
from lm_trainer.run.config.gather import with_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.groups import compute_shardings
from lm_trainer.step.dispatch.memory import PhaseBytes, ProgramBytes, bytes_per_device, state_bytes
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.staged.staged_phases import programs_and_results
from lm_trainer.step.staged.stages import LAYERS_AT_ONCE
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import abstract_state

MICROBATCH, LAYER, LEAVE, STEP = "microbatch", "layer 0 gradient", "leave gradient", "step"
"""Programs that compute gradients: of the whole model, or layer by layer of a layer and of what comes after them; and
the one program of `determinism: fast`."""

_FLOAT32 = 4

Temporary = Mapping[str, int]
"""Name of a program of one microbatch -> bytes that it takes while it runs."""


def estimate_microbatches(
    config: RunConfig,
    vocab_size: int,
    group: DeviceGroup,
    plan: MicrobatchPlan,
    temporary: Temporary,
    *,
    model: ModelDef | None = None,
) -> PhaseBytes:
    """The phase in which a device computes its microbatches, as of `gather: model`; as of `layer` that of a
    layer or of the loss, whichever takes more; as of `fast` the whole step.

    Args:
        config: of the run, with a whole model section.
        vocab_size: rows of the token embedding.
        group: the devices of the run, which need not be there.
        plan: of the batch.
        temporary: as `estimate_temporary` or `compile_temporary` gives it.
        model: what `trace_model` gives for the configuration, where it is known.

    Raises:
        UserError: when the devices cannot be divided as the mesh is configured, or a sharding rule does not fit.
    """
    config = with_gather(config, vocab_size)
    trainer, model = config.trainer.step_plan, model or trace_model(config, vocab_size)
    mesh = trainer.abstract_mesh(group.count)
    tx, sharding = shard_state(trainer, config.optimizer, model, mesh)
    averaged = config.trainer.model_averaging is not None
    row = random_batch(1, config.model.seq_len, vocab_size, config.model.features_shape)
    shares = plan.shares(mesh, config.trainer.microbatches_per_gather)
    held = {
        "state": sum(state_bytes(abstract_state(model.shapes, tx, sharding, averaged=averaged)).values()),
        # All microbatches of a device are sent to it before the first is computed.
        "batch": plan.count // shares.count * shares.most * plan.rows * sum(x.nbytes for x in jax.tree.leaves(row)),
    }
    given = _Given(config, vocab_size, model, sharding, plan, shares, device_platform(group.kind), temporary)
    whole = _whole if config.trainer.bitwise else _one_program
    phases = _layerwise(given) if config.trainer.gathers_layers else whole(given)
    return max(
        (PhaseBytes(name, {**held, **parts}) for name, parts in phases),
        key=lambda phase: phase.bytes,
    )


@dataclass(frozen=True)
class _Given:
    """Everything that the parts of a phase follow from."""

    config: RunConfig
    vocab_size: int
    model: ModelDef
    sharding: StateSharding
    plan: MicrobatchPlan
    shares: Shares
    """The division of the microbatches of a turn among the devices."""
    platform: str
    temporary: Temporary


def _whole(given: _Given) -> Iterator[tuple[str, dict[str, int]]]:
    model, sharding = given.model, given.sharding
    compute = compute_shardings(sharding)
    shardings = sharding.storage if compute is None else compute
    whole = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in model.shapes.items()}
    running, results = programs_and_results(given.shares, sharding.mesh, given.platform)
    yield (
        MICROBATCH,
        {
            "gathered parameters": 0 if compute is None else bytes_per_device(whole),
            "gradients": results * bytes_per_device({name: whole[name] for name in model.trainable}),
            "temporary": running * given.temporary[MICROBATCH],
        },
    )


def _one_program(given: _Given) -> Iterator[tuple[str, dict[str, int]]]:
    model, sharding, config = given.model, given.sharding, given.config
    itemsize, num_layers = config.trainer.mp.compute_dtype.itemsize, len(config.model.spec(given.vocab_size).blocks)
    places = {name: NamedSharding(sharding.mesh, each.compute) for name, each in sharding.params.items()}
    gathered = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[n]) for n, x in model.shapes.items()}
    layered = [name for name, axes in model.axes.items() if axes and axes[0] == "layers"]
    layers = bytes_per_device([gathered[name] for name in layered]) // num_layers
    others = bytes_per_device([x for name, x in gathered.items() if name not in layered])
    stored = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.storage[n]) for n, x in model.shapes.items()}
    # Two layers, as XLA gathers one while it computes the other, in the dtype of the computation.
    yield (
        STEP,
        {
            "gathered layers": (LAYERS_AT_ONCE * layers + others) * itemsize // _FLOAT32,
            # Those of a microbatch, and beside them their sum where there are several.
            "gradients": (1 + (given.shares.most > 1)) * bytes_per_device([stored[n] for n in model.trainable]),
            "temporary": given.temporary[STEP],
        },
    )


def _layerwise(given: _Given) -> Iterator[tuple[str, dict[str, int]]]:
    config, model, sharding, plan = given.config, given.model, given.sharding, given.plan
    spec = config.model.spec(given.vocab_size)
    # Any key will do, with which dropout has its masks.
    key: Any = np.zeros(2, np.uint32)
    split = SplitLoss(model, loss_function(config).staged(spec), key, model.trainable)
    rows = random_batch(plan.rows, config.model.seq_len, given.vocab_size, config.model.features_shape)
    stream, keeps = split.reads(rows).stream, not recomputes_layers(config.trainer, spec)
    stages = split.stages(rows, saves=keeps)
    together = given.shares.most
    running, _ = programs_and_results(given.shares, sharding.mesh, given.platform)
    rest = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.storage[n]) for n, x in model.shapes.items()}
    inside = sum(
        len(stage.layers) * _bytes(_handed_on(stage, stream, model, rows))
        for stage in stages
        if stage.layers is not None and keeps
    )
    cut = math.prod(sharding.mesh.shape[axis] for axis in MODEL_PARALLEL_AXES)
    read = [name for stage in stages for name in stage.reads]
    shared = {
        "gradients": Shares(plan.count // given.shares.count, 1).most_held
        * sum(bytes_per_device(rest[name]) for name in read if name in model.trainable),
        "activations of layers": together * ((len(spec.blocks) + 1) * _bytes(stream) // cut + inside),
    }
    for name, stage, at_once in ((LEAVE, stages[-1], 1), (LAYER, stages[1], LAYERS_AT_ONCE)):
        gathered = _gathered(given, stage.reads, layered=name == LAYER)
        narrow = {n: x for n, x in gathered.items() if n in model.trainable}
        wide = {n: jax.ShapeDtypeStruct(x.shape, model.shapes[n].dtype, sharding=x.sharding) for n, x in narrow.items()}
        yield (
            name,
            {
                **shared,
                "gathered layers": at_once * bytes_per_device(gathered),
                # Results of programs may have narrower values than partial sums.
                "gradients of a layer": running * bytes_per_device(narrow)
                + (given.shares.most_held - 1) * bytes_per_device(wide),
                "temporary": running * given.temporary[name],
            },
        )


def _handed_on(stage: StageFunctions, stream: Any, model: ModelDef, rows: Batch) -> Any:
    """The shapes of the values that a layer hands on to its derivative."""
    forward: Any = stage.forward
    params = {name: jax.ShapeDtypeStruct(model.shapes[name].shape[1:], dtype) for name, dtype in stage.reads.items()}
    return jax.eval_shape(forward, params, stream, rows, SCALAR, SCALAR, SCALAR)[1]


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _gathered(given: _Given, part: Mapping[str, Any], *, layered: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of a part, of one layer where that is what it has, as a device computes with them."""
    cut = slice(1 if layered else 0, None)
    found = {}
    for name, dtype in part.items():
        sharding = given.sharding.params[name]
        lies = NamedSharding(given.sharding.mesh, PartitionSpec(*sharding.compute[cut]))
        found[name] = jax.ShapeDtypeStruct(given.model.shapes[name].shape[cut], dtype, sharding=lies)
    return found


def estimate_temporary(
    config: RunConfig,
    vocab_size: int,
    itemsize: int,
    tokens: int,
    *,
    fused: bool = False,
    axes: Mapping[str, int] | None = None,
) -> Temporary:
    """Estimates what the gradient of a microbatch takes while it runs: the input of every block, the inside of one, and
    the logits with their gradient; layer by layer, the last two apart.

    Beside XLA's own figure for TPU v5e, of a Llama with 1.2 billion parameters and 2048 positions in bfloat16, it is
    5 % too low to 4 % too high where layers are recomputed or `model_axis_size` is 2, 7 % too low where everything is
    kept, and 14 % too low with `context_axis_size: 2`.

    Args:
        config: of the run, with a model of one kind of block.
        vocab_size: rows of the token embedding.
        itemsize: bytes of a number in the precision of the computation.
        tokens: in the microbatch.
        fused: attention is computed by a kernel, which keeps no scores.
        axes: mesh axis -> devices along it, of those that share a microbatch; None: one device computes it.

    Raises:
        UserError: for a model with an encoder.
    """
    config, axes = with_gather(config, vocab_size), axes or {}
    model, spec = config.model, config.model.spec(vocab_size)
    if spec.encoder is not None:
        raise UserError(
            f"the memory of a {model.type} model is not estimated, because of its encoder: `lmt plan` without a search "
            f"compiles its step and says what that needs"
        )
    attention, mlp = spec.blocks[0].attention, spec.blocks[0].mlp
    whole = tokens
    # Rows or positions are divided by these axes, heads and the width of the MLP by tensor parallelism.
    tokens //= math.prod(axes.get(axis, 1) for axis in MODEL_PARALLEL_AXES)
    tensor = axes.get("model", 1)
    width, kv_width = attention.num_heads * attention.head_dim, attention.kv_heads * attention.head_dim
    # For each token of a block: eight arrays as wide as the model (residuals, norms, what goes into and comes out of
    # attention and MLP), three as wide as the MLP (gate, up, their product), and query, key, value and output.
    wide = mlp.hidden_dim * (mlp.top_k if isinstance(mlp, MoeSpec) else 1)
    inside = 8 * spec.hidden_dim + (3 * wide + 4 * width) // tensor
    # Results of products with weights alone.
    products = 2 * spec.hidden_dim + (2 * wide + width + 2 * kv_width) // tensor
    # Scores before and after the softmax, in float32 and where products have another dtype in that too, of the one
    # layer that is computed; a ring has those of one block of keys.
    ring = attention.scores.backend == "ring"
    keys = RingLayout.of(attention, model.seq_len, 1).size if ring else attention.scores.block_size or model.seq_len
    pairs = 0 if fused else attention.num_heads // tensor * min(keys, model.seq_len)
    narrow = itemsize < _FLOAT32
    scores = pairs * (2 * _FLOAT32 + narrow * itemsize)
    # Logits and their gradient are float32, and exist for one block of tokens at a time.
    logits = 2 * _FLOAT32 * min(tokens, model.cross_entropy_block_size or tokens) * vocab_size
    block = tokens * (itemsize * inside + scores)
    if config.trainer.gathers_layers:
        return {LAYER: block, LEAVE: logits}
    # Full recomputation keeps the input of each block alone; otherwise the inside of all blocks waits for the backward
    # pass. Compiled for a TPU v5e, norms and activations in bfloat16 leave their float32 terms as well.
    everything = inside * (2 * _FLOAT32 if narrow else itemsize) + scores
    each = {"full": itemsize * spec.hidden_dim, "dots_no_batch": itemsize * (spec.hidden_dim + products)}
    policy = model.remat if isinstance(model.remat, str) else ""
    # A stage of a pipeline keeps what all rows leave in its layers, and turns without a row leave as much.
    stages, rows = axes.get("pipeline", 1), max(1, whole // model.seq_len)
    kept = round(len(spec.blocks) * (rows + stages - 1) / rows) * tokens * each.get(policy, everything)
    if not config.trainer.bitwise:
        return {STEP: kept + max(block, logits)}
    # Of whole parameters XLA makes a narrow copy before the loop over layers.
    layers = parameter_count(spec) - parameter_count(replace(spec, blocks=()))
    copy = narrow * itemsize * layers // (tensor * stages * axes.get("expert", 1))
    return {MICROBATCH: kept + max(block + copy, logits)}


def compile_temporary(config: RunConfig, vocab_size: int) -> Temporary:
    """As `estimate_temporary`, from XLA, which compiles the microbatch of a run for a device of this machine.

    Raises:
        UserError: when the backend does not tell.
    """
    # One device is enough: the program of a microbatch is the same on every mesh.
    program = build_program(config, vocab_size, jax.local_devices()[:1])
    compiled = program.step.compile(random_batch(1, config.model.seq_len, vocab_size, config.model.features_shape))
    by_name = {MICROBATCH: compiled} if isinstance(compiled, Executable) else compiled.by_name
    return {name: ProgramBytes.of(executable).temporary for name, executable in by_name.items()}
