"""Builds the model and the training step of a configuration without a run, for `--dry-run`, plans and benchmarks."""

from __future__ import annotations

from lm_trainer.core.errors import ConfigError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.data.missing_files import find_missing_data
from lm_trainer.nn.attention_dispatch import check_backends
from lm_trainer.parallel.target_platform import Target, compilation_target
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.attention import describe_attention
from lm_trainer.run.build.setup import TrainingSetup, build_setup, check_devices
from lm_trainer.run.build.startup_notes import configuration_warnings, describe_mesh, schedule_notes
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.directory import choose_run_id
from lm_trainer.run.weights.adapters import describe_num_params, training_flops
from lm_trainer.run.weights.pretrained import find_hf_start
from lm_trainer.run.weights.teacher import resolve_teacher
from lm_trainer.run.weights.vocabulary import find_vocabulary

_EMBEDDED = "note: data names no text (train_urls, id or source), so the sources of Python's library are the text"


def dry_run(config: RunConfig, *, name: str) -> list[str]:
    """Describes the run that `train` would start, in lines of text.

    Does not write files, read text or use device memory.

    Raises:
        UserError: if the configuration does not fit the devices, the sharding rules or the initial Hugging Face
            checkpoint, if a file or the tokenizer is missing, or if the requested attention backend is not available
            here.
    """
    run = choose_run_id(config, name)
    config = resolve_teacher(config)
    start = find_hf_start(config, run)
    config = config if start is None else start.config
    if missing := [f"data.{key}: {reason}" for key, reason in find_missing_data(config.data, network=True)]:
        raise ConfigError(missing)
    vocab_size, note = find_vocabulary(config) if start is None else (start.vocab_size, None)
    setup, _ = configure_and_build_setup(config, vocab_size)
    trainer = config.trainer
    spec, seq_len = config.model.spec(vocab_size), config.model.seq_len
    check_attention_backend(config, vocab_size, compilation_target())
    flops = training_flops(flops_per_token(spec, seq_len), setup.model)
    plan, schedule = setup.step.plans.at(0), trainer.batch_schedule
    return [
        f"run {run} on {describe_mesh(setup.sharding.mesh)}",
        *(() if start is None else start.notes),
        *(() if note is None else (f"note: {note}",)),
        *(f"note: {line}" for line in configuration_warnings(trainer, setup.sharding.mesh)),
        *(f"note: {line}" for line in schedule_notes(config)),
        *(() if all(dataset.names_text for dataset in config.data.sets.values()) else (_EMBEDDED,)),
        f"{describe_num_params(setup.model)} with a vocabulary of {vocab_size:,}, {flops:,} FLOPs per token",
        f"{trainer.num_train_steps:,} steps, the first of {schedule.at(0) * seq_len:,} tokens in {plan.count} "
        f"microbatches for at most {trainer.step_plan.max_devices} devices, "
        f"{schedule.rows_before(trainer.num_train_steps) * seq_len:,} tokens in all",
        "nothing was written",
    ]


def check_attention_backend(config: RunConfig, vocab_size: int, target: Target) -> None:
    """Raises `UserError` if `model.attn_backend` is not available on some devices."""
    check_backends(config.model.spec(vocab_size).blocks, describe_attention(config, target))


def configure_and_build_setup(config: RunConfig, vocab_size: int | None = None) -> tuple[TrainingSetup, int]:
    """Configures JAX, and returns the training setup of a configuration and its vocabulary size.

    Args:
        config: configuration of the run.
        vocab_size: number of rows of the token embedding; None determines it with `find_vocabulary`.

    Raises:
        UserError: if the configuration does not fit the devices or the sharding rules, or as for `find_vocabulary`.
    """
    trainer = config.trainer
    configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir, trainer.cpu_threads)
    check_devices(trainer)
    rows = find_vocabulary(config).rows if vocab_size is None else vocab_size
    return build_setup(config, rows), rows
