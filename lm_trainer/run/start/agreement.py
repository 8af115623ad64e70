"""Agreement of the processes of a run on configuration, data, code, packages, devices and compiled programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.processes import gather_texts
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.environment import environment, environment_differences
from lm_trainer.run.weights.saved_state import Fingerprint

_OF_EACH = ("trainer.distributed.", "trainer.ray.", "trainer.tracker", "trainer.jax_compilation_cache_dir")
"""Keys that each process may have of its own. Only the first one has trackers."""
_CACHE = "cache_dir"
"""Name of keys of data whose directory may be on a disk of the process's own."""


def check_agreement(config: Config) -> list[str]:
    """Compares what the processes of a run were started with.

    Waits for all of them, each of which must call it.

    Args:
        config: of this process, as a whole.

    Returns:
        Warnings for the person at the terminal, none where there is one process.

    Raises:
        UserError: in every process, where their configurations differ.
    """
    if jax.process_count() == 1:
        return []
    here = {**environment(), "devices": [device.device_kind for device in jax.local_devices()]}
    mine = {"config": without_credentials(config.model_dump(mode="json")), "environment": here}
    everyone = [json.loads(text) for text in gather_texts(json.dumps(mine))]
    if differences := list(_differences([each["config"] for each in everyone])):
        raise UserError(
            "the processes of this run have different configurations:\n  "
            + "\n  ".join(differences)
            + "\nGive all of them the same file and the same settings; only trainer.distributed may differ"
        )
    first = everyone[0]["environment"]
    found = ((i, environment_differences(first, each["environment"])) for i, each in enumerate(everyone))
    return [
        f"warning: process {i} runs on something else than process 0 does, so bits may depend on where a microbatch "
        f"is computed: {', '.join(differences)}"
        for i, differences in found
        if differences
    ]


def check_data(fingerprint: Fingerprint) -> list[str]:
    """Compares the data of all processes, each of which must call it.

    Args:
        fingerprint: of the data of this process.

    Returns:
        A warning where they may differ.

    Raises:
        UserError: in every process, where they do differ.
    """
    mine = {"tokens": fingerprint} if isinstance(fingerprint, str) else dict(fingerprint)
    everyone = [json.loads(text) for text in gather_texts(json.dumps(mine))]
    known = next((name for name in ("tokens", "sources") if all(name in each for each in everyone)), None)
    if known is None or len({each[known] for each in everyone}) == 1:
        return []
    values = _by_value([each[known] for each in everyone])
    if known == "tokens":
        raise UserError(
            f"the processes of this run read different data (fingerprint {values}). Give all of them the same text, "
            "tokenizer and cache, on a disk that all see or as copies"
        )
    return [
        f"warning: files of text differ in name, size or time between the processes ({values}): make sure that they "
        "are copies of one another, or run `lmt data build` first, after which the tokens themselves are compared"
    ]


def check_programs(program: str) -> list[str]:
    """Compares the hash of a compiled program with that of all other processes, each of which must call it.

    Returns:
        A warning where they differ.
    """
    programs = gather_texts(program)
    if len({*programs}) == 1:
        return []
    return [
        f"warning: the processes run different programs ({_by_value(programs)}), so bits may depend on where a "
        "microbatch is computed. GPUs choose kernels by timing them: let trainer.jax_compilation_cache_dir be a "
        "directory that all processes see, from which they read those of process 0"
    ]


def _differences(configs: Sequence[dict[str, Any]]) -> Iterator[str]:
    changed = [changed_keys(configs[0], config) for config in configs]
    firsts = {key: first for each in changed for key, (first, _) in each.items()}
    told = [key for key in firsts if not key.startswith(_OF_EACH) and key.rsplit(".", 1)[-1] != _CACHE]
    # Made of the numbers, unless it is given: one more difference that follows from the others.
    for key in [key for key in told if key != "trainer.id"] or told:
        values = [each[key][1] if key in each else firsts[key] for each in changed]
        yield f"{key}: {_by_value([json.dumps(value) for value in values])}"


def _by_value(values: Sequence[str]) -> str:
    """Says which processes have which value: `0.1 in process 0, 0.2 in processes 1, 2`."""
    where: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        where.setdefault(value, []).append(process)
    return ", ".join(
        f"{value} in process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
        for value, processes in where.items()
    )
