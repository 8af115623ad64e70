"""`lmt launch tpu`: a run on Cloud TPU VMs."""

from enum import StrEnum
from typing import Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_resolved_config
from cli.launch_options import EnvOption, SpotOption, check_device_count, name_of, pairs, unset


class OnInterrupt(StrEnum):
    stop = "stop"
    leave = "leave"


def tpu(
    ctx: typer.Context,
    config: ConfigArgument,
    accelerator: Annotated[str, unset("--accelerator", metavar="TYPE", help="Type and size, as v5p-128 or v6e-16.")],
    zone: Annotated[str, unset("--zone", metavar="ZONE", help="Zone of Google Cloud.")],
    overrides: OverridesArgument = None,
    project: Annotated[str | None, unset("--project", metavar="ID", help="Project; else gcloud's own setting.")] = None,
    name: Annotated[
        str | None, unset("--name", metavar="NAME", help="Name of the TPU; else lmt- and that of the configuration.")
    ] = None,
    version: Annotated[
        str | None, unset("--version", metavar="NAME", help="Runtime version; else that for JAX on this type.")
    ] = None,
    spot: SpotOption = False,
    env: EnvOption = None,
    install: Annotated[
        str | None,
        unset("--install", metavar="REQUIREMENT", help="Install this by pip; else the source tree of this lmt."),
    ] = None,
    setup: Annotated[
        str | None,
        unset("--setup", metavar="COMMAND", help="Command for every worker before training, as to mount a bucket."),
    ] = None,
    gcloud: Annotated[
        list[str] | None,
        typer.Option(
            "--gcloud", metavar="OPTION", help="Other option of `queued-resources create`, as --gcloud=--reserved."
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the TPU when the run is done, has failed or was interrupted.")
    ] = False,
    on_interrupt: Annotated[
        OnInterrupt, typer.Option("--on-interrupt", help="At Ctrl-C: have the training save and stop, or leave it.")
    ] = OnInterrupt.stop,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", min=0, help="Start a preempted run again so many times.")
    ] = 100,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and do nothing.")] = False,
) -> None:
    """Train on a TPU slice of Google Cloud, which is asked for, set up and followed from here.

    Asks for a queued resource, installs lm_trainer on all of its workers, starts `lmt train` there and shows the output
    of the first. When the TPU is taken away, another is asked for, and the run goes on from its newest checkpoint:
    `trainer.checkpointer.base_path` must outlive the TPU, as a bucket does. The training does not hang on this command;
    the same command again follows it.

    Examples:
        lmt launch tpu my.yaml --accelerator v5p-128 --zone us-east5-a --dry-run

        lmt launch tpu my.yaml --accelerator v6e-16 --zone europe-west4-a --spot --delete trainer.checkpointer.base_path=gs://b/runs
    """
    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.config.render import to_yaml
    from lm_trainer.launch.tpu import TpuJob, TpuRun, describe_commands
    from lm_trainer.launch.tpu_slices import device_count

    job = TpuJob(
        name=name or name_of(config),
        accelerator=accelerator,
        zone=zone,
        project=project,
        version=version,
        spot=spot,
        create_options=tuple(gcloud or ()),
        env=pairs("--env", env),
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
