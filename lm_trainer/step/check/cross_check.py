"""Checks the devices of a run against each other: microbatches of a step are computed again by other devices."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax.sharding import Mesh

from lm_trainer.core.errors import HardwareError
from lm_trainer.core.jax_types import Device
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.processes import gather_texts
from lm_trainer.step.check.recompute import Recomputation, positions_of_groups
from lm_trainer.step.check.settings import CrossCheckConfig
from lm_trainer.step.check.verdict import Verdict, Vote, judge
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.staged_sum import StagedSum
from lm_trainer.step.staged.stages import PreparedParams


@dataclass(frozen=True)
class Mismatch:
    """Results of one step that differed between devices."""

    step: int
    """Number of the step, counted from 1."""
    verdicts: Sequence[Verdict]
    devices: Mapping[int, Sequence[str]]
    """Descriptions of the devices of each batch shard that voted."""
    repaired: bool
    """True if the run continues with the right gradient."""

    @property
    def decided(self) -> bool:
        """True if the right value of every microbatch is known."""
        return all(verdict.right is not None for verdict in self.verdicts)

    @property
    def wrong(self) -> list[int]:
        """Batch shards whose devices were wrong or, if that is not decided, may have been."""
        decided = [verdict for verdict in self.verdicts if verdict.right is not None] or self.verdicts
        return sorted({shard for verdict in decided for shard in verdict.wrong})

    def wrong_names(self) -> list[str]:
        """Returns descriptions of the devices of `wrong`."""
        return [name for shard in self.wrong for name in self.devices[shard]]

    def describe(self) -> str:
        """Returns a sentence that names the devices."""
        names = "; ".join(self.wrong_names())
        microbatches = ", ".join(str(verdict.microbatch) for verdict in self.verdicts)
        problem = f"step {self.step}: loss or gradient of microbatch {microbatches} differ between devices"
        if not self.decided and len(self.wrong) > 1:
            return f"{problem}, and each of these devices repeats its own value, so one of them is wrong: {names}"
        return f"{problem}. Wrong: {names}"

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return {
            "step": self.step,
            "wrong": self.wrong,
            "decided": self.decided,
            "repaired": self.repaired,
            "devices": {str(shard): list(names) for shard, names in self.devices.items()},
            "microbatches": [
                {**asdict(verdict), "votes": [vote._asdict() for vote in verdict.votes]} for verdict in self.verdicts
            ],
        }


class CrossCheck:
    """Computes the gradient of a step, and compares microbatches of it with the results of other devices.

    Args:
        config: interval and reaction.
        seed: seed of the choice of microbatches and of the devices that check them.
        report: receives every mismatch, in all processes.
    """

    def __init__(self, config: CrossCheckConfig, seed: int, report: Callable[[Mismatch], object]):
        self._config, self._seed, self._report = config, seed, report

    def is_due(self, step: int) -> bool:
        """Returns True if the step with this number, counted from 1, is checked."""
        return step % self._config.every == 0

    def compute(
        self,
        gradient: StagedSum,
        devices: DeviceGroups | MeshWide,
        params: PreparedParams,
        batch: PlacedBatch,
        step: int,
    ) -> Sums:
        """Computes the sums of a step, and checks one microbatch of every device.

        Args:
            gradient: computes the sums.
            devices: devices that compute microbatches.
            params: all parameters, prepared by `gradient`.
            batch: the batch of the step.
            step: number of completed steps.

        Raises:
            HardwareError: if devices disagree, and the configuration or the disagreement does not allow to continue.
        """
        draw = random.Random(f"{self._seed} {step}")
        positions = positions_of_groups(batch, draw.randrange(max(map(len, batch.microbatches))))
        again = Recomputation(gradient, devices, params, batch, positions, step)
        partner, *judges = _rotations(again.shards, draw)
        sums, digests = again.compute_step(batch, positions)
        votes = {shard: [Vote(shard, digest)] for shard, digest in sorted(digests.items())}
        _add_votes(votes, again, partner)
        differing = [shard for shard, of_shard in votes.items() if len({vote.digest for vote in of_shard}) > 1]
        if not differing:
            return sums
        for rotation in judges:
            _add_votes(votes, again, rotation)
        verdicts = [judge(again.microbatches[shard].index, votes[shard]) for shard in differing]
        return self._react(_make_mismatch(step + 1, verdicts, devices.sharding.mesh), sums, again, batch, positions)

    def _react(
        self,
        mismatch: Mismatch,
        sums: Sums,
        again: Recomputation,
        batch: PlacedBatch,
        positions: Sequence[int],
    ) -> Sums:
        repaired = None
        if self._config.on_mismatch == "repair" and mismatch.decided:
            repaired = _repair(mismatch, sums, again, batch, positions)
        if repaired is not None:
            self._report(Mismatch(mismatch.step, mismatch.verdicts, mismatch.devices, repaired=True))
            return repaired
        self._report(mismatch)
        raise HardwareError(
            f"{mismatch.describe()}. The weights were not updated. Take the device out of service, and start the same "
            "command again on other devices, in any number (`lmt bench hardware` checks all devices of a machine)"
        )


def compare_devices(again: Recomputation, number: int, mesh: Mesh) -> Mismatch | None:
    """Makes all devices compute the same microbatch, and compares the results.

    Args:
        again: microbatches to choose from.
        number: number of the comparison, counted from 1, which chooses the microbatch.
        mesh: device mesh.

    Returns:
        The results if they differ; None if all are equal.
    """
    chosen = number % again.shards

    def vote() -> list[Vote]:
        return [Vote(shard, digest) for shard, digest in sorted(again.compute_elsewhere(lambda _: chosen).items())]

    votes = vote()
    if again.shards == 1:
        votes += vote()
    if len({digest for _, digest in votes}) == 1:
        return None
    # A second round tells a device that does not repeat its value from one that does.
    votes += vote()
    return _make_mismatch(number, [judge(again.microbatches[chosen].index, votes)], mesh)


def _rotations(shards: int, draw: random.Random) -> list[int]:
    """Returns by how many places microbatches move for the comparison, and then for the votes that decide it."""
    if shards == 1:
        return [0, 0]
    if shards == 2:
        return [1, 0, 1]
    return draw.sample(range(1, shards), 2)


def _add_votes(votes: Mapping[int, list[Vote]], again: Recomputation, rotation: int) -> None:
    """Makes every batch shard compute the microbatch of another one, and adds the digests to the votes on it."""
    digests = again.compute_elsewhere(lambda shard: (shard - rotation) % again.shards)
    for shard, digest in digests.items():
        votes[(shard - rotation) % again.shards].append(Vote(shard, digest))


def _repair(
    mismatch: Mismatch, sums: Sums, again: Recomputation, batch: PlacedBatch, positions: Sequence[int]
) -> Sums | None:
    """Returns sums in which the checked microbatches are right; None if they are wrong a second time."""
    if all(verdict.step_was_right for verdict in mismatch.verdicts):
        return sums
    sums, digests = again.compute_step(batch, positions)
    right = {verdict.votes[0].group: verdict.right for verdict in mismatch.verdicts}
    return sums if all(digests[shard] == digest for shard, digest in right.items()) else None


def _make_mismatch(step: int, verdicts: Sequence[Verdict], mesh: Mesh) -> Mismatch:
    shards = sorted({vote.group for verdict in verdicts for vote in verdict.votes})
    return Mismatch(step, verdicts, describe_shards(mesh, shards), repaired=False)


def describe_shards(mesh: Mesh, shards: Sequence[int]) -> dict[int, list[str]]:
    """Returns a description of each device of some batch shards. All processes must call this function."""
    hosts = gather_texts(socket.gethostname())
    rows = mesh.devices.reshape(batch_shards(mesh), -1)
    return {
        shard: [_describe_device(device, hosts[device.process_index]) for device in rows[shard]] for shard in shards
    }


def _describe_device(device: Device, host: str) -> str:
    coords = getattr(device, "coords", None)
    slot = (
        f"slot {getattr(device, 'local_hardware_id', device.id)}" if coords is None else f"coordinates {list(coords)}"
    )
    return f"device {device.id} ({device.device_kind}), process {device.process_index} on {host}, {slot}"
