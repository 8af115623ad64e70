"""Computation of one microbatch on each device of a mesh, with one program for all devices.

Inside a program for several devices, XLA may compile a computation differently than in a program for one device. The
program is therefore compared with the computation compiled for one device, as graphs of operations, fusions and
kernels. It is used only if every result is computed in the same way, because its bits are then the same on every mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.processes import any_process
from lm_trainer.parallel.rehearsal import compares_programs
from lm_trainer.profile.program_graph import output_hashes
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.mesh_group import MeshGroup, Signature
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.dispatch.program import Program

logger = logging.getLogger(__name__)


class ProgramsDiffer(Exception):
    """A program for all devices computes results differently than a program for one device, so its bits may differ."""

    def log_separate_programs(self) -> None:
        """Warns that each device gets a separate program."""
        logger.warning(
            "%s is compiled differently in one program for all devices: each device gets its own, which costs the host "
            "more time",
            self,
        )


class Exchange(NamedTuple):
    """A gather or reduction over all devices that overlaps with a computation."""

    name: str
    """Name of the exchange in plans."""
    function: Callable[..., PyTree]
    arguments: tuple[PyTree, ...]
    """Shapes and shardings of the arguments of the exchange."""
    shardings: PyTree
    """Shardings of the results of the exchange."""
    results: str
    """Same as for `Program`."""
    donated: tuple[int, ...] = ()
    """Positions of the arguments that the exchange consumes."""


class MeshExecutable:
    """A function of a microbatch, compiled once for all devices of a mesh.

    The host dispatches one program for all of its devices, whereas `PerGroupExecutable` dispatches one for each. With
    `exchanges`, the devices also gather or reduce arrays of other layers while they compute.

    Args:
        function: computation of one device, a function of the parameters and the arguments of `signature`.
        group: group of all devices.
        signature: arguments and results of the function.
        program: description of the program, without its function.
        exchanges: exchanges that overlap with the computation. Their arguments follow the arguments of the function,
            and their results follow its results.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        group: MeshGroup,
        signature: Signature,
        program: Program,
        exchanges: Sequence[Exchange] = (),
    ):
        self._group, self._signature, self._exchanges = group, signature, exchanges
        self._program = _program_with_exchanges(program, function, group, signature, exchanges)
        self._alone: PerGroupExecutable | None = None

    @property
    def alone(self) -> PerGroupExecutable:
        """The same computation, compiled for one device."""
        assert self._alone is not None, "nothing is compiled"
        return self._alone

    @property
    def program(self) -> Executable:
        """The program compiled for one device, which runs record and compare."""
        return self.alone.program

    def compile_for(self, params: PyTree, alone: PerGroupExecutable) -> None:
        """Compiles the program. All processes of a run must call this at the same point.

        Args:
            params: shapes and shardings of the parameters.
            alone: the same computation, compiled for one device.

        Raises:
            ProgramsDiffer: in all processes, if any of them compiles a result differently than for one device.
        """
        self._alone = alone
        if not compares_programs():
            return
        exchanged = [argument for exchange in self._exchanges for argument in exchange.arguments]
        arguments = self._group.argument_shapes(self._signature)
        executable = Executable.from_jitted(self._program.jitted, params, *arguments, *exchanged)
        expected = output_hashes(alone.program.hlo())
        # The results of the exchanges follow the results of the computation.
        if any_process(output_hashes(executable.hlo())[: len(expected)] != expected):
            raise ProgramsDiffer(self._program.name)
        self._program = replace(self._program, executable=executable)

    def __call__(self, group: int, *args: PyTree) -> PyTree:
        """Enqueues the program on all devices and returns at once; `group` is always 0."""
        assert group == 0
        return wait_on_cpu(self._program(*args))


MicrobatchExecutable = PerGroupExecutable | MeshExecutable
"""Computation of a microbatch on the devices of this process: one program for each group, or one for all groups."""


def _program_with_exchanges(
    program: Program,
    function: Callable[..., PyTree],
    group: MeshGroup,
    signature: Signature,
    exchanges: Sequence[Exchange],
) -> Program:
    """Makes the program of a computation on all devices together with its exchanges."""
    wide = group.map_over_devices(function, signature)
    if not exchanges:
        jitted = jax.jit(wide, out_shardings=group.stacked_sharding(), donate_argnums=tuple(signature.donated))
        return replace(program, jitted=jitted)
    num_own = 1 + len(signature.arguments)
    donated, spans, start = list(signature.donated), list[slice](), num_own
    for exchange in exchanges:
        donated += [start + position for position in exchange.donated]
        spans.append(slice(start, start + len(exchange.arguments)))
        start = spans[-1].stop

    def run(*args: PyTree) -> tuple[PyTree, ...]:
        exchanged = [exchange.function(*args[span]) for exchange, span in zip(exchanges, spans, strict=True)]
        return wide(*args[:num_own]), *exchanged

    names = " with " + ", ".join(exchange.name for exchange in exchanges)
    return replace(
        program,
        name=program.name + names,
        exchanges=names,
        results=(str(program.results), *(exchange.results for exchange in exchanges)),
        # Same as for the results of separate gathers, because the host may call the program long before it runs.
        queued=True,
        jitted=jax.jit(
            run,
            out_shardings=(group.stacked_sharding(), *(exchange.shardings for exchange in exchanges)),
            donate_argnums=tuple(donated),
        ),
    )
