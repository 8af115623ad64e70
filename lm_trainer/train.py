"""The training loop, readable top to bottom."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.config.run import RunConfig
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import Preempted
from lm_trainer.core.runtime import configure_jax
from lm_trainer.data import open_data
from lm_trainer.data.builder import BuildProgress
from lm_trainer.data.pipeline import Data
from lm_trainer.generate.engine import generate
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.profile.meter import Meter
from lm_trainer.profile.peaks import datasheet_peak
from lm_trainer.program import Program, build_program, check_devices, describe_mesh, promise
from lm_trainer.recorder import Recorder
from lm_trainer.resume import choose_vocab_size, save_state, start_state
from lm_trainer.run_dir import RunDirectory, run_id
from lm_trainer.signals import StopRequest
from lm_trainer.trackers import Progress, open_trackers
from lm_trainer.train_state import TrainState, to_host


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


def train(config: RunConfig, *, name: str, progress: Progress) -> Summary:
    """Trains to `trainer.num_train_steps`, going on from the run's newest checkpoint if there is one.

    Args:
        config: the run.
        name: what to call the run if neither the configuration nor the environment names it.
        progress: the person at the terminal.

    Raises:
        UserError: for anything that the user can mend; among them `Preempted` after a stop signal, with everything
            saved, `NonFiniteError` when the loss is not finite, and `MachineError` for a full disk and the like.
    """
    trainer, started = config.trainer, time.monotonic()
    with StopRequest() as stop, ExitStack() as stack:
        configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir)
        check_devices(config)
        run = stack.enter_context(RunDirectory(config, run_id(config, name)))
        progress.note(f"run {run.name}, in {run.path}")
        data = stack.enter_context(closing(open_training_data(config, progress)))
        program = build_program(config, choose_vocab_size(config, data.tokenizer))
        progress.note(_describe(config, program, data))
        if instead := promise(program.placement.mesh):
            progress.note(instead)
        if not data.validation():
            progress.note("no validation set (data.validation_urls), so there is no evaluation")
        store = stack.enter_context(closing(CheckpointStore(run.checkpoints, trainer.checkpointer)))
        data.tokenizer.save(run.checkpoints / "tokenizer")
        state = start_state(config, program, store, data.fingerprint())
        if state.step:
            progress.note(f"resumed at step {state.step} of {trainer.num_train_steps}")
        trackers = stack.enter_context(
            closing(open_trackers(trainer.trackers, run_dir=run.path, run_id=run.name, resume_step=state.step))
        )
        trackers.log_config(run.config.model_dump(mode="json"))
        recorder = Recorder(config, trackers, progress, _meter(config, program, state.step))
        stop.arm()
        resumed_at = state.step
        state = _Loop(config, run, data, program, store, recorder, progress, stop).run(state)
        sample = None
        if state.step > resumed_at and trainer.sample_tokens:
            progress.phase("sampling")
            sample = draw_sample(config, program, data, state)
        summary = Summary(
            run.name,
            run.path,
            run.checkpoints,
            state.step,
            recorder.train_loss,
            recorder.eval_losses,
            time.monotonic() - started,
            sample,
        )
        recorder.finish(state.step, sample)
        return summary


@dataclass(frozen=True)
class _Loop:
    """The parts that the loop works with."""

    config: RunConfig
    directory: RunDirectory
    data: Data
    program: Program
    store: CheckpointStore
    recorder: Recorder
    progress: Progress
    stop: StopRequest

    def run(self, state: TrainState) -> TrainState:
        """Steps until the end, or until asked to stop."""
        trainer, train_step, recorder = self.config.trainer, self.program.step, self.recorder
        total = trainer.num_train_steps
        batches = self.data.train(
            trainer.train_batch_size,
            rows=train_step.local_rows,
            first_step=state.step,
            num_steps=total - state.step,
        )
        for step in range(state.step, total):
            with recorder.loading():
                rows = next(batches)
            if not train_step.compiled:
                self._compile(rows, step)
            learning_rate = self.program.schedule(step)
            state, metrics = train_step(state, train_step.put(rows), learning_rate)
            recorder.step_done(state.step, metrics, learning_rate)

            last = state.step == total
            if last or state.step % trainer.steps_per_eval == 0:
                self._evaluate(state)
            if last or self.stop.requested or self.store.due(state.step):
                self._save(state)
            if self.stop.requested and not last:
                self.store.wait()
                raise Preempted(
                    f"stopped by {self.stop.requested} after step {state.step}; everything is saved, and the same "
                    f"command goes on from here"
                )
        self.store.wait()
        return state

    def _compile(self, rows: Batch, step: int) -> None:
        self.progress.phase("compiling the training step")
        started = time.monotonic()
        self.program.step.compile(rows)
        fingerprint = self.program.step.lanes.fingerprint()
        before = self.directory.record_attempt(step=step, program=fingerprint)
        self.progress.note(f"compiled in {time.monotonic() - started:.1f} s, program {fingerprint}")
        if step and before and before["program"] != fingerprint:
            self.progress.note(
                f"warning: the attempt before ran the program {before['program']}; from here on, bits may differ from "
                f"those of an uninterrupted run (see what changed in {self.directory.path / 'env.json'})"
            )

    def _evaluate(self, state: TrainState) -> None:
        self.recorder.flush()
        evaluate, losses = self.program.evaluate, {}
        for name, dataset in self.data.validation().items():
            self.progress.phase(f"evaluating on {name}")
            batches = dataset.batches(
                evaluate.batch_size, rows=evaluate.local_rows, max_batches=self.config.trainer.max_eval_batches
            )
            losses[name] = evaluate(state.params, batches)
        if losses:
            self.recorder.evaluated(state.step, losses)

    def _save(self, state: TrainState) -> None:
        self.recorder.flush()
        facts = {"train_loss": self.recorder.train_loss, "eval_losses": self.recorder.eval_losses}
        save_state(self.store, state, self.program, {"data_fingerprint": self.data.fingerprint(), **facts})


def draw_sample(config: RunConfig, program: Program, data: Data, state: TrainState) -> str:
    """The start of a held-out document (of the training text, where nothing is held out) and its continuation."""
    sets = list(data.validation().values())
    rows = next(iter(sets[0].batches(1, rows=range(1)))) if sets else next(data.train(1, rows=range(1), num_steps=1))
    prompt = [int(token) for token in rows.tokens[0, : min(32, config.model.seq_len // 4)]]
    tokens = generate(
        program.model.merge(to_host(state.params)),
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

    return open_data(config.data, seq_len=config.model.seq_len, seed=config.trainer.seed, on_progress=on_progress)


def _meter(config: RunConfig, program: Program, step: int) -> Meter:
    devices = program.placement.mesh.devices
    peak = datasheet_peak(devices.flat[0].device_kind, config.trainer.mp.compute)
    return Meter(
        flops_per_token=flops_per_token(program.spec, config.model.seq_len).training,
        peak_flops=None if peak is None else peak.flops * devices.size,
        total_tokens=step * config.trainer.train_batch_size * config.model.seq_len,
    )


def _describe(config: RunConfig, program: Program, data: Data) -> str:
    plan = program.step.plan
    return (
        f"{parameter_count(program.spec):,} parameters, {data.num_train_tokens:,} training tokens, "
        f"{plan.count} microbatches of {plan.rows} x {config.model.seq_len} tokens a step, "
        f"on {describe_mesh(program.placement.mesh)}"
    )
