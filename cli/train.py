"""`lmt train`: trains a model from a YAML file."""

from typing import Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_run_config
from cli.out_of_memory import explain_out_of_memory


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
    everything was saved.

    Examples:
        lmt train configs/gpt2_nano.yaml

        lmt train configs/gpt2_nano.yaml trainer.num_train_steps=1000 --optimizer.learning_rate 1e-3
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
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
    # Registered before the run starts, so that it also applies after a crash.
    shut_down_at_exit(run.trainer.shutdown_at_exit)
    with (
        explain_out_of_memory(run, config, overrides or []),
        Progress(run.trainer.num_train_steps) as progress,
    ):
        for change in tuned:
            progress.note(change)
        summary = run_training(run, name=config.stem, progress=progress, allow_config_change=allow_config_change)
    for line in summary.lines() if is_lead() else ():
        clean.echo(line)
