"""Loss on held-out data, which is bit-identical on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.stages import StagedLoss
from lm_trainer.parallel.processes import gather
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.executable import Executables
from lm_trainer.step.dispatch.mesh_executable import MicrobatchExecutable, ProgramsDiffer
from lm_trainer.step.dispatch.mesh_group import MeshWide, can_be_mesh_wide
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch, microbatch_groups
from lm_trainer.step.loss.gradient import LossFn
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.staged_sum import StagesOf
from lm_trainer.step.staged.stages import PreparedParams, StageCall, StagedForward, Stages
from lm_trainer.step.staged.whole_model import whole_model_losses
from lm_trainer.step.state.model_def import ModelDef, Params


class Evaluator:
    """Computes mean losses over batches, with microbatches as in training but without gradients and dropout.

    Args:
        model: model to evaluate.
        loss: loss function, which is called without a key.
        devices: devices that compute the loss.
        plan: division of the batches into microbatches.
        staged: the loss in stages, if it is to be computed stage by stage; None: in one program.
    """

    def __init__(
        self,
        model: ModelDef,
        loss: LossFn,
        devices: DeviceGroups,
        plan: MicrobatchPlan,
        *,
        staged: StagedLoss | None = None,
    ):
        self._devices, self._plan = devices, plan
        stages_of = (
            whole_model_losses(model, loss, devices) if staged is None else SplitLoss(model, staged, None).stages
        )
        self._sums_on = partial(_MicrobatchLosses, stages_of, model)
        self._sums = self._sums_on(MeshWide(devices) if can_be_mesh_wide(devices) else devices)

    @property
    def batch_size(self) -> int:
        """Number of rows in a global batch of evaluation, which does not depend on the devices."""
        return self._plan.batch_size

    @property
    def local_rows(self) -> Sequence[int]:
        """Returns the indices of the rows of a global batch that this process needs."""
        return self._devices.local_rows(self._plan)

    def __call__(self, params: Params, batches: Iterable[Batch]) -> dict[str, float]:
        """Returns means over all tokens of all batches, as `means_from_sums`; arguments as for `compute_sums`."""
        return means_from_sums(self.compute_sums(params, batches))

    def compute_sums(
        self, params: Params, batches: Iterable[Batch], counts: Callable[[Batch], dict[str, float]] = lambda _: {}
    ) -> dict[str, float]:
        """Returns weighted sums over all tokens of all batches; empty if there are no batches.

        Args:
            params: all parameters.
            batches: this process's rows of each global batch.
            counts: counts items in this process's rows of a batch, on the host. The counts are added to the sums.

        Returns:
            `loss` in nats, `weight`, the counts, and the metrics that the loss function reports.
        """
        ready: PreparedParams | None = None
        parts: dict[str, list[jax.Array | float]] = {}
        shares = self._devices.divide_microbatches(self._plan)
        max_microbatches = len(self._devices.groups) * shares.max_terms * (self._plan.count // shares.count)
        for batch in batches:
            self._compile(batch)
            ready = ready or self._sums.prepare_params(params)
            for name, count in counts(batch).items():
                parts.setdefault(name, []).append(count)
            batch_sums = [sums for _, sums in self._sums(ready, batch, self._plan)]
            padding = [0.0] * (max_microbatches - len(batch_sums))
            for name in batch_sums[0]:
                # Processes may have different numbers of microbatches, but they must exchange arrays of equal length.
                parts.setdefault(name, []).extend([sums[name] for sums in batch_sums] + padding)
        # If a group spans several processes, only one of them counts. None of them has another group.
        counted = np.float32(self._devices.groups[0].is_lead)
        on_host = {name: [np.asarray(value).item() for value in values] for name, values in sorted(parts.items())}
        terms = {name: counted * np.asarray(values, np.float64) for name, values in on_host.items()}
        # math.fsum is exact, so the order of the terms, which depends on the mesh, does not matter.
        return {name: math.fsum(gather(values).ravel().tolist()) for name, values in terms.items()}

    def compute_row_values(self, params: Params, batches: Iterable[Batch]) -> Iterator[dict[str, np.ndarray]]:
        """Yields arrays that the loss function reports instead of sums, concatenated over the rows of each batch.

        Args:
            params: all parameters.
            batches: this process's rows of each global batch.

        Yields:
            Name -> [rows, ...], for the rows of the batch on this process.
        """
        ready: PreparedParams | None = None
        waiting: tuple[int, list[tuple[jax.Array, dict[str, jax.Array]]]] | None = None
        for batch in batches:
            self._compile(batch)
            ready = ready or self._sums.prepare_params(params)
            # The devices compute the next batch while the host processes this one.
            waiting, done = (len(batch.tokens), list(self._sums(ready, batch, self._plan))), waiting
            if done is not None:
                yield self._concatenate_in_order(*done)
        if waiting is not None:
            yield self._concatenate_in_order(*waiting)

    def compile(self, batch: Batch) -> Executables:
        """Compiles for rows of the same shape as in `batch`, in any number, and returns the programs."""
        self._compile(batch)
        return self._sums.executables

    def _compile(self, batch: Batch) -> None:
        if self._sums.is_compiled:
            return
        shapes = self._plan.microbatch_shapes(batch)
        try:
            self._sums.compile(shapes)
        except ProgramsDiffer as error:
            error.log_separate_programs()
            self._sums = self._sums_on(self._devices)
            self._sums.compile(shapes)

    def _concatenate_in_order(
        self, rows: int, results: list[tuple[jax.Array, dict[str, jax.Array]]]
    ) -> dict[str, np.ndarray]:
        ordered = [values for _, values in sorted(results, key=lambda result: np.asarray(result[0]).item())]
        names = self._sums.names_of_row_values
        return {name: np.concatenate([np.asarray(values[name]) for values in ordered])[:rows] for name in names}


def means_from_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Computes means from `Evaluator.compute_sums`: `loss` in nats, and other metrics; NaN if the weight is 0."""
    weight = sums.get("weight", 0.0)
    metrics = {name: total / weight if weight else math.nan for name, total in sums.items() if name != "weight"}
    return metrics or {"loss": math.nan}


class _MicrobatchLosses:
    """Computes the sums of each microbatch."""

    def __init__(self, stages_of: StagesOf, model: ModelDef, devices: DeviceGroups | MeshWide):
        self._stages_of, self._shapes, self._devices = stages_of, model.shapes, devices
        self._programs: tuple[StagedForward, MicrobatchExecutable] | None = None

    @property
    def is_compiled(self) -> bool:
        return self._programs is not None

    def compile(self, batch: Batch) -> None:
        """Compiles for microbatches with the shapes of `batch`."""
        stages = Stages(self._stages_of(batch), self._shapes, (), self._devices)
        self._programs = StagedForward.compile(stages, batch), stages.compile_losses(batch)

    @property
    def executables(self) -> Executables:
        """The programs of a microbatch. Must be read after compiling."""
        assert self._programs is not None
        forward, losses = self._programs
        names = [kind.functions.name for kind in forward.stages.kinds]
        by_name = {name: program.program for name, program in zip(names, (*forward.programs, losses), strict=True)}
        return Executables(by_name, dict.fromkeys(by_name, 1))

    @property
    def names_of_row_values(self) -> list[str]:
        """Names of the values with an axis over rows. Must be read after compiling."""
        assert self._programs is not None
        results: dict[str, jax.ShapeDtypeStruct] = self._programs[1].program.traced.out_info
        return [name for name, x in results.items() if x.shape]

    def prepare_params(self, params: Params) -> PreparedParams:
        """Prepares the parameters for `__call__`. Must be called after compiling."""
        assert self._programs is not None
        return self._programs[0].stages.prepare_params(params)

    def __call__(
        self, ready: PreparedParams, batch: Batch, plan: MicrobatchPlan
    ) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        """Yields the index of each microbatch of this process, and the values that the loss function reports for it.

        Scalars may have an axis of length 1.

        Args:
            ready: all parameters, prepared by `prepare_params`.
            batch: this process's rows of a global batch.
            plan: division of the batch into microbatches.
        """
        assert self._programs is not None
        (forward, losses), stages = self._programs, self._programs[0].stages
        for group in microbatch_groups(self._devices.put(batch, plan), self._devices, 0):
            streams, call = forward(ready, group), stages.order[-1]
            gathered = stages.gather(ready, call)

            def compute_losses(
                microbatch: Microbatch, stream: PyTree, params: list[Params] = gathered, call: StageCall = call
            ) -> tuple[jax.Array, dict[str, jax.Array]]:
                i, rows, step, index = microbatch
                return index, losses(i, params[i], stream, rows, call.numbers[i], step, index)

            results = group.microbatches.map(compute_losses, streams)
            if isinstance(self._devices, MeshWide):
                for position, of_all_devices in enumerate(results):
                    yield from self._devices.split_results(of_all_devices, position, group.shares)
            else:
                yield from results
