"""`lmt train`: a run from its configuration to its summary."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.data import open_data
from lm_trainer.data.pipeline import Data
from lm_trainer.data.tokenize.build import BuildProgress
from lm_trainer.generate.engine import generate
from lm_trainer.parallel.processes import is_lead
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.adapters import describe_size, find_base, training_flops
from lm_trainer.run.config import RunConfig
from lm_trainer.run.directory import run_id
from lm_trainer.run.hf_exports import HfExports
from lm_trainer.run.hooks import StepInfo
from lm_trainer.run.pretrained import Start, find_start
from lm_trainer.run.program import Program, loss_function, trace_model
from lm_trainer.run.restore import choose_vocab_size
from lm_trainer.run.trainer import Trainer
from lm_trainer.step.state import TrainState, to_host
from lm_trainer.trackers import Progress


@dataclass
class Summary:
    """What a run came to."""

    name: str
    run_dir: Path
    checkpoints: Path
    step: int
    train_loss: float = math.nan
    """In nats per token, of the last step of this attempt; NaN when there was nothing left to do."""
    eval_losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall time of this attempt."""
    sample: str | None = None
    """A prompt from the validation text and what the model makes of it."""

    def lines(self) -> list[str]:
        """For the end of the terminal's output: what came out, and where everything is."""
        if math.isnan(self.train_loss) and not self.eval_losses:
            result = [f"run {self.name} was complete already, after step {self.step}"]
        else:
            losses = {"train loss": self.train_loss, **{f"{k} loss": v for k, v in self.eval_losses.items()}}
            text = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            result = [f"done: step {self.step}, {text}, in {self.seconds:.0f} s"]
        if self.sample is not None:
            result += ["", "sample:", *(f"  | {line}" for line in self.sample.splitlines()), ""]
        return [
            *result,
            f"  metrics      {self.run_dir / 'metrics.jsonl'}",
            f"  checkpoints  {_shortest(self.checkpoints)}",
            f"  generate     lmt generate {self.name} --prompt TEXT",
            f"  export       lmt export-hf {self.name} OUT",
        ]


def _shortest(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def train(config: RunConfig, *, name: str, progress: Progress, allow_config_change: bool = False) -> Summary:
    """Trains to `trainer.num_train_steps`, going on from the run's newest checkpoint if there is one.

    Args:
        config: the run.
        name: what to call the run if neither the configuration nor the environment names it.
        progress: the person at the terminal.
        allow_config_change: whether to go on with a run that was begun with another configuration or other data.

    Raises:
        UserError: for anything that the user can mend; among them `Preempted` after a stop signal, with everything
            saved, `NonFiniteError` when the loss is not finite, and `MachineError` for a full disk and the like.
    """
    started = time.monotonic()
    config, trainer, start = prepare(config, name=name, progress=progress)
    trainer.allow_config_change = allow_config_change
    with trainer, hf_exports(config, trainer) as exports, closing(Setting.open(config, trainer, start)) as setting:
        state = setting.start()
        if exports:
            save = exports.hook(trainer, setting.data.tokenizer)
            trainer.add_hook(save, every=config.hf_save_steps)
        resumed_at = state.step
        state = trainer.train(state, trainer.data_loader(setting.data))
        recorder, sample = trainer.recorder, None
        if state.step > resumed_at and config.trainer.sample_tokens:
            progress.phase("sampling")
            sample = draw_sample(config, trainer.program, setting.data, state)
        recorder.finish(state.step, sample)
        return Summary(
            trainer.run_id,
            trainer.run_dir,
            trainer.checkpoint_path,
            state.step,
            recorder.train_loss,
            recorder.eval_losses,
            time.monotonic() - started,
            sample,
        )


def prepare(config: RunConfig, *, name: str, progress: Progress) -> tuple[RunConfig, Trainer, Start | None]:
    """The configuration with what it takes from a Hugging Face checkpoint, the trainer, and where the weights begin.

    Raises:
        UserError: when that checkpoint cannot be used.
    """
    named = config.trainer.model_copy(update={"id": run_id(config, name)})
    start = find_start(config, str(named.id))
    config = config if start is None else start.config
    trainer = Trainer(named, config.optimizer, loss_function(config), settings=config, progress=progress)
    return config, trainer, start


@dataclass(frozen=True)
class Setting:
    """What a run reads, and the trainer that it is given to."""

    config: RunConfig
    trainer: Trainer
    data: Data
    hf_start: Start | None = None

    @classmethod
    def open(cls, config: RunConfig, trainer: Trainer, hf_start: Start | None) -> Setting:
        trainer.progress.note(f"run {trainer.run_id}, in {trainer.run_dir}")
        for note in hf_start.notes if hf_start else ():
            trainer.progress.note(note)
        return cls(config, trainer, open_training_data(config, trainer.progress), hf_start)

    def close(self) -> None:
        self.data.close()

    def start(self) -> TrainState:
        """Builds the model for the data's vocabulary, and says what will run."""
        config, trainer, data, progress = self.config, self.trainer, self.data, self.trainer.progress
        if self.hf_start is None:
            vocab_size = choose_vocab_size(config.trainer, data.tokenizer)
        else:
            vocab_size = self.hf_start.check_tokenizer(data.tokenizer)
        spec = config.model.spec(vocab_size)
        trainer.seq_len = config.model.seq_len
        definition = trace_model(config, vocab_size)
        if self.hf_start is not None:
            definition = self.hf_start.attach(definition)
        trainer.flops_per_token = training_flops(flops_per_token(spec, config.model.seq_len), definition)
        plan = config.trainer.microbatches().at(0)
        growing = not data.complete
        so_far = " so far" if growing else ""
        progress.note(
            f"{describe_size(definition)}, {data.num_train_tokens:,} training tokens{so_far}, {plan.count} "
            f"microbatches of {plan.rows} x {config.model.seq_len} tokens a step"
        )
        if growing:
            progress.note(describe_build(data))
            trainer.add_hook(BuildWatch(data, progress))
        if is_lead():
            data.tokenizer.save(trainer.checkpoint_path / "tokenizer")
        trainer.record(vocab_size=vocab_size)
        if base := find_base(config, trainer.store):
            definition = base.attach(definition)
            trainer.config = trainer.config.model_copy(update={"initialize_from": None})
            trainer.record(**base.facts)
        state = trainer.initial_state(model_init=definition, data_fingerprint=data.fingerprints)
        sets = data.validation()
        for name, held_out in sets.items():
            trainer.add_eval_hook(held_out, name if len(sets) > 1 else None)
        if not sets:
            progress.note("no validation set (data.validation_urls), so there is no evaluation")
        return state


def hf_exports(config: RunConfig, trainer: Trainer) -> AbstractContextManager[HfExports | None]:
    """What exports the model while it is trained, where the configuration says so."""
    return nullcontext() if config.hf_save_path is None else HfExports(config, trainer.run_id, trainer.progress)


def draw_sample(config: RunConfig, program: Program, data: Data, state: TrainState) -> str:
    """The start of a held-out document (of the training text, where nothing is held out) and its continuation."""
    sets = list(data.validation().values())
    rows = next(iter(sets[0].batches(1, rows=range(1)))) if sets else next(data.train(1, rows=range(1), num_steps=1))
    prompt = [int(token) for token in rows.tokens[0, : min(32, config.model.seq_len // 4)]]
    tokens = generate(
        program.model.merge(to_host(list(program.weights(state).values())[-1])),
        [prompt],
        max_new_tokens=config.trainer.sample_tokens,
        temperature=0.6,
        top_p=0.9,
        eos_id=data.tokenizer.eos_id,
        seed=config.trainer.seed,
    )[0]
    return data.tokenizer.decode(prompt) + "⟫" + data.tokenizer.decode(tokens)


def open_training_data(config: RunConfig, progress: Progress) -> Data:
    """The data of the run, tokenised first where they are not cached yet."""

    def on_progress(at: BuildProgress) -> None:
        progress.phase(str(at))

    return open_data(
        config.data,
        seq_len=config.model.seq_len,
        seed=config.trainer.seed,
        on_progress=on_progress,
        # Without an address Ray would start a cluster, for which nobody has asked.
        ray=config.trainer.ray if config.trainer.ray.address else None,
        background=True,
    )


def describe_build(data: Data) -> str:
    """What a person should know of a run that begins before all of its text is tokenised."""
    because = data.waits_for_all
    if because is None:
        return "the text is tokenised while the run trains on what is there"
    instead = " (data.shuffle: {type: era} would begin with the first text)" if "shuffle" in because else ""
    return f"the first step waits until all text is tokenised, because of {because}{instead}"


class BuildWatch:
    """A hook that says, once, when all text is tokenised, or that this has failed while nobody waits for it."""

    def __init__(self, data: Data, progress: Progress):
        self._data, self._progress, self._told = data, progress, False

    def __call__(self, info: StepInfo) -> None:
        if self._told:
            return
        try:
            self._data.check_builds()
        except UserError as error:
            self._progress.note(f"warning: {error}. Training goes on with the text that is there")
            self._told = True
        if self._data.complete:
            tokens = self._data.num_train_tokens
            self._progress.note(f"step {info.step}: all text is tokenised, {tokens:,} training tokens")
            self._told = True
