"""Copies of the training state in the memory of the machines of a run, from which it continues if a process is lost.

A process writes the parts of the arrays on its devices to files in memory, where they remain when it is killed. Parts
that no other machine has are also sent to a neighbor, which writes them too, so that the copy survives a lost machine.
A run that starts again reads them instead of a checkpoint if all parts are there.

A copy belongs to a checkpoint on disk or in a bucket, its base, and is used only while the base exists and no newer
checkpoint does. So a copy is never mistaken for a part of another run, or of steps that somebody has removed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lm_trainer.checkpoint.digest import compute_checksums
from lm_trainer.checkpoint.policy import MemoryCopiesConfig
from lm_trainer.core.checksummed import has_valid_checksum, with_checksum
from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import Device
from lm_trainer.parallel.processes import any_process, gather, gather_texts, is_lead, wait_for_all

logger = logging.getLogger(__name__)

Bounds = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of a part of an array in each dimension."""


class Base(NamedTuple):
    """The checkpoint that a copy belongs to."""

    step: int
    checksum: int
    """Checksum of the record of the checkpoint."""


class Copy(NamedTuple):
    """A restored copy."""

    step: int
    arrays: dict[str, jax.Array]
    record: dict[str, Any]
    base: Base


class _Part(NamedTuple):
    """A part of an array in a file."""

    name: str
    bounds: Bounds
    offset: int
    """Position in the file, in bytes."""
    size: int
    """Size in bytes."""
    checksum: int
    """CRC-32 of the bytes."""


class _Manifest(NamedTuple):
    """Parts of one copy that one process has written."""

    group: str
    """Name of the copy: its step, and a number that is unique to the save."""
    writer: str
    """Name of the files: the index of the process."""
    step: int
    base: Base
    parts: tuple[_Part, ...]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> _Manifest:
        """Reads a manifest from parsed JSON, in which tuples are lists."""
        group, writer, step, base, parts = values
        read = (_Part(name, tuple((low, high) for low, high in bounds), *position) for name, bounds, *position in parts)
        return cls(group, writer, step, Base(*base), tuple(read))


class _OwnedManifest(NamedTuple):
    """A manifest, and the process that reads its files."""

    owner: int
    manifest: _Manifest


class _OwnedPart(NamedTuple):
    """A part of an array, and the process that reads it."""

    owner: int
    file: Path
    part: _Part


class MemoryCopies:
    """Saves copies of arrays in memory, and restores the newest complete one. All processes must make the same calls.

    Args:
        config: where and when copies are saved.
        checkpoints: location of the checkpoints of the run, which names its copies.

    Raises:
        UserError: if the directory cannot be used.
    """

    def __init__(self, config: MemoryCopiesConfig, checkpoints: str):
        self._every = config.every
        # The machines may have the checkpoints at different places.
        name = hashlib.sha256(gather_texts(checkpoints)[0].encode()).hexdigest()[:16]
        self.directory = _own_directory(Path(config.directory), f"lmt-{os.getuid()}") / name
        self._machines = gather_texts(socket.gethostname())
        self._thread = ThreadPoolExecutor(1, "memory-copies")
        self._writing: Future[None] | None = None
        self._written, self._warned = True, False
        self._complete: str | None = None
        self._newest: str | None = None
        self.newest_step: int | None = None
        """Step of the newest copy that was begun or restored."""

    def is_due(self, step: int) -> bool:
        """Returns True if a copy of the state after `step` steps is due."""
        return step % self._every == 0

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any], base: Base | None) -> None:
        """Copies the arrays off the devices, and writes them in the background.

        Args:
            step: step of the state.
            arrays: arrays of the state, by name.
            record: JSON record of the state.
            base: the newest checkpoint that is complete; without one, nothing is saved.
        """
        self.wait()
        answers = [json.loads(text) for text in gather_texts(json.dumps([self._written, base, os.urandom(4).hex()]))]
        self._written = True
        # The processes may see the end of a background save at different times, so the first one decides.
        _, agreed, number = answers[0]
        if agreed is None:
            return
        group = f"{step}-{number}"
        # The copy before the last is only removed if all processes have written the last one.
        if all(answer[0] for answer in answers):
            self._complete = self._newest
        self._remove_all_but({self._complete, group})
        contents = [content for name in sorted(arrays) for content in self._parts_to_write(name, arrays[name])]
        manifest = _Manifest(group, str(jax.process_index()), step, Base(*agreed), ())
        self._writing = self._thread.submit(self._write, manifest, contents, dict(record))
        self._newest, self.newest_step = group, step

    def wait(self) -> None:
        """Waits until the last copy is written. Logs the reason if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            logger.warning("no copy of the state could be kept in %s: %s", self.directory, error)
            self._written = False

    def restore(
        self, like: Mapping[str, jax.ShapeDtypeStruct], newest: int, is_base: Callable[[Base], bool]
    ) -> Copy | None:
        """Reads the newest complete copy, and removes all others. Returns None if no copy can be used.

        Args:
            like: shape, dtype and sharding of every array, by name.
            newest: step of the newest checkpoint; older copies are not used.
            is_base: returns True if a checkpoint exists. Called in the first process only.
        """
        by_group: dict[str, list[_OwnedManifest]] = {}
        for owner, text in enumerate(gather_texts(json.dumps(self._list()))):
            for values in json.loads(text):
                manifest = _Manifest.from_json(values)
                by_group.setdefault(manifest.group, []).append(_OwnedManifest(owner, manifest))
        newest_first = sorted(by_group.values(), key=lambda group: -group[0].manifest.step)
        usable = [
            is_lead()
            and group[0].manifest.step > newest
            and is_base(group[0].manifest.base)
            and _is_complete([manifest for _, manifest in group], like)
            for group in newest_first
        ]
        usable = json.loads(gather_texts(json.dumps(usable))[0])
        copies = (self._restore_copy(group, like) for group in itertools.compress(newest_first, usable))
        copy = next((copy for copy in copies if copy is not None), None)
        self._remove_all_but({self._complete})
        wait_for_all("copies in memory are removed")
        return copy

    def close(self, newest: int | None) -> None:
        """Ends the background thread, and removes the copies if `newest`, a complete checkpoint, replaces them."""
        self.wait()
        self._thread.shutdown()
        if newest is not None and self.newest_step is not None and newest >= self.newest_step:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _parts_to_write(self, name: str, x: jax.Array) -> Iterator[tuple[str, Bounds, np.ndarray]]:
        """Yields the parts of an array on the devices of this process, and the parts that only a neighbor has."""
        bounds = {device: _bounds(index, x.shape) for device, index in x.sharding.devices_indices_map(x.shape).items()}
        written = set[Bounds]()
        for source, shards in self._sources(x, bounds):
            for shard in shards:
                part = bounds[source(shard.device)]
                if part not in written:
                    written.add(part)
                    # A copy, because on a CPU the array may be the memory of the device, which the next step reuses.
                    yield name, part, np.array(shard.data)

    def _sources(self, x: jax.Array, bounds: Mapping[Device, Bounds]) -> Iterator[tuple[Any, Sequence[Any]]]:
        yield lambda device: device, x.addressable_shards
        if jax.process_count() == 1:
            return
        devices = [*x.sharding.mesh.devices.flat]  # pyright: ignore[reportAttributeAccessIssue]
        several = len({*self._machines}) > 1

        def place(device: Device) -> Any:
            return self._machines[device.process_index] if several else device.process_index

        places: dict[Bounds, set[Any]] = {}
        for device in devices:
            places.setdefault(bounds[device], set()).add(place(device))
        shift = neighbor_shift(tuple(map(place, devices)))
        if all(len(holders) > 1 for holders in places.values()):
            return
        if shift is None:
            if not self._warned:
                logger.warning(
                    "copies in memory do not survive a lost machine: machines have unequal numbers of devices"
                )
                self._warned = True
            return
        numbers = {device: number for number, device in enumerate(devices)}
        sent = _shift_function(x.sharding.mesh, x.sharding.spec, shift)(x)  # pyright: ignore[reportAttributeAccessIssue]
        yield lambda device: devices[(numbers[device] + shift) % len(devices)], sent.addressable_shards

    def _write(
        self, manifest: _Manifest, contents: Sequence[tuple[str, Bounds, np.ndarray]], record: dict[str, Any]
    ) -> None:
        directory = self.directory / manifest.group
        directory.mkdir(parents=True, exist_ok=True)
        try:
            _write_files(directory, manifest, contents, record)
        except OSError:
            # The part that was written takes memory that the next copy needs.
            for file in directory.glob(f"{manifest.writer}.*"):
                file.unlink(missing_ok=True)
            raise

    def _list(self) -> list[_Manifest]:
        """Returns the manifests of all copies on this machine."""
        contents = ((path, self._read(path)) for path in sorted(self.directory.glob("*/*.json")))
        # The files that the manifest describes are next to it.
        return [
            _Manifest.from_json(content["manifest"])._replace(group=path.parent.name, writer=path.stem)
            for path, content in contents
            if content is not None
        ]

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) and has_valid_checksum(content) else None

    def _restore_copy(self, group: Sequence[_OwnedManifest], like: Mapping[str, jax.ShapeDtypeStruct]) -> Copy | None:
        """Reads a copy. Returns None in all processes, and logs the reason, if it is damaged."""
        first = group[0].manifest
        content = self._read(self.directory / first.group / f"{first.writer}.json")
        record = json.loads(gather_texts(json.dumps({} if content is None else content["record"]))[group[0].owner])
        parts: dict[str, dict[Bounds, _OwnedPart]] = {}
        for owner, manifest in group:
            file = self.directory / manifest.group / f"{manifest.writer}.bin"
            for part in manifest.parts:
                parts.setdefault(part.name, {}).setdefault(part.bounds, _OwnedPart(owner, file, part))
        arrays = {name: _restore_array(x, list(parts[name].values())) for name, x in sorted(like.items())}
        intact = {name: x for name, x in arrays.items() if x is not None}
        if len(intact) < len(arrays) or compute_checksums(intact) != record.get("digests"):
            logger.error("the copy of step %s in memory is damaged, and is not used", first.step)
            return None
        self._complete = self._newest = first.group
        self.newest_step = first.step
        return Copy(first.step, intact, record, first.base)

    def _remove_all_but(self, groups: set[str | None]) -> None:
        for path in self.directory.glob("*"):
            if path.name not in groups:
                shutil.rmtree(path, ignore_errors=True)


def _write_files(
    directory: Path, manifest: _Manifest, contents: Sequence[tuple[str, Bounds, np.ndarray]], record: Mapping[str, Any]
) -> None:
    """Writes parts of arrays, then their manifest, whose name makes them complete."""
    parts, offset = list[_Part](), 0
    with (directory / f"{manifest.writer}.bin").open("wb") as file:
        for name, bounds, array in contents:
            content = _bytes_of(array)
            file.write(content)
            parts.append(_Part(name, bounds, offset, len(content), zlib.crc32(content)))
            offset += len(content)
    text = json.dumps(with_checksum({"manifest": manifest._replace(parts=tuple(parts)), "record": record}))
    unfinished = directory / f"{manifest.writer}.unfinished"
    unfinished.write_text(text)
    unfinished.rename(directory / f"{manifest.writer}.json")


@functools.cache
def neighbor_shift(places: tuple[Any, ...]) -> int | None:
    """Returns the smallest distance, in a ring of devices, at which each device is at another place.

    Args:
        places: the machine or the process of each device.

    Returns:
        The distance; None if there is none, for example because all devices are at one place.
    """
    count = len(places)
    distances = range(1, count)
    return next((k for k in distances if all(places[i] != places[(i + k) % count] for i in range(count))), None)


def _restore_array(like: jax.ShapeDtypeStruct, parts: Sequence[_OwnedPart]) -> jax.Array | None:
    """Assembles an array from its parts. Returns None in all processes if a part is damaged."""
    local_parts = [_read_part(file, part) for owner, file, part in parts if owner == jax.process_index()]
    if any_process(None in local_parts):
        return None
    owners = [owner for owner, _, _ in parts]
    sent = np.zeros((max(map(owners.count, owners)), max(part.size for _, _, part in parts)), np.uint8)
    for row, content in zip(sent, local_parts, strict=False):
        row[: len(content or b"")] = np.frombuffer(content or b"", np.uint8)
    received, positions = gather(sent), {owner: itertools.count() for owner in owners}
    full = np.empty(like.shape, like.dtype)
    for owner, _, part in parts:
        content = received[owner, next(positions[owner]), : part.size]
        index = tuple(slice(low, high) for low, high in part.bounds)
        full[index] = content.view(like.dtype).reshape([high - low for low, high in part.bounds])
    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.asarray(full[index]))


def _read_part(file: Path, part: _Part) -> bytes | None:
    """Returns the bytes of a part; None if they are damaged."""
    try:
        with file.open("rb") as content:
            content.seek(part.offset)
            read = content.read(part.size)
    except OSError:
        return None
    return read if len(read) == part.size and zlib.crc32(read) == part.checksum else None


@functools.cache
def _shift_function(mesh: Mesh, spec: PartitionSpec, shift: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that gives each device of a mesh the part of the device at a distance of `shift`."""
    routes = [((i + shift) % mesh.size, i) for i in range(mesh.size)]

    def receive(part: jax.Array) -> jax.Array:
        return jax.lax.ppermute(part, mesh.axis_names, routes)

    return jax.jit(jax.shard_map(receive, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _is_complete(manifests: Sequence[_Manifest], like: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Returns True if the manifests of a copy have every part of arrays with these names and sizes."""
    parts: dict[str, dict[Bounds, int]] = {}
    for manifest in manifests:
        for part in manifest.parts:
            parts.setdefault(part.name, {})[part.bounds] = part.size
    sizes = {name: sum(size_by_bounds.values()) for name, size_by_bounds in parts.items()}
    return sizes == {name: math.prod(x.shape) * x.dtype.itemsize for name, x in like.items()}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple((low, high) for low, high, _ in (part.indices(size) for part, size in zip(index, shape, strict=True)))


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _own_directory(parent: Path, name: str) -> Path:
    """Creates a directory that only this user can read."""
    directory = parent / name
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        owner = directory.lstat().st_uid
    except OSError as error:
        raise UserError(
            f"trainer.checkpointer.memory.directory: {directory} cannot be created ({error.strerror}); name a "
            "directory in memory (tmpfs) that exists on every machine"
        ) from None
    if owner != os.getuid():
        raise UserError(
            f"trainer.checkpointer.memory.directory: {directory} belongs to another user; name another directory"
        )
    return directory
