"""`lmt launch tpu`: starts a run on Cloud TPU VMs."""

from enum import StrEnum
from typing import Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_resolved_config
from cli.launch_options import (
    EnvOption,
    SpotOption,
    check_device_count,
    option_without_default,
    parse_pairs,
    resource_name,
)


class OnInterrupt(StrEnum):
    stop = "stop"
    leave = "leave"


def tpu(
    ctx: typer.Context,
    config: ConfigArgument,
    accelerator: Annotated[
        str, option_without_default("--accelerator", metavar="TYPE", help="Type and size, such as v5p-128 or v6e-16.")
    ],
    zone: Annotated[str, option_without_default("--zone", metavar="ZONE", help="Google Cloud zone.")],
    overrides: OverridesArgument = None,
    project: Annotated[
        str | None, option_without_default("--project", metavar="ID", help="Project. Default: gcloud's setting.")
    ] = None,
    name: Annotated[
        str | None,
        option_without_default(
            "--name", metavar="NAME", help="Name of the TPU. Default: lmt- and the configuration's name."
        ),
    ] = None,
    version: Annotated[
        str | None,
        option_without_default(
            "--version", metavar="NAME", help="Runtime version. Default: the version for JAX on this type."
        ),
    ] = None,
    spot: SpotOption = False,
    env: EnvOption = None,
    install: Annotated[
        str | None,
        option_without_default(
            "--install",
            metavar="REQUIREMENT",
            help="Requirement to install with pip. Default: the source tree of this lmt.",
        ),
    ] = None,
    setup: Annotated[
        str | None,
        option_without_default(
            "--setup",
            metavar="COMMAND",
            help="Command to run on every worker before training, for example to mount a bucket.",
        ),
    ] = None,
    gcloud: Annotated[
        list[str] | None,
        typer.Option(
            "--gcloud",
            metavar="OPTION",
            help="Another option for `queued-resources create`, such as --gcloud=--reserved.",
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the TPU when the run has finished, failed or been interrupted.")
    ] = False,
    on_interrupt: Annotated[
        OnInterrupt,
        typer.Option("--on-interrupt", help="On Ctrl-C: make the training save and stop, or leave it running."),
    ] = OnInterrupt.stop,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", min=0, help="Restart a preempted run at most N times.")
    ] = 100,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")] = False,
) -> None:
    """Train on a TPU slice of Google Cloud: request the slice, set it up and follow the training.

    Requests a queued resource, installs lm_trainer on all workers, starts `lmt train` on them and shows the output of
    the first worker. If the TPU is preempted, another one is requested, and the run resumes from its newest checkpoint.
    So `trainer.checkpointer.base_path` must outlive the TPU, for example in a bucket. The training continues if this
    command is stopped; repeat the command to follow it.

    Examples:
        lmt launch tpu my.yaml --accelerator v5p-128 --zone us-east5-a --dry-run

        lmt launch tpu my.yaml --accelerator v6e-16 --zone europe-west4-a --spot --delete trainer.checkpointer.base_path=gs://b/runs
    """
    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.config.render import to_yaml
    from lm_trainer.launch.tpu import TpuJob, TpuRun, describe_commands
    from lm_trainer.launch.tpu_slices import device_count

    job = TpuJob(
        name=name or resource_name(config),
        accelerator=accelerator,
        zone=zone,
        project=project,
        version=version,
        spot=spot,
        create_options=tuple(gcloud or ()),
        env=parse_pairs("--env", env),
        install=install,
        setup=setup,
        delete=delete,
        on_interrupt=on_interrupt.value,
        restarts=restarts,
    )
    devices = device_count(accelerator)
    if devices is not None:
        check_device_count(run, devices)
    if dry_run:
        for line in describe_commands(job, f"{config.stem}.yaml"):
            clean.echo(line)
        return
    raise typer.Exit(TpuRun(job, to_yaml(run), f"{config.stem}.yaml", clean.echo).run())
