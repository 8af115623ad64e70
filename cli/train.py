"""`lmt train`: trains a model from a YAML file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_run_config
from cli.out_of_memory import explain_out_of_memory

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig


def train(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration and devices, print the plan of the run, and exit.")
    ] = False,
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change",
            help="Resume a run although its configuration or data have changed, and record the differences.",
        ),
    ] = False,
) -> None:
    """Train a model; repeat the command to resume the run where it stopped.

    Exit codes: 0 done; 1 crash; 2 invalid configuration; 3 non-finite loss; 4 out of memory; 75 to be restarted:
    stopped by a signal after everything was saved, or by the watchdog; 76 stopped by the file stop-after-save after
    everything was saved; 77 devices computed different results (trainer.cross_check), after everything was saved.

    Examples:
        lmt train configs/gpt2_nano.yaml

        lmt train configs/gpt2_nano.yaml trainer.num_train_steps=1000 --optimizer.learning_rate 1e-3
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    tuned = prepare_process()
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.run.dry_run import dry_run as plan

    if dry_run:
        for line in plan(run, name=config.stem):
            clean.echo(line)
        return
    train_to_end(run, config, overrides or [], tuned, allow_config_change=allow_config_change)


def train_to_end(
    run: "RunConfig",
    config: Path,
    overrides: list[str],
    notes: list[str],
    *,
    allow_config_change: bool = False,
    until: int | None = None,
) -> None:
    """Trains a run, and prints its progress and summary.

    Args:
        run: configuration of the run.
        config: the file of the configuration.
        overrides: settings that override the file.
        notes: notes to print first.
        allow_config_change: continue a run that was started with another configuration or other data.
        until: step after which to end the run; None means `trainer.num_train_steps`.
    """
    from lm_trainer.health.power_off import shut_down_at_exit
    from lm_trainer.parallel.processes import is_lead
    from lm_trainer.run.train import train as run_training
    from lm_trainer.trackers import Progress

    # Registered before the run starts, so that it also applies after a crash.
    shut_down_at_exit(run.trainer.shutdown_at_exit)
    with (
        explain_out_of_memory(run, config, overrides),
        Progress(until or run.trainer.num_train_steps) as progress,
    ):
        for note in notes:
            progress.note(note)
        summary = run_training(
            run, name=config.stem, progress=progress, allow_config_change=allow_config_change, until=until
        )
    for line in summary.lines() if is_lead() else ():
        clean.echo(line)
