"""Builds caches on Ray, with one task per shard. Produces the same bytes as the other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.ray_cluster import QUIET, join_cluster
from lm_trainer.core.runtime import keep_freed_memory
from lm_trainer.data.tokenize.process_pool import THREAD_VARIABLES
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenize.shard_reader import ShardJob
from lm_trainer.data.tokenize.shard_writer import write_shard

_TICK_SECONDS = 0.2


def run_on_ray(jobs: Sequence[ShardJob], config: RayConfig, tick: Callable[[], None]) -> None:
    """Runs every job as a Ray task, and calls `tick` in this process meanwhile.

    The first failure cancels the other tasks. Committed parts are kept. A cluster started by this call is shut down
    at the end.

    Raises:
        UserError: if Ray is not installed, or no cluster is running.
        MachineError: if a task died.
    """
    ray = _import_ray()
    # If the caller has already joined a cluster, leaving it is up to the caller.
    started = not ray.is_initialized()
    if started:
        _connect(ray, config)
    try:
        _run_all(ray, jobs, tick)
    finally:
        if started:
            ray.shutdown()


def _run_all(ray: ModuleType, jobs: Sequence[ShardJob], tick: Callable[[], None]) -> None:
    # One thread per task, since every core runs a task.
    threads = dict.fromkeys(THREAD_VARIABLES, "1")
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": threads})(_build)
    waiting = [task.remote(job) for job in jobs]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_TICK_SECONDS)
            ray.get(done)
            tick()
    except ray.exceptions.RayTaskError as error:
        # Raises the original error of the task, as a local worker process would.
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise MachineError(
            f"a task that tokenises data was lost: {error}. What was built is kept; start again to go on"
        ) from None
    finally:
        # Forced, since a task that waits for a server would not notice a normal cancellation.
        for task_ref in waiting:
            ray.cancel(task_ref, force=True)


def _build(job: ShardJob) -> None:
    keep_freed_memory()
    write_shard(job)


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise UserError("building on a cluster needs Ray; run: pip install ray, or leave trainer.ray out") from None
    return ray


def _connect(ray: ModuleType, config: RayConfig) -> None:
    if config.address is None and config.auto_start_cluster:
        local = {} if config.start_workers else {"num_cpus": 0}
        ray.init(address="local", include_dashboard=False, **local, **QUIET)
        return
    advice = "Set trainer.ray.address to one that runs, or trainer.ray.auto_start_cluster: true to start one here"
    join_cluster(ray, config.address or "auto", advice)
