"""Simulated devices that compute wrong sums: one bit of one gradient is flipped, once, now and then, or always."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np

from lm_trainer.step.dispatch.mesh_executable import MeshExecutable
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.loss.gradient import Sums

Lies = Callable[[int], bool]
"""Takes the number of gradients that the device has computed before, and returns True if this one is wrong."""


def once(number: int) -> Lies:
    """A single wrong gradient."""
    return lambda n: n == number


def always(number: int) -> Lies:
    """Every gradient is wrong from some number on."""
    return lambda n: n >= number


def now_and_then(rate: float, seed: int) -> Lies:
    """Each gradient is wrong with some probability."""
    return lambda n: random.Random(f"{seed} {n}").random() < rate


class LyingDevice:
    """A batch shard whose devices flip one bit of one element in some of the gradients that they compute.

    Attributes:
        shard: index among all batch shards.
        computed: number of gradients that the shard has computed.
        lied: numbers of the wrong gradients.
    """

    def __init__(self, shard: int, lies: Lies, seed: int = 0):
        self.shard, self._lies, self._random = shard, lies, random.Random(seed)
        self.computed = 0
        self.lied: list[int] = []

    def corrupt(self, sums: Sums, row: int) -> Sums:
        """Returns the sums of a microbatch, with one bit flipped in one array if this gradient is to be wrong."""
        number, self.computed = self.computed, self.computed + 1
        if not self._lies(number):
            return sums
        self.lied.append(number)
        leaves, structure = jax.tree.flatten(sums)
        chosen = self._random.randrange(len(leaves))
        x = leaves[chosen]
        element = self._random.randrange(max(1, x[0].size))
        leaves[chosen] = _flip(x, row, element, self._random.randrange(8 * x.dtype.itemsize))
        return jax.tree.unflatten(structure, leaves)


def _flip(x: jax.Array, row: int, element: int, bit: int) -> jax.Array:
    return _program(x.sharding)(x, row, element, np.array(1 << bit, f"u{x.dtype.itemsize}"))


@functools.cache
def _program(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    def flipped(x: jax.Array, row: int, element: int, mask: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, mask.dtype).reshape(x.shape[0], -1)
        bits = bits.at[row, element].set(bits[row, element] ^ mask)
        return jax.lax.bitcast_convert_type(bits, x.dtype).reshape(x.shape)

    return jax.jit(flipped, out_shardings=sharding)


@contextmanager
def lying(device: LyingDevice) -> Iterator[LyingDevice]:
    """Makes a simulated device lie in the programs that compute gradients."""
    separate, joint = PerGroupExecutable.__call__, MeshExecutable.__call__

    def run_separate(self: PerGroupExecutable, group: int, *args: Any) -> Any:
        result = separate(self, group, *args)
        return _with_sums(result, device, 0) if self.groups[group].index == device.shard else result

    def run_joint(self: MeshExecutable, group: int, *args: Any) -> Any:
        return _with_sums(joint(self, group, *args), device, device.shard)

    with (
        mock.patch.object(PerGroupExecutable, "__call__", run_separate),
        mock.patch.object(MeshExecutable, "__call__", run_joint),
    ):
        yield device


def _with_sums(result: Any, device: LyingDevice, row: int) -> Any:
    """Corrupts the sums in the results of a program. Forward passes have none."""
    if type(result) is tuple:
        return tuple(_with_sums(part, device, row) for part in result)
    return device.corrupt(result, row) if isinstance(result, Sums) else result
