"""All that this package uses of JAX that is not public, and that a release of JAX may therefore change.

`tests/core/test_jax_internals.py` checks each part by name, and that no other module imports a private one.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
import zstandard
from jax._src import cache_key, compilation_cache, distributed
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental import serialize_executable
from jaxlib import xla_client
from jaxlib.mlir import ir

from lm_trainer.core.jax_types import Device
from lm_trainer.core.nested_collectives import has_nested_collectives


def cudnn_version() -> int | None:
    """Returns the version of cuDNN that JAX uses, such as 91801 for 9.18.1; None without cuDNN."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())


class CoordinationClient(Protocol):
    """Client of the coordination service of `jax.distributed`, a store of texts on the host of process 0."""

    def key_value_set(self, key: str, value: str) -> None:
        """Stores the value of a key that has none yet."""

    def key_value_delete(self, key: str) -> None:
        """Removes a key, or all keys in a directory, whose name ends with a slash."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Returns the value of a key once it has one."""
        ...


def coordination_client() -> CoordinationClient | None:
    """Returns this process's client; None unless `jax.distributed` has connected the processes."""
    return distributed.global_state.client


def attend_to_documents(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    offsets_BM: jax.Array,
    lengths_BM: jax.Array,
    *,
    window: int | None,
) -> jax.Array:
    """Computes causal attention inside each of several documents in a row with cuDNN, [B, S, N, H].

    `jax.nn.dot_product_attention` takes one length for each row.

    Args:
        q_BSNH: queries, already scaled.
        k_BSKH: keys.
        v_BSKH: values.
        offsets_BM: int32 [B, M + 1], the first position of each document in its row; -1 after the last one.
        lengths_BM: int32 [B, M], the number of positions of each document; -1 after the last one.
        window: number of positions visible to a query, including its own; None: all earlier ones.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    o_BSNH: Any = dot_product_attention(
        q_BSNH,
        k_BSKH,
        v_BSKH,
        q_seqlen=lengths_BM,
        kv_seqlen=lengths_BM,
        q_offsets=offsets_BM,
        kv_offsets=offsets_BM,
        scale=1.0,
        mask_type=MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )
    return o_BSNH


def add_checksums_to_cached_programs() -> None:
    """Makes JAX store compiled programs in its cache with a checksum, which zstd compares whenever it reads one.

    JAX itself stores none, so a flipped bit of a file could become a part of the machine code.
    """

    def compress(executable: bytes) -> bytes:
        # All of zstd's packages, also Python 3.14's own, read such a file.
        return zstandard.ZstdCompressor(write_checksum=True).compress(executable)

    compilation_cache.compress_executable = compress


def load_on_device_sets(
    compiled: jax.stages.Compiled, devices: Sequence[Device], device_sets: Sequence[Sequence[Device]]
) -> Iterator[jax.stages.Compiled]:
    """Loads machine code compiled for `devices` on other device sets, in a fraction of the compilation time."""
    content, inputs, outputs = serialize_executable.serialize(compiled)
    for to in device_sets:
        executable, args_info, no_kwargs = _DeviceRemapper(content, devices, to).load()
        # Same as `serialize_executable.deserialize_and_load`, which supports only the devices that the code was
        # compiled for.
        yield jax.stages.Compiled(executable.load(), [], inputs.unflatten(args_info), outputs, no_kwargs=no_kwargs)


class _DeviceRemapper(serialize_executable._JaxPjrtUnpickler):
    """JAX's unpickler of executables, which finds devices by id. This subclass maps the ids to other devices."""

    def __init__(self, content: bytes, devices: Sequence[Device], to: Sequence[Device]):
        super().__init__(io.BytesIO(content), to[0].client, list(to))
        self.devices_by_id = {source.id: target for source, target in zip(devices, to, strict=True)}
        # The serialized program contains its devices too; without these options, XLA would load it for those devices.
        self._options = xla_client.CompileOptions()
        self._options.num_replicas, self._options.num_partitions = 1, len(to)
        self._options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in to]]))

    def persistent_load(self, pid: tuple[object, ...]) -> object:
        """Resolves persistent ids: `("exec", program)`, `("device", id)` and the like."""
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)


def configure_custom_calls(
    lowered: jax.stages.Lowered, selected: Callable[[str], bool], configure: Callable[[dict[str, Any]], None]
) -> None:
    """Changes the configuration of custom calls in a program that is not compiled yet.

    Args:
        lowered: the program, which is changed in place.
        selected: returns true for the targets of the calls to change.
        configure: changes the configuration of a call, a JSON object.
    """

    def change(attribute: ir.Attribute) -> ir.Attribute:
        config = json.loads(ir.StringAttr(attribute).value)
        configure(config)
        return ir.StringAttr.get(json.dumps(config))

    _change_custom_calls(lowered, selected, change)


def remove_kernel_locations(lowered: jax.stages.Lowered, target: str) -> None:
    """Removes the names of source files, and the lines, from the Triton kernels in a program that is not compiled yet.

    They would make the program's hash depend on the directory of this package.

    Args:
        lowered: the program, which is changed in place.
        target: target of the custom calls that contain kernels.
    """

    def change(attribute: ir.Attribute) -> ir.Attribute:
        from jax._src.pallas.triton import lowering

        fields = {field.name: field.attr for field in ir.DictAttr(attribute)}
        # The context of the program does not know the operations of kernels.
        with lowering._new_ir_context():
            kernel = ir.Module.parse(ir.StringAttr(fields["ir"]).value_bytes)
            text = str(kernel.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))
        return ir.DictAttr.get({**fields, "ir": ir.StringAttr.get(text)})

    _change_custom_calls(lowered, lambda name: name == target, change)


def _change_custom_calls(
    lowered: jax.stages.Lowered, selected: Callable[[str], bool], change: Callable[[ir.Attribute], ir.Attribute]
) -> None:
    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if selected(target):
                # A configuration that is no string is in the second attribute, and the first one may be empty.
                attributes, names = operation.attributes, ("backend_config", "mhlo.backend_config")
                key = next(name for name in names if name in attributes and str(attributes[name]) != '""')
                with operation.context:
                    attributes[key] = change(attributes[key])
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    # This module is the one that will be compiled, not a copy of it.
    module.operation.walk(visit)


_hash_compile_options = cache_key._hash_serialized_compile_options


def _hash_compile_options_without_paths(hash_obj: Any, options: Any, strip_device_assignment: bool = False) -> None:
    options = copy.deepcopy(options)
    options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir = ""
    options.executable_build_options.debug_options.xla_gpu_kernel_cache_file = ""
    _hash_compile_options(hash_obj, options, strip_device_assignment)


def use_keys_without_paths() -> None:
    """Makes the keys of compiled programs independent of the directory of JAX's compilation cache.

    XLA stores its kernel choices in the same directory, whose path JAX includes in the keys.
    """
    cache_key._hash_serialized_compile_options = _hash_compile_options_without_paths


_read_program = compilation_cache.get_executable_and_time


def _read_program_that_cannot_hang(
    key: str, options: Any, backend: Any, devices: Any, *more: Any
) -> tuple[Any | None, int | None]:
    program, seconds = _read_program(key, options, backend, devices, *more)
    if program is None or backend.platform != "cpu" or len(devices) == 1:
        return program, seconds
    may_hang = any(has_nested_collectives(module.to_string()) for module in program.hlo_modules())
    return (None, None) if may_hang else (program, seconds)


def compile_nested_collectives_again() -> None:
    """Makes JAX compile programs with nested collectives for CPUs at every start, instead of reading them.

    See `lm_trainer.core.nested_collectives`.
    """
    compilation_cache.get_executable_and_time = _read_program_that_cannot_hang


class ProgramStore(Protocol):
    """Serialized programs by key, in the format of JAX's compilation cache. Called from several threads."""

    def get(self, key: str) -> bytes | None:
        """Returns a program; None if the store does not have it."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Stores a program. Replaces a program with the same key, which JAX could not load."""
        ...


@contextmanager
def compile_through(store: ProgramStore) -> Iterator[None]:
    """Returns a context in which JAX looks for programs in `store` first, and then in its compilation cache.

    In this context, the store also receives every program that JAX reads from the cache or writes to it.
    """
    open_cache = compilation_cache.get_file_cache

    def open_both(path: str) -> tuple[CacheInterface, str] | None:
        opened = open_cache(path)
        return None if opened is None else (_CacheWithStore(store, opened[0]), opened[1])

    compilation_cache.get_file_cache = open_both
    # JAX opens the cache only once.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        compilation_cache.get_file_cache = open_cache
        compilation_cache.reset_cache()


class _CacheWithStore(CacheInterface):
    """JAX's interface of a compilation cache."""

    def __init__(self, store: ProgramStore, cache: CacheInterface):
        self._store, self._cache, self._path = store, cache, cache._path

    def get(self, key: str) -> bytes | None:
        content = self._store.get(key)
        if content is None and (content := self._cache.get(key)) is not None:
            self._store.put(key, content)
        return content

    def put(self, key: str, value: bytes) -> None:
        self._store.put(key, value)
        self._cache.put(key, value)
