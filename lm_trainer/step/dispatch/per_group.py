"""The computation of one microbatch as an executable of its own, compiled once for each group of devices.

Inside one big program XLA rewrites the same computation differently for one device than for many, so its bits change
with the mesh. The computation of a microbatch is compiled alone, for one batch shard's devices, to the same optimised
program on every mesh; the hash of that program is recorded with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.dispatch_threads import DispatchThreads, programs_at_once
from lm_trainer.parallel.rehearsal import current_rehearsal
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.dispatch.device_groups import ModelParallelGroup
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.program import Program, on_each

_COMPUTATION = Program("computation", None, "results", grows=True, overlaps=True)


class PerGroupExecutable:
    """One function, compiled once for every group of this process.

    Args:
        function: for `compile` `function(params, batch, step, index)`, with a Batch of one microbatch; `step` and
            `index` are int32 scalars.
        groups: where to compile it.
        results: how what it returns lies on a group; XLA's choice without.
        donated: the arguments whose memory it may take for its results.
        program: what it is to a plan, without its function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        groups: Sequence[ModelParallelGroup],
        results: Callable[[ModelParallelGroup], Any] | None = None,
        *,
        donated: Sequence[int] = (),
        program: Program = _COMPUTATION,
    ):
        self._function, self._results, self._donated = function, results, tuple(donated)
        self.groups, self._program = groups, program
        devices = groups[0].mesh.devices
        self._streams = DispatchThreads(programs_at_once(devices.flat[0].platform, len(groups), devices.size))
        self._programs: list[Program] = []

    def compile(
        self, params: Mapping[str, jax.ShapeDtypeStruct], param_shardings: Mapping[str, ParamSharding], batch: Batch
    ) -> None:
        """Compiles for all groups at once, for parameters in their `compute` sharding and a microbatch like `batch`."""

        def on_group(group: ModelParallelGroup) -> tuple[Any, ...]:
            whole = group.sharding()
            placed = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=group.sharding(*param_shardings[name].compute))
                for name, x in params.items()
            }
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), batch)
            scalar = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
            return placed, rows, scalar, scalar

        self.compile_for(on_group)

    def compile_for(self, arguments: Callable[[ModelParallelGroup], tuple[Any, ...]]) -> None:
        """Compiles for all groups at once, for arguments of which `arguments` gives shapes and shardings on a group.

        All processes of a run must call it at the same point.
        """

        def jitted_for(index: int) -> Any:
            group = self.groups[index]
            results = None if self._results is None or group.mesh.size == 1 else self._results(group)
            return jax.jit(self._function, out_shardings=results, donate_argnums=self._donated)

        self._programs = on_each(
            self._program,
            jitted_for,
            lambda index: arguments(self.groups[index]),
            [list(group.mesh.devices.flat) for group in self.groups],
            "one computation",
            by_all_processes=True,
        )

    @property
    def compiled(self) -> bool:
        """True once `compile` has been called."""
        return bool(self._programs)

    @property
    def program(self) -> Executable:
        """The program of the first group; the others run the same."""
        executable = self._programs[0].executable
        assert executable is not None, "nothing is compiled in a rehearsal"
        return executable

    def __call__(self, group: int, *args: Any) -> Any:
        """Enqueues the function on the `group`-th local group and returns at once, where programs may wait in line."""
        if current_rehearsal() is not None:
            return self._programs[group](*args)
        return wait_on_cpu(self._streams(self._programs[group], *args))
