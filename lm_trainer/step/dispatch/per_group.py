"""Computation of one microbatch as a separate executable, compiled once for each group of devices.

Inside one large program, XLA rewrites the same computation differently for one device than for many, so its bits depend
on the mesh. If it is compiled separately, for the devices of one batch shard, the computation of a microbatch is the
same optimised program on every mesh. The hash of that program is recorded with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.dispatch_threads import DispatchThreads, programs_at_once
from lm_trainer.parallel.rehearsal import current_rehearsal
from lm_trainer.step.dispatch.device_groups import ModelParallelGroup
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.program import Program, create_programs

_COMPUTATION = Program("computation", None, "results", grows=True, overlaps=True)


class PerGroupExecutable:
    """A function that is compiled once for every group of this process.

    Args:
        function: function to compile.
        groups: groups for which to compile.
        results: shardings of the results on a group; None: XLA chooses.
        donated: positions of the arguments that are donated.
        program: description of the program in plans, without its function.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        groups: Sequence[ModelParallelGroup],
        results: Callable[[ModelParallelGroup], PyTree] | None = None,
        *,
        donated: Sequence[int] = (),
        program: Program = _COMPUTATION,
    ):
        self._function, self._results, self._donated = function, results, tuple(donated)
        self.groups, self._program = groups, program
        devices = groups[0].mesh.devices
        self._streams = DispatchThreads(programs_at_once(devices.flat[0].platform, len(groups), devices.size))
        self._programs: list[Program] = []

    def compile_for(self, arguments: Callable[[ModelParallelGroup], tuple[PyTree, ...]]) -> None:
        """Compiles for all groups at once. `arguments` returns the shapes, with shardings, of the arguments on a group.

        All processes of a run must call this at the same point.
        """

        def jit_for(index: int) -> jax.stages.Wrapped:
            group = self.groups[index]
            results = None if self._results is None or group.mesh.size == 1 else self._results(group)
            return jax.jit(self._function, out_shardings=results, donate_argnums=self._donated)

        self._programs = create_programs(
            self._program,
            jit_for,
            lambda index: arguments(self.groups[index]),
            [list(group.mesh.devices.flat) for group in self.groups],
            "one computation",
            by_all_processes=True,
        )

    @property
    def program(self) -> Executable:
        """Program of the first group; the other groups run the same program."""
        executable = self._programs[0].executable
        assert executable is not None, "nothing is compiled in a rehearsal"
        return executable

    def __call__(self, group: int, *args: PyTree) -> PyTree:
        """Enqueues the function on local group number `group`. Returns at once if programs may be queued."""
        if current_rehearsal() is not None:
            return self._programs[group](*args)
        return wait_on_cpu(self._streams(self._programs[group], *args))
