"""`lmt train`: the run, from a YAML file to a trained model."""

from typing import Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_run_config
from cli.out_of_memory import explained_out_of_memory


def train(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration and the devices, say what would run, and stop.")
    ] = False,
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change",
            help="Go on with a run whose configuration or data differ from what it was begun with, and write down how.",
        ),
    ] = False,
) -> None:
    """Train a model; the same command again resumes the run where it stopped.

    Exit codes: 0 done, 1 crash, 2 the configuration, 3 the loss was not finite, 4 out of memory, 75 start it again:
    stopped by a signal with all saved, or by the watchdog; 76 stopped by the file stop-after-save, with all saved.

    Examples:
        lmt train configs/gpt2_nano.yaml

        lmt train configs/gpt2_nano.yaml trainer.num_train_steps=1000 --optimizer.learning_rate 1e-3
    """
    from lm_trainer.core.runtime import prepare_process

    # Before anything imports jax, whose allocator and threads it sets.
    tuned = prepare_process()
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.health.power_off import shut_down_at_exit
    from lm_trainer.parallel.processes import is_lead
    from lm_trainer.run.dry_run import dry_run as plan
    from lm_trainer.run.train import train as run_training
    from lm_trainer.trackers import Progress

    if dry_run:
        for line in plan(run, name=config.stem):
            clean.echo(line)
        return
    # Arranged before the run starts, so that it holds for a crash as well.
    shut_down_at_exit(run.trainer.shutdown_at_exit)
    with (
        explained_out_of_memory(run, config, overrides or []),
        Progress(run.trainer.num_train_steps) as progress,
    ):
        for change in tuned:
            progress.note(change)
        summary = run_training(run, name=config.stem, progress=progress, allow_config_change=allow_config_change)
    for line in summary.lines() if is_lead() else ():
        clean.echo(line)
