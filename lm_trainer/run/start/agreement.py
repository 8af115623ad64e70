"""Checks that the processes of a run agree on configuration, data, code, packages, devices and compiled programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.processes import gather_texts
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.environment import describe_environment, environment_differences
from lm_trainer.run.weights.saved_state import Fingerprint

_PER_PROCESS_KEYS = ("trainer.distributed.", "trainer.ray.", "trainer.tracker", "trainer.jax_compilation_cache_dir")
"""Prefixes of keys that may differ between processes. Trackers may differ because only the first process has any."""
_CACHE = "cache_dir"
"""Name of the keys for cache directories of data sets. They may differ, because caches may be on local disks."""


def check_agreement(config: Config) -> list[str]:
    """Compares the configurations and environments of the processes of a run.

    All processes must call this function, which waits for the others.

    Args:
        config: complete configuration of this process.

    Returns:
        Warnings for the user; an empty list for a single process.

    Raises:
        UserError: in every process, if their configurations differ.
    """
    if jax.process_count() == 1:
        return []
    local_environment = {**describe_environment(), "devices": [device.device_kind for device in jax.local_devices()]}
    local = {"config": without_credentials(config.model_dump(mode="json")), "environment": local_environment}
    processes = [json.loads(text) for text in gather_texts(json.dumps(local))]
    if differences := list(_config_differences([process["config"] for process in processes])):
        raise UserError(
            "the processes of this run have different configurations:\n  "
            + "\n  ".join(differences)
            + "\nGive all of them the same file and the same settings; only trainer.distributed may differ"
        )
    first = processes[0]["environment"]
    differing = ((i, environment_differences(first, process["environment"])) for i, process in enumerate(processes))
    return [
        f"warning: process {i} runs on something else than process 0 does, so bits may depend on where a microbatch "
        f"is computed: {', '.join(differences)}"
        for i, differences in differing
        if differences
    ]


def check_data_agreement(fingerprint: Fingerprint) -> list[str]:
    """Compares the data of all processes. All of them must call this function.

    Args:
        fingerprint: data fingerprint of this process.

    Returns:
        A warning if the data may differ; otherwise an empty list.

    Raises:
        UserError: in every process, if the data differ.
    """
    local = {"tokens": fingerprint} if isinstance(fingerprint, str) else dict(fingerprint)
    fingerprints = [json.loads(text) for text in gather_texts(json.dumps(local))]
    key = next((name for name in ("tokens", "sources") if all(name in f for f in fingerprints)), None)
    if key is None or len({f[key] for f in fingerprints}) == 1:
        return []
    values = _list_processes_by_value([f[key] for f in fingerprints])
    if key == "tokens":
        raise UserError(
            f"the processes of this run read different data (fingerprint {values}). Give all of them the same text, "
            "tokenizer and cache, on a disk that all see or as copies"
        )
    return [
        f"warning: files of text differ in name, size or time between the processes ({values}): make sure that they "
        "are copies of one another, or run `lmt data build` first, after which the tokens themselves are compared"
    ]


def check_program_agreement(program: str, compute_graph_hash: Callable[[], str]) -> list[str]:
    """Compares the hash of a compiled program among all processes. All of them must call this function.

    Args:
        program: hash of the text of the program.
        compute_graph_hash: computes the hash of the graph of the program, which is compared if the texts differ.

    Returns:
        A warning if the hashes differ; otherwise an empty list.
    """
    programs = gather_texts(program)
    if len({*programs}) == 1 or len({*gather_texts(compute_graph_hash())}) == 1:
        return []
    return [
        f"warning: the processes run different programs ({_list_processes_by_value(programs)}), so bits may depend on "
        "where a microbatch is computed. GPUs choose kernels by timing them: let trainer.jax_compilation_cache_dir be "
        "a directory that all processes see, from which they read those of process 0"
    ]


def _config_differences(configs: Sequence[dict[str, Any]]) -> Iterator[str]:
    changed = [changed_keys(configs[0], config) for config in configs]
    firsts = {key: first for changes in changed for key, (first, _) in changes.items()}
    reported = [key for key in firsts if not key.startswith(_PER_PROCESS_KEYS) and key.rsplit(".", 1)[-1] != _CACHE]
    # If it is not set, `trainer.id` is derived from the other keys, so reporting that it differs would be redundant.
    for key in [key for key in reported if key != "trainer.id"] or reported:
        values = [changes[key][1] if key in changes else firsts[key] for changes in changed]
        yield f"{key}: {_list_processes_by_value([json.dumps(value) for value in values])}"


def _list_processes_by_value(values: Sequence[str]) -> str:
    """Lists the processes with each value, for example as `0.1 in process 0, 0.2 in processes 1, 2`."""
    processes_by_value: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes_by_value.setdefault(value, []).append(process)
    return ", ".join(
        f"{value} in process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
        for value, processes in processes_by_value.items()
    )
