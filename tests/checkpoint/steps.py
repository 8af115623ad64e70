"""Steps to save, and what holds of every place where checkpoints are kept."""

from __future__ import annotations

from datetime import timedelta

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery
from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.bucket import StoragePath
from lm_trainer.parallel.mesh import MeshShape, build_mesh

NEVER = CheckpointerConfig(save_interval=timedelta(days=1), keep=(KeepEvery(every=10**9),))


def sharding_over(devices: int) -> NamedSharding:
    return NamedSharding(build_mesh(MeshShape(), jax.devices()[:devices]), PartitionSpec("data"))


def arrays(seed: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "params.w": jax.device_put(rng.standard_normal((64, 32)).astype(np.float32), sharding),
        "params.half": jax.device_put(rng.standard_normal(8).astype(jax.numpy.bfloat16), sharding),
        "opt_state.count": jax.device_put(np.int32(seed), NamedSharding(sharding.mesh, PartitionSpec())),
    }


def abstract_arrays(sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays(0, sharding).items()
    }


def save_steps(directory: StoragePath, *steps: int, config: CheckpointerConfig = NEVER) -> CheckpointStore:
    store = CheckpointStore(directory, config)
    for step in steps:
        store.save(step, arrays(step, sharding_over(8)), {"note": f"step {step}"})
    store.wait()
    return store


def check_that_a_step_comes_back(directory: StoragePath, devices: int) -> None:
    save_steps(directory, 3).close()
    store = CheckpointStore(directory, NEVER)
    restored = store.restore(abstract_arrays(sharding_over(devices)))
    store.close()
    assert restored is not None
    assert (restored.step, restored.record["note"]) == (3, "step 3")
    for name, x in arrays(3, sharding_over(1)).items():
        assert np.asarray(restored.arrays[name]).tobytes() == np.asarray(x).tobytes()
        assert len(restored.arrays[name].sharding.device_set) == devices


def check_that_a_save_is_a_snapshot(directory: StoragePath, host_memory_gb: float | None) -> None:
    store = CheckpointStore(directory, NEVER.model_copy(update={"host_memory_gb": host_memory_gb}))
    values = arrays(1, sharding_over(8))
    expected = np.asarray(values["params.w"]).copy()
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    store.save(1, values, {})
    jax.block_until_ready(overwrite(values["params.w"]))
    store.wait()
    restored = store.restore(abstract_arrays(sharding_over(8)))
    store.close()
    assert restored is not None
    np.testing.assert_array_equal(np.asarray(restored.arrays["params.w"]), expected)
