"""Checksums of everything that a step reads and computes, in the order of the computation, and the first difference of
two such traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stages import unpack_stream
from lm_trainer.reproduce.record import is_bitwise_equal
from lm_trainer.reproduce.rerun import Rerun
from lm_trainer.reproduce.verify import find_differing_names
from lm_trainer.run.build.model import DROPOUT_KEY, loss_function
from lm_trainer.run.build.setup import TrainingSetup, split_loss_into_stages
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.check.digests import checksum
from lm_trainer.step.check.layer_checksums import LayerChecksums, MicrobatchChecksums
from lm_trainer.step.dispatch.device_groups import pad_rows
from lm_trainer.step.elastic import ElasticStep
from lm_trainer.step.state.model_def import Params

_EMBEDDING, _LAYER, _HEAD = "embedding", "layer {}", "head"


@dataclass(frozen=True)
class StepTrace:
    """Checksums of one step."""

    step: int
    """The step, counted from 1."""
    rows: int
    """Number of rows in a microbatch."""
    state: Mapping[str, str]
    """Hash of each array of the state before the step, by its name in a checkpoint."""
    batch: Mapping[str, Sequence[str]]
    """Hash of each row of the batch, by field."""
    streams: Sequence[Mapping[str, int]]
    """Checksums of the residual stream of each microbatch, after the embedding and after each layer, and of the loss;
    empty if the model cannot be computed layer by layer."""
    sums: Sequence[MicrobatchChecksums]
    """Checksums of the gradients and metrics of each microbatch."""
    layers: Mapping[str, range]
    """Numbers of the layers of each parameter whose first axis is over layers."""
    metrics: Mapping[str, float]
    """Recorded metrics of the step."""
    after: Mapping[str, str]
    """Same as `state`, after the step."""


class Location(NamedTuple):
    """The first operand whose bits differ."""

    step: int
    part: str
    """Part of the step: `state before the step`, `batch`, `division into microbatches`, `forward pass`, `gradient`,
    `sum over microbatches` or `update`."""
    operand: str
    """Name of the array: a parameter or another array of the state, a field of the batch, a stage, or a metric."""
    microbatch: int | None = None
    """Number of the microbatch, counted from 0; None if the part is no part of a microbatch."""
    row: int | None = None
    """Number of the row in the batch, counted from 0."""
    layer: int | None = None
    """Number of the layer, counted from 0."""
    others: tuple[str, ...] = ()
    """Names of further operands of the same part that differ."""
    microbatches: tuple[int, ...] = ()
    """Numbers of all microbatches that differ."""

    def describe(self) -> str:
        """Returns a phrase such as `step 7, microbatch 3 (row 6 of the batch): tokens of the batch`."""
        text = f"step {self.step}"
        if self.microbatch is not None:
            text += f", microbatch {self.microbatch}"
        if self.row is not None:
            text += f", row {self.row} of the batch"
        if self.layer is not None:
            text += f", layer {self.layer}"
        return f"{text}, {self.part}: {self.operand}"


def trace_step(rerun: Rerun) -> StepTrace:
    """Computes the next step of a recomputed run, and returns its trace.

    Raises:
        UserError: if the run does not promise bits.
    """
    setup, batch = rerun.run.setup, rerun.next_batch()
    if not isinstance(setup.step, ElasticStep):
        raise UserError(
            "trainer.determinism: fast promises no bits, so there is no first difference to find; compare the losses "
            "with `lmt report`"
        )
    rerun.compile()
    layers = _layers_of_params(setup, rerun.run.config.model.spec(rerun.run.data.tokenizer.vocab_size))
    plan, state = setup.step.plans.at(rerun.state.step), rerun.state
    # A step that gathers one layer at a time has sums without the axis over layers.
    before, tap = rerun.compute_state_hashes(), LayerChecksums([] if setup.gathers_layers else layers)
    setup.step.gradient(state, setup.step.put(batch, state.step), tap)
    padded = pad_rows(batch, plan.count * plan.rows)
    streams = [*_trace_streams(setup, rerun.run.config, {**state.frozen, **state.params}, padded, state.step)]
    metrics = rerun.run_step()
    return StepTrace(
        rerun.state.step,
        plan.rows,
        before,
        digest_rows(batch),
        streams,
        tap.read(),
        layers,
        metrics,
        rerun.compute_state_hashes(),
    )


def _layers_of_params(setup: TrainingSetup, spec: DecoderSpec) -> dict[str, range]:
    return {
        name: layers
        for prefix, layers in spec.layers_by_prefix.items()
        for name in setup.model.shapes
        if name.startswith(prefix)
    }


def digest_rows(batch: Batch) -> dict[str, list[str]]:
    """Returns a hash of each row of each field of a batch."""
    return {
        name: [hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:16] for row in np.asarray(array)]
        for name, array in batch._asdict().items()
        if array is not None
    }


def _trace_streams(
    setup: TrainingSetup, config: RunConfig, params: Params, batch: Batch, step: int
) -> Iterator[dict[str, int]]:
    """Computes the forward pass of each microbatch layer by layer, and yields its checksums."""
    compute = _stream_checksums(setup, config)
    if compute is None:
        return
    rows = setup.step.plans.at(step).rows
    for index in range(len(batch.tokens) // rows):
        microbatch = jax.tree.map(lambda x, first=index * rows: np.asarray(x)[first : first + rows], batch)
        checksums_N = np.asarray(compute(params, microbatch, np.int32(step), np.int32(index)))
        layers = (_LAYER.format(number) for number in range(len(checksums_N) - 2))
        # In the order of the computation, which a dict that a program returns would lose.
        yield dict(zip([_EMBEDDING, *layers, _HEAD], checksums_N.tolist(), strict=True))


def _stream_checksums(setup: TrainingSetup, config: RunConfig) -> Callable[..., jax.Array] | None:
    """Returns a program for the checksums of the forward pass of a microbatch, uint32 [N] for N stages.

    None if the model has no known layers.
    """
    loss: Any = loss_function(config)
    try:
        staged = split_loss_into_stages(loss, setup.model, setup.sharding.mesh)
    except UserError:
        return None
    key_data = jax.random.key_data(jax.random.fold_in(jax.random.key(config.trainer.seed), DROPOUT_KEY))

    def compute(params: Params, rows: Batch, step: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), index)
        model = setup.model.merge(params)
        streams = [*staged.streams(model, rows, key, staged.compute_memory(model, rows, key))]
        losses = jnp.stack(staged.head(model, streams[-1], rows, key)[:2])
        return jnp.stack([checksum(x[None])[0] for x in [*(unpack_stream(stream).x_BSD for stream in streams), losses]])

    return jax.jit(compute)


def find_first_difference(a: StepTrace, b: StepTrace) -> Location | None:
    """Returns the first operand of a step that differs, in the order of the computation; None if all are equal."""
    parts = (_compare_states, _compare_batches, _compare_streams, _compare_gradients, _compare_results)
    return next((location for compare in parts if (location := compare(a, b)) is not None), None)


def _compare_states(a: StepTrace, b: StepTrace) -> Location | None:
    return _compare_arrays(a, a.state, b.state, "state before the step")


def _compare_arrays(a: StepTrace, x: Mapping[str, str], y: Mapping[str, str], part: str) -> Location | None:
    missing = [name for name in {**x, **y} if name not in x or name not in y]
    names = [*missing, *find_differing_names(x, y)]
    return Location(a.step, part, names[0], others=tuple(names[1:])) if names else None


def _compare_batches(a: StepTrace, b: StepTrace) -> Location | None:
    fields = [name for name in {**a.batch, **b.batch} if a.batch.get(name) != b.batch.get(name)]
    counts = [len(trace.batch["tokens"]) for trace in (a, b)]
    if counts[0] != counts[1]:
        return Location(a.step, "batch", f"number of rows: {counts[0]} and {counts[1]}")
    if only := [name for name in fields if name not in a.batch or name not in b.batch]:
        return Location(a.step, "batch", only[0])
    rows = sorted({row for name in fields for row in range(counts[0]) if a.batch[name][row] != b.batch[name][row]})
    if rows:
        of_row = [name for name in fields if a.batch[name][rows[0]] != b.batch[name][rows[0]]]
        microbatches = tuple(sorted({row // a.rows for row in rows}))
        return Location(
            a.step,
            "batch",
            of_row[0],
            microbatches[0],
            rows[0],
            others=tuple(of_row[1:]),
            microbatches=microbatches,
        )
    if a.rows != b.rows:
        return Location(a.step, "division into microbatches", f"rows in a microbatch: {a.rows} and {b.rows}")
    return None


def _compare_streams(a: StepTrace, b: StepTrace) -> Location | None:
    differing = [i for i, (x, y) in enumerate(zip(a.streams, b.streams, strict=False)) if x != y]
    if not differing:
        return None
    x, y = a.streams[differing[0]], b.streams[differing[0]]
    names = [name for name in {**x, **y} if x.get(name) != y.get(name)]
    layer = int(names[0].removeprefix("layer ")) if names[0].startswith("layer ") else None
    operand = "residual stream after the layer" if layer is not None else names[0]
    return Location(
        a.step,
        "forward pass",
        operand,
        differing[0],
        layer=layer,
        others=tuple(names[1:]),
        microbatches=tuple(differing),
    )


def _compare_gradients(a: StepTrace, b: StepTrace) -> Location | None:
    differing = [i for i, (x, y) in enumerate(zip(a.sums, b.sums, strict=True)) if x != y]
    if not differing:
        return None
    x, y = a.sums[differing[0]], b.sums[differing[0]]
    pairs = [
        (name, a.layers[name][i] if name in a.layers else None)
        for name in {**x, **y}
        for i in range(max(len(x.get(name, ())), len(y.get(name, ()))))
        if x.get(name, [])[i : i + 1] != y.get(name, [])[i : i + 1]
    ]
    # The derivative reaches the head first, then the layers from the last to the first, then the embedding.
    pairs.sort(key=lambda pair: (pair[0].startswith("embed"), pair[1] is not None, -(pair[1] or 0)))
    (name, layer), same_layer = pairs[0], [name for name, layer in pairs[1:] if layer == pairs[0][1]]
    return Location(
        a.step,
        "gradient",
        name,
        differing[0],
        layer=layer,
        others=tuple(dict.fromkeys(same_layer)),
        microbatches=tuple(differing),
    )


def _compare_results(a: StepTrace, b: StepTrace) -> Location | None:
    names = [name for name in a.metrics if name in b.metrics and not is_bitwise_equal(a.metrics[name], b.metrics[name])]
    # The learning rate is an operand of the update; all other metrics are computed from sums over microbatches.
    if sums := [name for name in names if name != "optim/learning_rate"]:
        return Location(a.step, "sum over microbatches", sums[0], others=tuple(sums[1:]))
    if names:
        return Location(a.step, "update", names[0])
    return _compare_arrays(a, a.after, b.after, "update")
