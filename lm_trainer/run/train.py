"""Implements `lmt train`: performs a run, from its configuration to its summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.batch import Batch
from lm_trainer.core.bucket_files import staging_directory
from lm_trainer.core.data_content import DataContent
from lm_trainer.core.errors import UserError
from lm_trainer.data import open_data
from lm_trainer.data.dataset import Data
from lm_trainer.data.tokenize.progress import BuildProgress
from lm_trainer.export.huggingface import check_exportable
from lm_trainer.export.settings import HfSettings
from lm_trainer.models import DecoderConfig
from lm_trainer.nn.nf4 import num_weights
from lm_trainer.parallel.processes import is_lead
from lm_trainer.profile.flops import flops_per_token, recomputed_flops_per_token
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.build.gather_memory import plan_for_memory
from lm_trainer.run.build.model import recomputes_layers, teacher_flops, trace_model
from lm_trainer.run.build.setup import TrainingSetup, setup_from_config
from lm_trainer.run.build.startup_notes import recomputation_note, schedule_notes
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.directory import choose_run_id
from lm_trainer.run.sample import draw_sample
from lm_trainer.run.start.attempt import Attempt, open_attempt
from lm_trainer.run.summary import Summary
from lm_trainer.run.training.batches import batches_from
from lm_trainer.run.training.data_notes import BuildWatch, describe_build, row_notes
from lm_trainer.run.training.evaluations import name_eval_sets
from lm_trainer.run.training.hf_exports import HfExports, check_exports
from lm_trainer.run.training.loop import train_to_end
from lm_trainer.run.training.loop_parts import LoopOptions, open_loop
from lm_trainer.run.training.task_evaluation import TaskEvaluation
from lm_trainer.run.training.token_probabilities import TokenProbabilities
from lm_trainer.run.weights.adapters import (
    FROZEN,
    check_pinned_digest,
    describe_num_params,
    find_base_checkpoint,
    training_flops,
)
from lm_trainer.run.weights.frozen_values import attach_frozen_values
from lm_trainer.run.weights.initial_weights import choose_vocab_size
from lm_trainer.run.weights.pretrained import HfStart, find_hf_start, published_model_settings
from lm_trainer.run.weights.reference import find_reference, with_reference_weights
from lm_trainer.run.weights.saved_model import SETTINGS, TOKENIZER, tokenizer_digests
from lm_trainer.run.weights.teacher import find_teacher, resolve_teacher
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress

_LOSS_UNITS: dict[DataContent, str] = {
    "documents": "in nats a token",
    "pairs": "per pair of answers",
    "examples": "per labelled answer",
}


def train(
    config: RunConfig, *, name: str, progress: Progress, allow_config_change: bool = False, until: int | None = None
) -> Summary:
    """Trains until `trainer.num_train_steps`, and resumes from the newest checkpoint of the run if there is one.

    Args:
        config: configuration of the run.
        name: name of the configuration, which is used for the run ID if neither the configuration nor the environment
            sets one.
        progress: progress display in the terminal.
        allow_config_change: continue a run that was started with another configuration or other data.
        until: ends the run after this step, with everything that belongs to the end of a run. The steps are the same as
            without it, and the run can continue later.

    Raises:
        UserError: for anything that the user can fix. Its subclasses are `Preempted` after a stop signal, once
            everything is saved, `NonFiniteError` for a non-finite loss, and `MachineError` for problems such as a full
            disk.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        run = stack.enter_context(
            prepare_run(config, name=name, progress=progress, allow_config_change=allow_config_change)
        )
        config, attempt, data, setup = run.config, run.attempt, run.data, run.setup
        options = LoopOptions(data.fingerprints, run.facts, run.flops_per_token, run.recomputed_flops_per_token)
        options.until = until
        if not data.complete:
            options.build_watch = BuildWatch(config, data, progress)
        if config.hf_save_path is not None:
            exports = HfExports(
                config, attempt.directory.name, progress, data.published_tokenizer, run.hub_name, run.settings
            )
            options.exports = (stack.enter_context(exports),)
        if config.eval_harness is not None:
            options.tasks = TaskEvaluation(config, data.published_tokenizer, attempt.directory.path, run.settings)
        if config.trainer.token_probabilities:
            options.open_tokens = lambda tracker, held_out: TokenProbabilities(
                config, setup, held_out, attempt.directory.path, tracker
            )
        sets = data.validation()
        options.eval_sets = name_eval_sets(sets)
        if not sets:
            progress.note("no validation set (data.validation_urls), so there is no evaluation")
        opened = stack.enter_context(open_loop(attempt, setup, run.state, options))
        loop = opened.parts
        opened.tracker.log_summary(describe_run(run, options.flops_per_token))

        state = train_to_end(loop, run.state, run.batches(until))
        sample = None
        # If the run was already complete, there is no sample.
        if state.step > run.state.step and config.trainer.sample_tokens:
            progress.phase("sampling")
            sample = draw_sample(config, setup, data, state)
        loop.metrics.finish(state.step, sample)
        opened.tracker.log_summary({"data": describe_data(data)})
        return Summary(
            attempt.directory.name,
            attempt.directory.path,
            attempt.directory.checkpoints,
            state.step,
            loop.metrics.train_loss,
            loop.metrics.eval_losses,
            time.monotonic() - started,
            sample,
            takes_audio=config.model.features_shape is not None,
            exports=_is_exportable(config.model),
            gaps=opened.tracker.gaps,
        )


def _is_exportable(model: DecoderConfig) -> bool:
    try:
        check_exportable(model)
    except UserError:
        return False
    return True


def describe_run(run: PreparedRun, flops_per_token: float) -> dict[str, Any]:
    """Returns facts about a run that its configuration does not contain, as plain data."""
    parameters = sum(num_weights(name, x.shape) for name, x in run.setup.model.shapes.items())
    return {"parameters": parameters, "flops_per_token": flops_per_token, "data": describe_data(run.data)}


def describe_data(data: Data) -> dict[str, Any]:
    """Returns the size of the data in tokens, as far as the data has been tokenised."""
    caches = {name: {"tokens": len(cache.stream), "complete": cache.finished} for name, cache in data.caches.items()}
    return {"train_tokens": data.num_train_tokens, "vocabulary": data.tokenizer.vocab_size, "caches": caches}


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its next step: the data is open, training is planned, and the state is on the devices."""

    config: RunConfig
    attempt: Attempt
    data: Data
    setup: TrainingSetup
    state: TrainState
    facts: Mapping[str, Any]
    """JSON values that are saved with every checkpoint."""
    flops_per_token: float
    """Number of FLOPs per token of a training step."""
    recomputed_flops_per_token: float
    """Number of additional FLOPs per token due to rematerialisation."""
    hub_name: str | None
    """Name of the hub repository to which exports are uploaded; None without uploads."""
    settings: HfSettings | None
    """Settings of the published model that the run started from, if any."""

    def batches(self, until: int | None = None) -> Iterator[Batch]:
        """Yields the batches from the next step on, with the rows of this process. `until` is as for `train`."""
        return batches_from(self.setup, self.data, self.state.step, until or self.config.trainer.num_train_steps)


@contextmanager
def prepare_run(
    config: RunConfig, *, name: str, progress: Progress, allow_config_change: bool = False
) -> Iterator[PreparedRun]:
    """Context manager that prepares a run for its next step. The arguments and errors are the same as for `train`.

    All checks that need no data are made before text is tokenised, because tokenisation may take hours.
    """
    name = choose_run_id(config, name)
    config = resolve_teacher(config)
    pretrained = find_hf_start(config, name)
    # The Hugging Face checkpoint may determine the model section, so it is read before planning.
    if pretrained is not None:
        config = pretrained.config
    try:
        config.check_features()
    except ValueError as error:
        raise UserError(str(error)) from None
    trainer = config.trainer.model_copy(update={"id": name})
    with open_attempt(trainer, config, progress, allow_config_change=allow_config_change) as attempt:
        config = _with_recorded_sections(config, attempt)
        hub_name = check_exports(config, name)
        progress.note(f"run {name}, in {attempt.directory.path}")
        for note in pretrained.notes if pretrained else ():
            progress.note(note)
        with closing(open_training_data(config, progress)) as data:
            for note in data.notes:
                progress.note(note)
            yield _build_prepared_run(config, attempt, data, pretrained, hub_name)


def _with_recorded_sections(config: RunConfig, attempt: Attempt) -> RunConfig:
    """Returns the configuration with the keys that a run which continues has from its record."""
    recorded = attempt.directory.config
    assert isinstance(recorded, RunConfig)
    return config.model_copy(update={"trainer": attempt.config, "data": recorded.data, "model": recorded.model})


def _build_prepared_run(
    config: RunConfig, attempt: Attempt, data: Data, pretrained: HfStart | None, hub_name: str | None
) -> PreparedRun:
    """Builds the model for the vocabulary of the data, describes the run to the user, and creates the initial state."""
    if pretrained is None:
        vocab_size = choose_vocab_size(config.trainer, data.tokenizer)
    else:
        vocab_size = pretrained.check_tokenizer(data.tokenizer)
    if vocab_size < data.tokenizer.vocab_size:
        data.limit_ids(vocab_size)
    config, loads = with_resolved_gather(config, vocab_size), attempt.config
    if loads.gathers_by_size and config.trainer.gathers_layers:
        attempt.progress.note(
            "one layer is gathered at a time, because of the size of the model (trainer.gather: auto)"
        )
    model = trace_model(config, vocab_size)
    if pretrained is not None:
        model = pretrained.with_initial_weights(model)
    _report_setup(config, vocab_size, model, data, attempt.progress)
    settings = published_model_settings(config, pretrained, data.published_tokenizer, attempt.directory.checkpoints)
    # The tokenizer is saved with the checkpoints, so that a model can be used without its training data.
    if is_lead():
        with staging_directory(attempt.directory.checkpoints) as directory:
            data.published_tokenizer.save(directory / TOKENIZER)
            if settings is not None:
                settings.write(directory / SETTINGS)
    facts: dict[str, Any] = {"vocab_size": vocab_size, TOKENIZER: tokenizer_digests(data.published_tokenizer)}
    if base := find_base_checkpoint(config, attempt.store):
        # Here `initialize_from` names the frozen base model of the adapter, and not the initial weights of the state.
        model, loads = base.with_initial_weights(model), loads.model_copy(update={"initialize_from": None})
        facts |= base.facts
    model, frozen_facts = _with_frozen_model(config, model, vocab_size, data, attempt)
    facts |= frozen_facts
    setup = plan_for_memory(
        lambda trainer: setup_from_config(config, trainer, model),
        config.trainer,
        example_batch(config, 1, vocab_size),
        attempt.progress.note,
    )
    state = attempt.load_state(setup, setup.init, data.fingerprints, config=loads)
    spec, seq_len = config.model.spec(vocab_size), config.model.seq_len
    recomputed = recomputed_flops_per_token(spec, seq_len, every_layer=recomputes_layers(config.trainer, spec))
    flops = training_flops(flops_per_token(spec, seq_len), model, config.loss) + teacher_flops(config, vocab_size)
    return PreparedRun(config, attempt, data, setup, state, facts, flops, recomputed, hub_name, settings)


def _with_frozen_model(
    config: RunConfig, model: ModelDef, vocab_size: int, data: Data, attempt: Attempt
) -> tuple[ModelDef, dict[str, Any]]:
    """Returns the model with the weights of the reference or teacher of the loss, and facts to save with checkpoints.

    With `loss.precompute`, the rows of `data` get its predictions instead, and the model is returned unchanged.
    """
    reference = find_reference(config, attempt.store, data.tokenizer, vocab_size)
    teacher = find_teacher(config, attempt.store, data.tokenizer, vocab_size)
    facts = {**({} if reference is None else reference.facts), **({} if teacher is None else teacher.facts)}
    if not config.loss.precomputes:
        model = with_reference_weights(model, config, reference)
        return model if teacher is None else teacher.with_weights(model), facts
    source = teacher or reference or model
    digest = attach_frozen_values(config, vocab_size, source.load, data, attempt.progress)
    if config.adapter is None:
        # Otherwise the weights are the base of the adapter, whose digest is saved with the state.
        check_pinned_digest(attempt.store, digest)
        facts[FROZEN] = digest
    return model, facts


def _report_setup(config: RunConfig, vocab_size: int, model: ModelDef, data: Data, progress: Progress) -> None:
    plan = config.trainer.step_plan.microbatches.at(0)
    so_far = "" if data.complete else " so far"
    progress.note(
        f"each line: the loss of the step's own batch {_LOSS_UNITS[config.loss.content]}, the learning rate, the norm "
        "of the gradient, the time of a step, tokens a second, and the time left"
    )
    progress.note(
        f"{describe_num_params(model)}, {data.num_train_tokens:,} training tokens{so_far}, {plan.count} "
        f"microbatches of {plan.rows} x {config.model.seq_len} tokens a step, for at most "
        f"{config.trainer.step_plan.max_devices} devices"
    )
    if so_far:
        progress.note(describe_build(data))
    for note in row_notes(config, data):
        progress.note(note)
    for note in schedule_notes(config):
        progress.note(note)
    if note := recomputation_note(config.trainer, config.model.spec(vocab_size)):
        progress.note(note)


def open_training_data(config: RunConfig, progress: Progress) -> Data:
    """Opens the data of the run. Data without a token cache is tokenised in the background."""

    def on_progress(status: BuildProgress) -> None:
        progress.phase(str(status))

    return open_data(
        config.data,
        seq_len=config.model.seq_len,
        seed=config.trainer.seed,
        on_progress=on_progress,
        # Without an address, Ray would start a cluster that nobody has asked for.
        ray=config.trainer.ray if config.trainer.ray.address else None,
        # Values of a frozen model are stored for complete data only.
        background=not config.loss.precomputes,
    )
