"""Checkpoint steps in object storage, written by TensorStore. One object, written last, commits a step.

The checkpoint directory of a run contains:

    steps/40.json             the record of step 40, which commits the step
    arrays/40-1f0c9a2b/NAME/  its arrays as zarr chunks, below a prefix that is unique to this save
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from lm_trainer.checkpoint.host_memory import group_by_bytes, local_bytes
from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.checkpoint.record import CheckpointError, root_cause, verify_record
from lm_trainer.checkpoint.steps import AllDamaged, DirectoryLock
from lm_trainer.core.bucket import Bucket, explain_failed_request
from lm_trainer.core.checksummed import with_checksum
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.key_values import tensorstore_context
from lm_trainer.parallel.processes import gather, is_lead, wait_for_all

logger = logging.getLogger(__name__)

_STEPS, _ARRAYS = "steps", "arrays"
_MARKER = re.compile(r"(\d+)\.json")
_PREFIX = re.compile(rf"{_ARRAYS}/\d+-[0-9a-f]+")
"""Pattern of the directory with the arrays of one step."""
_ASIDE = re.compile(r"(\d+)\.corrupt(\.\d+)?\.json")
_CHUNK_BYTES = 64 << 20
"""Maximum number of bytes per object. If the connection breaks, the full object is sent a second time."""
_IN_FLIGHT_BYTES = 2 << 30
"""Maximum number of bytes that are read concurrently."""
_SLOW_SECONDS = 60.0
"""Number of seconds after which a warning reports that a save is still in progress."""
_READ_SECONDS = 600.0
_DELETE_SECONDS = 20.0
_DAMAGED = re.compile(r"(FAILED_PRECONDITION|DATA_LOSS|OUT_OF_RANGE)\b.*\b(data|byte)\b", re.DOTALL)
"""Pattern of TensorStore's errors for an object that was received in full, but has a different size than its chunk."""


class BucketSteps:
    """Reader of the steps below a prefix of a bucket; see `lm_trainer.checkpoint.steps.Steps`.

    If the server is unreachable, methods raise `MachineError`. This says nothing about the steps, so none is moved
    aside.
    """

    def __init__(self, directory: Bucket, config: CheckpointerConfig | None = None):
        self.directory = directory
        self.config = config or CheckpointerConfig()

    def list_steps(self) -> list[int]:
        matches = (_MARKER.fullmatch(name) for name in self.directory.list(_STEPS))
        return sorted(int(match[1]) for match in matches if match)

    def read_record(self, step: int) -> dict[str, Any]:
        content = self.directory.read(record_key(step))
        if content is None:
            raise CheckpointError("it is gone")
        return _parse_record(content)

    def read_arrays(
        self, step: int, record: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        del step
        read: dict[str, jax.Array] = {}
        sizes = {name: int(np.prod(x.shape)) * x.dtype.itemsize for name, x in like.items()}
        for names in group_by_bytes(sizes, _IN_FLIGHT_BYTES):
            # Devices that share a chunk read it only once.
            cache = tensorstore_context(cache_pool={"total_bytes_limit": _IN_FLIGHT_BYTES})
            stores = {name: _open_array(self.directory, record["layout"], name, like[name], cache) for name in names}
            # Requests all shards before waiting for the first one.
            parts = {name: _request_shards(stores[name], like[name]) for name in names}
            for name in names:
                read[name] = self._assemble(parts[name], like[name])
        return read

    def _assemble(self, parts: Mapping[Any, Any], like: jax.ShapeDtypeStruct) -> jax.Array:
        def read_shard(index: Any) -> np.ndarray:
            try:
                return np.asarray(parts[_index_key(index, like.shape)].result(timeout=_READ_SECONDS))
            except UserError:
                # The handler of a stop signal raises this error.
                raise
            except Exception as error:
                reason = explain_failed_request(error, self.directory, _READ_SECONDS)
                if _DAMAGED.search(str(error)):
                    raise CheckpointError(f"its arrays cannot be read ({reason})") from None
                raise MachineError(f"{self.directory}: a checkpoint cannot be read: {reason}") from None

        assert like.sharding is not None
        return jax.make_array_from_callback(like.shape, like.sharding, read_shard)

    def open_writer(self, all_damaged: AllDamaged, lock: DirectoryLock) -> BucketWriter:
        del all_damaged  # a damaged record does not prevent reading other steps
        return BucketWriter(self, lock)


class BucketWriter:
    """Writer of steps in a bucket; see `lm_trainer.checkpoint.steps.Writer`.

    Every process writes its own shards. The first process writes the record once all others have reported completion.
    """

    remedy = "mend it"

    def __init__(self, steps: BucketSteps, lock: DirectoryLock):
        self.directory = steps.directory
        self._steps, self._lock = steps, lock
        self._seconds = steps.config.retry_for.total_seconds()
        self._host_bytes = steps.config.host_bytes
        self._latest_deadline = float("inf")
        self._deletes = True
        self._saves = ThreadPoolExecutor(1, "save")
        self._trash = ThreadPoolExecutor(1, "trash")
        if is_lead():
            self.directory.check_writable("trainer.checkpointer.base_path")
            self._remove_orphans()
        wait_for_all("checkpoint directory")
        # The list of steps is cached, because an unresponsive server must not delay the training steps between two
        # saves.
        self._present = set(steps.list_steps())

    def how_to_remove(self, step: int) -> str:
        return f"to remove one, remove {self.directory}/{record_key(step)}; its arrays go at the next start"

    def save(self, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Future[Any]:
        # The first process draws the number, because all processes must write below the same prefix.
        unique = int(gather(np.asarray(secrets.randbits(31), np.int32))[0])
        prefix = f"{_ARRAYS}/{step}-{unique:08x}"
        layout = {"prefix": prefix, "chunks": {name: _chunk_shape(x) for name, x in arrays.items()}}
        record = with_checksum({**record, "layout": layout})
        timer, limit = _SaveTimer(self, step), self._host_bytes
        *groups, last = [[*arrays]] if limit is None else group_by_bytes(local_bytes(arrays), limit)

        def copy(names: list[str]) -> list[tuple[str, Any, np.ndarray]]:
            return list(_local_shards({name: arrays[name] for name in names}))

        # Frees the copies of a group before it copies the next group, so training continues after the last copy.
        for names in groups:
            self._write_shards(copy(names), record, timer)
        return self._saves.submit(self._write, step, copy(last), record, timer)

    def _write(
        self, step: int, shards: list[tuple[str, Any, np.ndarray]], record: Mapping[str, Any], timer: _SaveTimer
    ) -> None:
        prefix = record["layout"]["prefix"]
        self._write_shards(shards, record, timer)
        self._wait_for_all_shards(prefix, timer)
        if is_lead():
            self._lock.before_commit(timer.seconds_left())
            timer.check_deadline()
            self.directory.write(record_key(step), _encode_record(record), seconds=timer.seconds_left())
        elif jax.process_count() > 1:
            while self._array_prefixes(record_key(step)) != [prefix]:
                timer.sleep()
        self._present.add(step)
        self._deletes = True

    def _write_shards(
        self, shards: list[tuple[str, Any, np.ndarray]], record: Mapping[str, Any], timer: _SaveTimer
    ) -> None:
        layout, shapes = record["layout"], record["shapes"]
        stores = {
            name: _open_array(self.directory, layout, name, _parse_shape_dtype(shapes[name]), tensorstore_context())
            for name in {name for name, *_ in shards}
        }
        writes = [
            # Nothing else modifies the arrays in `shards`, so TensorStore does not need to copy them.
            stores[name][index].write(x, can_reference_source_data_indefinitely=True)
            for name, index, x in shards
        ]
        try:
            for write in writes:
                timer.wait_for(write)
        except BaseException:
            for write in writes:
                write.cancel()
            raise

    def _wait_for_all_shards(self, prefix: str, timer: _SaveTimer) -> None:
        """Waits for the shards of every process.

        The processes communicate through objects in the bucket, because this thread must not use collectives of JAX.
        """
        if jax.process_count() == 1:
            return
        self.directory.write(f"{prefix}/done/{jax.process_index()}", b"", seconds=timer.seconds_left())
        while is_lead() and len(self.directory.list(f"{prefix}/done")) < jax.process_count():
            timer.sleep()

    def deadline(self, started: float) -> float:
        """Returns the monotonic time at which a save that began at `started` is given up."""
        return min(started + self._seconds, self._latest_deadline)

    def wait(self) -> None:
        """Does nothing, because waiting for the result of a save is sufficient."""

    def known_steps(self) -> list[int]:
        return sorted(self._present)

    def limit_save_time(self, seconds: float) -> None:
        self._latest_deadline = min(self._latest_deadline, time.monotonic() + seconds)

    def discard_unfinished(self) -> None:
        """Does nothing, because objects without a record are ignored and are removed at the next start."""

    def delete(self, steps: list[int]) -> None:
        self._present.difference_update(steps)
        for step in steps if is_lead() else ():
            self._trash.submit(self._delete, step)

    def _delete(self, step: int) -> None:
        # If the server is unreachable, every deletion would wait for its deadline, and the run could only end after all
        # of them.
        if not self._deletes:
            return
        try:
            prefixes = self._array_prefixes(record_key(step), _DELETE_SECONDS)
            self.directory.delete(record_key(step), seconds=_DELETE_SECONDS)
            for prefix in prefixes:
                self._remove_arrays(prefix)
        except MachineError as error:
            self._deletes = False
            logger.warning("%s; what is left goes at the next start", error)

    def move_aside(self, step: int) -> str:
        names = set(self.directory.list(_STEPS)) if is_lead() else set()
        number = 0
        while (name := f"{step}.corrupt{f'.{number}' if number else ''}.json") in names:
            number += 1
        if is_lead():
            # Copies the record before deleting it, because even a damaged record may still locate the arrays.
            self.directory.write(f"{_STEPS}/{name}", self.directory.read(record_key(step)) or b"")
            self.directory.delete(record_key(step))
        self._present.discard(step)
        return f"{self.directory}/{_STEPS}/{name}"

    def refresh(self) -> None:
        """Does nothing, because `move_aside` has already updated the list of steps."""

    def close(self) -> None:
        self._saves.shutdown()
        self._trash.shutdown()

    def _array_prefixes(self, key: str, seconds: float = _READ_SECONDS) -> list[str]:
        """Returns a list with the array directory of a step.

        The list is empty if the record of the step cannot be read.
        """
        try:
            prefix = _parse_record(self.directory.read(key, seconds=seconds) or b"")["layout"]["prefix"]
        except (CheckpointError, KeyError, TypeError):
            return []
        # Everything below the prefix is deleted together with the step, so a record must not name any other directory.
        return [prefix] if isinstance(prefix, str) and _PREFIX.fullmatch(prefix) else []

    def _remove_arrays(self, prefix: str) -> None:
        try:
            self.directory.delete_below(prefix, seconds=_DELETE_SECONDS)
        except MachineError as error:
            logger.warning("%s; what is left goes at the next start", error)

    def _remove_orphans(self) -> None:
        """Removes arrays without a record, which interrupted saves and deletions leave behind."""
        stored = {name.split("/")[0] for name in self.directory.list(_ARRAYS)}
        if not stored:
            return
        referenced, damaged = set(), set()
        for name in self.directory.list(_STEPS):
            prefixes = self._array_prefixes(f"{_STEPS}/{name}")
            referenced |= {prefix.partition("/")[2] for prefix in prefixes}
            if not prefixes and (match := _MARKER.fullmatch(name) or _ASIDE.fullmatch(name)):
                damaged.add(match[1])
        for unused in stored - referenced:
            # Keeps all arrays of a step whose record is damaged, because the record may refer to any of them.
            if unused.partition("-")[0] not in damaged:
                self._trash.submit(self._remove_arrays, f"{_ARRAYS}/{unused}")


class _SaveTimer:
    """Deadline of one save, which a stop signal brings forward."""

    def __init__(self, writer: BucketWriter, step: int):
        self._writer, self._step = writer, step
        self._started = time.monotonic()
        self._warned = False

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline, but at least 0.1, so that a request can still report its error."""
        return max(self._writer.deadline(self._started) - time.monotonic(), 0.1)

    def check_deadline(self) -> None:
        """Raises `MachineError` with the response of the server if the deadline has passed. Warns about a slow save."""
        time_now = time.monotonic()
        if time_now >= self._writer.deadline(self._started):
            try:
                self._writer.directory.check_access()
                reason = "the server answers, but not fast enough; set trainer.checkpointer.retry_for"
            except MachineError as error:
                reason = str(error)
            raise MachineError(f"it was not complete after {time_now - self._started:.0f} s: {reason}")
        if time_now - self._started > _SLOW_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "%s: the checkpoint of step %d is still being written after %.0f s; it is given up after %.0f s",
                self._writer.directory,
                self._step,
                time_now - self._started,
                self._writer.deadline(self._started) - self._started,
            )

    def sleep(self) -> None:
        self.check_deadline()
        time.sleep(0.2)

    def wait_for(self, future: Any) -> Any:
        """Waits for the result of a request, and returns it."""
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                self.check_deadline()
            except UserError:
                # The handler of a stop signal raises this error in the main thread.
                raise
            except Exception as error:
                reason = explain_failed_request(error, self._writer.directory, 0)
                raise MachineError(reason) from None


def record_key(step: int) -> str:
    """Returns the key of the record that commits a step."""
    return f"{_STEPS}/{step}.json"


def _encode_record(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode()


def _parse_record(content: bytes) -> dict[str, Any]:
    try:
        return verify_record(json.loads(content))
    except ValueError as error:
        raise CheckpointError(f"its metadata cannot be read ({root_cause(error)})") from None


def _parse_shape_dtype(text: str) -> jax.ShapeDtypeStruct:
    """Parses a shape and dtype from a text such as `float32[12,64]`."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size), jax.numpy.dtype(dtype))


def _open_array(
    directory: Bucket, layout: Mapping[str, Any], name: str, like: jax.ShapeDtypeStruct, ts_context: Any
) -> Any:
    """Opens an array. This needs no request, because the record contains its shape, dtype and chunk shape."""
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        # Objects are never overwritten.
        "recheck_cached_data": False,
        "kvstore": directory.spec(f"{layout['prefix']}/{name}"),
        "metadata": {
            "shape": list(like.shape),
            "data_type": str(like.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout["chunks"][name]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
        # Without this option, an array of zeros would not be stored, and could not be distinguished from a lost one.
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, open=True, assume_metadata=True, context=ts_context).result()


def _chunk_shape(x: jax.Array) -> list[int]:
    """Returns the chunk shape of an array. A chunk is a shard or an equal part of one, so processes share no chunks."""
    shape = list(x.sharding.shard_shape(x.shape))
    axis = 0
    while axis < len(shape) and np.prod(shape) * x.dtype.itemsize > _CHUNK_BYTES:
        row_bytes = int(np.prod(shape[axis + 1 :])) * x.dtype.itemsize
        limit = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
        shape[axis] = next(size for size in range(min(limit, shape[axis]), 0, -1) if shape[axis] % size == 0)
        axis += 1
    return [max(size, 1) for size in shape]


def _local_shards(arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Yields copies of the shards that this process writes.

    These are the shards with replica ID 0, so that every shard is written once.
    """
    shards = [(name, shard) for name, x in arrays.items() for shard in x.addressable_shards if shard.replica_id == 0]
    for _, shard in shards:
        shard.data.copy_to_host_async()
    for name, shard in shards:
        # Copies the shard, because on a CPU the array would share memory that the next step overwrites.
        yield name, shard.index, np.array(shard.data, copy=True)


def _request_shards(store: Any, like: jax.ShapeDtypeStruct) -> dict[Any, Any]:
    """Requests each shard that the devices of this process need once, and returns the futures by index."""
    assert like.sharding is not None
    indices: Iterable[Any] = like.sharding.addressable_devices_indices_map(like.shape).values()
    unique = {_index_key(index, like.shape): index for index in indices}
    return {key: store[index].read() for key, index in unique.items()}


def _index_key(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape, strict=True))
