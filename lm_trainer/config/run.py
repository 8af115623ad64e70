"""`RunConfig`: the whole run as one validated value, and what of it decides the run's numbers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import model_validator

from lm_trainer.config.trainer import TrainerConfig
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.steps import TokenSchedule
from lm_trainer.data import DataConfig
from lm_trainer.models import AnyModel, Gpt2Config
from lm_trainer.optim import AdamConfig, AnyOptimizer
from lm_trainer.optim.schedule import Schedule

_OPERATIONAL = {
    "trainer": frozenset(
        {
            "id",
            "steps_per_eval",
            "max_eval_batches",
            "per_device_eval_parallelism",
            "steps_per_log",
            "sample_tokens",
            "log_dir",
            "tracker",
            "watch",
            "watchdog",
            "profiler",
            "profiler_start_step",
            "profiler_num_steps",
            "profiler_perfetto_link",
            "log_jaxprs",
            "log_xla_hlo",
            "crash_on_nan",
            "crash_on_inf",
            "checkpointer",
            "load_checkpoint",
            "load_checkpoint_path",
            "batch_axis",
            "fsdp_axis",
            "axis_resources",
            "parameter_axis_resources",
            "replica_ici_axis_size",
            "replica_dcn_axis_size",
            "jax_compilation_cache_dir",
            "require_accelerator",
            "allow_partial_checkpoint",
            "distributed",
            "ray",
            "shutdown_at_exit",
        }
    ),
    "data": frozenset({"cache_dir", "num_workers", "stream", "tokenizer_backend"}),
}
"""Keys that may change between two attempts at one run, because no weight depends on them."""

_OPERATIONAL_JAX = ("jax_num_cpu_devices", "jax_platforms", "jax_debug", "jax_log", "jax_persistent", "jax_compilation")
"""Prefixes of JAX settings that change no number."""


class RunConfig(Config):
    """A run is a function of this value, of the data that it names, and of the code."""

    model: AnyModel = Gpt2Config()
    """What is trained: a family of models and its sizes."""
    data: DataConfig = DataConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: AnyOptimizer = AdamConfig()
    """How gradients become new weights, and the learning rate over time."""

    def learning_rate(self) -> Schedule:
        """The learning rate as a function of the step, from 0."""
        tokens = TokenSchedule(self.trainer.batch_schedule, self.model.seq_len)
        return self.optimizer.schedule(self.trainer.num_train_steps, tokens)

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunConfig:
        try:
            self.learning_rate()
        except ValueError as error:
            raise ValueError(f"optimizer: {error}") from None
        return self


def numeric_identity(config: Config) -> dict[str, Any]:
    """The part of a configuration that decides the run's numbers, as plain data, without credentials in URLs."""
    plain = config.model_dump(mode="json")
    jax_config = plain["trainer"]["jax_config"]
    plain["trainer"]["jax_config"] = {k: v for k, v in jax_config.items() if not k.startswith(_OPERATIONAL_JAX)}
    sections = {
        section: {k: v for k, v in values.items() if k not in _OPERATIONAL.get(section, ())}
        for section, values in plain.items()
    }
    # A cut over the model axis changes the additions inside the model; over the other axes it changes nothing.
    shared = plain["trainer"]["axis_resources"]
    sections["trainer"]["axis_resources"] = {axis: over for axis, over in shared.items() if "model" in over}
    return without_credentials(sections)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits that two configurations share when they describe the same numbers."""
    text = json.dumps(numeric_identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def numeric_differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each key in which two results of `numeric_identity` differ."""
    lines = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += numeric_differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: was {json.dumps(a)}, now {json.dumps(b)}")
    return lines
