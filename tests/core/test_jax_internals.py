"""The private parts of JAX that are used, each by its name, and the one module that uses them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding

from lm_trainer.core import jax_internals
from lm_trainer.parallel import compile_per_device

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"^\s*(?:from|import) (?:jax\._src|jaxlib)\b|\bserialize_executable\._", re.MULTILINE)

UNKNOWN = (
    f"lm_trainer/core/jax_internals.py uses private parts of JAX, and jax {jax.__version__} has changed one: "
    "read jax.experimental.serialize_executable again and adapt `_DeviceRemapper` and `load_on_device_sets`, or do "
    "not allow this version in pyproject.toml. What changed: "
)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_private_parts_of_jax_have_the_shape_that_is_relied_on() -> None:
    unpickler = getattr(serialize_executable, "_JaxPjrtUnpickler", None)
    assert unpickler is not None, UNKNOWN + "_JaxPjrtUnpickler is gone"
    assert parameters(unpickler.__init__) == ["self", "file", "backend", "execution_devices"], UNKNOWN + "__init__"
    assert parameters(unpickler.persistent_load) == ["self", "pid"], UNKNOWN + "persistent_load"
    device = jax.devices()[1]
    instance = unpickler(io.BytesIO(b""), device.client, [device])
    for name in ("backend", "devices_by_id", "execution_devices"):
        assert hasattr(instance, name), UNKNOWN + f"unpicklers have no {name}"
    assert instance.devices_by_id == {device.id: device}, UNKNOWN + "devices are not looked up by id"
    assert callable(device.client.deserialize_executable), UNKNOWN + "deserialize_executable"
    kernels = importlib.import_module("jax._src.pallas.triton.lowering")
    assert parameters(kernels._new_ir_context) == [], UNKNOWN + "the context of kernels for GPUs"
    arguments = ["self", "executable", "const_args", "args_info", "out_tree", "no_kwargs"]
    assert parameters(jax.stages.Compiled.__init__)[:6] == arguments, UNKNOWN + "jax.stages.Compiled"


def test_the_coordination_service_has_the_methods_that_are_used() -> None:
    client = importlib.import_module("jax._src.lib")._jax.DistributedRuntimeClient
    assert jax_internals.coordination_client() is None, "nothing has connected this process"
    for name in ("key_value_set", "key_value_delete", "blocking_key_value_get"):
        assert hasattr(client, name), UNKNOWN + f"the client of jax.distributed has no {name}"


def test_the_compilation_cache_is_opened_by_the_function_that_is_replaced(tmp_path: Path) -> None:
    module: Any = jax_internals.compilation_cache
    assert parameters(module.get_file_cache) == ["path"], UNKNOWN + "compilation_cache.get_file_cache"
    assert jax_internals.CacheInterface.__abstractmethods__ == {"get", "put"}, UNKNOWN + "CacheInterface"
    hash_options = jax_internals._hash_compile_options
    assert parameters(hash_options) == ["hash_obj", "compile_options_obj", "strip_device_assignment"], UNKNOWN + "keys"
    cache, path = module.get_file_cache(str(tmp_path))
    assert path == str(tmp_path)
    assert hasattr(cache, "_path"), UNKNOWN + "caches have no _path"
    stored: dict[str, bytes] = {}

    class Store:
        def get(self, key: str) -> bytes | None:
            return stored.get(key)

        def put(self, key: str, content: bytes) -> None:
            stored[key] = content

    opened = module.get_file_cache
    with jax_internals.compile_through(Store()):
        assert module.get_file_cache is not opened
        through, _ = module.get_file_cache(str(tmp_path))
        cache.put("older", b"1")
        through.put("newer", b"2")
        assert [through.get(key) for key in ("older", "newer", "none")] == [b"1", b"2", None]
        assert cache.get("newer") == b"2"
    assert stored == {"older": b"1", "newer": b"2"}
    assert module.get_file_cache is opened


def test_executables_are_pickled_with_ids_that_are_resolved_on_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    load = jax_internals._DeviceRemapper.persistent_load

    def noted(self: Any, pid: tuple[Any, ...]) -> Any:
        kinds.append(pid[0])
        return load(self, pid)

    monkeypatch.setattr(jax_internals._DeviceRemapper, "persistent_load", noted)
    devices = jax.devices()[:2]
    shape = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(devices[0]))
    with compile_per_device._without_cache():
        compiled = jax.jit(lambda x: 2 * x).lower(shape).compile()
    list(jax_internals.load_on_device_sets(compiled, devices[:1], [devices[1:]]))
    assert "exec" in kinds, UNKNOWN + "the program is not under the id 'exec'"
    assert {*kinds} <= {"exec", "device", "client"}, UNKNOWN + f"ids {sorted({*kinds})}"


def test_one_module_imports_private_parts_of_jax() -> None:
    sources = [*ROOT.glob("lm_trainer/**/*.py"), *ROOT.glob("cli/**/*.py")]
    users = {str(source.relative_to(ROOT)) for source in sources if PRIVATE.search(source.read_text())}
    assert users == {"lm_trainer/core/jax_internals.py"}


def test_a_flipped_bit_of_a_cached_program_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import compilation_cache

    monkeypatch.setattr(compilation_cache, "compress_executable", compilation_cache.compress_executable)
    program = bytes(range(256)) * 3

    def count_silent(stored: bytes) -> int:
        silent = 0
        for position in range(len(stored)):
            flipped = stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :]
            try:
                silent += compilation_cache.decompress_executable(flipped) not in (b"", program)
            except Exception:  # each library has an error of its own, after which JAX compiles again
                continue
        return silent

    # A copy: other tests in this process may have changed the module of JAX already.
    spec = importlib.util.find_spec(compilation_cache.__name__)
    assert spec is not None
    assert spec.loader is not None
    unchanged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchanged)
    assert count_silent(unchanged.compress_executable(program)) > 100, "JAX stores checksums now"
    jax_internals.add_checksums_to_cached_programs()
    stored = compilation_cache.compress_executable(program)
    assert compilation_cache.decompress_executable(stored) == program
    assert count_silent(stored) == 0
