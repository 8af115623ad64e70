"""`lmt launch`: starts the processes of a run on this machine, in the cloud, or through a scheduler."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import clean
from cli.common import OVERRIDES, ConfigArgument, OverridesArgument, load_run_config
from cli.launch_k8s import k8s
from cli.launch_options import OutputFile, check_device_count, option_without_default, write_or_submit
from cli.launch_tpu import tpu

app = typer.Typer(
    no_args_is_help=True,
    help="Start the processes of a run: on this machine, in the cloud, or through an existing scheduler.",
)

Processes = Annotated[int, option_without_default("--processes", "-n", metavar="N", min=1, help="Number of processes.")]
Devices = Annotated[
    int | None,
    option_without_default(
        "--devices-per-process", metavar="D", min=1, help="Emulate D CPU devices in each process, for tests."
    ),
]


Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        metavar="R",
        min=0,
        help="Start again up to R times after a process was killed, with the processes that are left.",
    ),
]
LocalNodes = Annotated[
    int, typer.Option("--nodes", metavar="M", min=1, help="Machines that each run this command for one run.")
]
NodeIndex = Annotated[int, typer.Option("--node", metavar="I", min=0, help="Number of this machine, from 0.")]
Coordinator = Annotated[
    str | None,
    option_without_default(
        "--coordinator", metavar="HOST:PORT", help="With --nodes: the first machine, and a free port of it."
    ),
]


# Options of `slurm`, in the order of its help text.
ProcessesOrNodes = Annotated[
    int | None,
    typer.Option(
        "--processes", "-n", metavar="N", min=1, help="Number of processes.", show_default="one per GPU, else per node"
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", metavar="M", min=1, help="Number of nodes.")]
GpusPerNode = Annotated[
    int | None, option_without_default("--gpus-per-node", metavar="G", min=1, help="GPUs per node.")
]
CpusPerProcess = Annotated[
    int | None,
    option_without_default(
        "--cpus-per-process", metavar="C", min=1, help="Cores per process; without it, the job takes entire nodes."
    ),
]
TimeLimit = Annotated[
    str | None, option_without_default("--time", metavar="LIMIT", help="Time limit, such as 24:00:00.")
]
Partition = Annotated[str | None, option_without_default("--partition", metavar="NAME", help="Partition.")]
Account = Annotated[str | None, option_without_default("--account", metavar="NAME", help="Account.")]
Notice = Annotated[
    int, typer.Option("--notice", metavar="SECONDS", min=1, help="Save and stop this long before the time limit.")
]
Requeue = Annotated[
    bool, typer.Option("--requeue/--no-requeue", help="Requeue the job after a stop, to resume the run.")
]
SbatchOptions = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="OPTION", help="Another option for sbatch, such as --sbatch=--mem=0; repeatable."),
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")]


def _training_arguments(config: Path, overrides: list[str] | None) -> list[str]:
    """Returns the arguments of Python for one process."""
    return ["-m", "lm_trainer", "train", str(config.absolute()), *(overrides or [])]


@app.command(context_settings=OVERRIDES)
def local(
    ctx: typer.Context,
    config: ConfigArgument,
    processes: Processes,
    overrides: OverridesArgument = None,
    devices_per_process: Devices = None,
    restarts: Restarts = 0,
    nodes: LocalNodes = 1,
    node: NodeIndex = 0,
    coordinator: Coordinator = None,
) -> None:
    """Train in N processes on this machine, or on each of several machines.

    The processes share the machine's GPUs (or the GPUs in CUDA_VISIBLE_DEVICES) equally. Without GPUs, each has one CPU
    device. Each line of output starts with the number of its process. Ctrl-C makes all processes save and stop, and a
    second Ctrl-C stops them immediately. If a process fails, the failure is reported, the other processes are stopped,
    and the exit code of the failed process is returned. With `--restarts`, the run resumes from its newest checkpoint
    with the remaining processes after a process was killed.

    Examples:
        lmt launch local my.yaml -n 8 --restarts 3

        lmt launch local my.yaml -n 2 --devices-per-process 2 trainer.num_train_steps=100
    """
    # Errors are found here once, instead of in each process.
    run = load_run_config(ctx, config, overrides)
    if devices_per_process is not None:
        check_device_count(run, nodes * processes * devices_per_process)
    from lm_trainer.launch.local import Nodes, launch_local

    code = launch_local(
        _training_arguments(config, overrides),
        processes,
        devices_per_process=devices_per_process,
        write=clean.echo,
        nodes=Nodes(nodes, node, coordinator, restarts),
    )
    raise typer.Exit(code)


@app.command(context_settings=OVERRIDES)
def slurm(
    ctx: typer.Context,
    config: ConfigArgument,
    processes: ProcessesOrNodes = None,
    overrides: OverridesArgument = None,
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    devices_per_process: Devices = None,
    cpus_per_process: CpusPerProcess = None,
    time: TimeLimit = None,
    partition: Partition = None,
    account: Account = None,
    notice: Notice = 120,
    requeue: Requeue = True,
    sbatch: SbatchOptions = None,
    output: OutputFile = None,
    submit: Submit = False,
) -> None:
    """Write a SLURM batch script for a run, or submit it.

    Each GPU gets a process. With a smaller -n, the processes of a node share its GPUs equally. The processes discover
    each other through SLURM's environment. Before the time limit and on preemption, they save and exit with code 75,
    and the job is requeued to resume the run. scancel ends the job after everything is saved. All nodes must be able to
    access the working directory.

    Examples:
        lmt launch slurm my.yaml --nodes 2 --gpus-per-node 8 --time 24:00:00 > job.sh

        lmt launch slurm my.yaml -n 2 --nodes 2 --gpus-per-node 8 --time 24:00:00 --submit

        lmt launch slurm my.yaml -n 2 --devices-per-process 2 trainer.num_train_steps=100 --submit
    """
    # Errors are found now, and not after hours in a queue.
    run = load_run_config(ctx, config, overrides)
    processes = processes or nodes * (gpus_per_node or 1)
    if gpus_per_node or devices_per_process:
        check_device_count(run, nodes * gpus_per_node if gpus_per_node else processes * (devices_per_process or 0))
    from lm_trainer.launch.slurm import SlurmJob, build_batch_script
    from lm_trainer.launch.slurm import submit_job as submit_script

    job = SlurmJob(
        name=config.stem,
        processes=processes,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        devices_per_process=devices_per_process,
        cpus_per_process=cpus_per_process,
        time=time,
        partition=partition,
        account=account,
        notice=notice,
        requeue=requeue,
        extra=tuple(sbatch or ()),
    )
    script = build_batch_script(job, [sys.executable, *_training_arguments(config, overrides)], Path.cwd())
    write_or_submit(script, output, submit_script if submit else None)


@app.command(context_settings=OVERRIDES)
def ray(
    ctx: typer.Context,
    config: ConfigArgument,
    processes: Processes,
    overrides: OverridesArgument = None,
    address: Annotated[
        str | None,
        option_without_default(
            "--address",
            metavar="ADDRESS",
            help="Address of the cluster. Default: trainer.ray.address, RAY_ADDRESS, or this machine's cluster.",
        ),
    ] = None,
    cpus_per_process: Annotated[
        float, typer.Option("--cpus-per-process", metavar="C", min=0, help="Cores Ray reserves per process.")
    ] = 1,
    gpus_per_process: Annotated[
        float, typer.Option("--gpus-per-process", metavar="G", min=0, help="GPUs Ray assigns to each process.")
    ] = 0,
    devices_per_process: Devices = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Maximum wait for free resources on the cluster.")
    ] = 300,
) -> None:
    """Train in N processes on a running Ray cluster; this command never starts a cluster.

    lm_trainer must be installed on all nodes, and all nodes must have configuration, data and run directories at the
    same paths. Output, Ctrl-C and failures are handled as in `lmt launch local`.

    Examples:
        lmt launch ray my.yaml -n 4 --gpus-per-process 1

        lmt launch ray my.yaml -n 4 --address ray://head:10001
    """
    run = load_run_config(ctx, config, overrides)
    if devices_per_process or gpus_per_process >= 1:
        check_device_count(run, processes * (devices_per_process or int(gpus_per_process)))
    from lm_trainer.launch.ray_actors import RayJob, launch_on_ray

    job = RayJob(
        processes=processes,
        # The most explicit setting wins. `auto` finds a cluster that this machine is part of.
        address=address or run.trainer.ray.address or os.environ.get("RAY_ADDRESS") or "auto",
        cpus_per_process=cpus_per_process,
        gpus_per_process=gpus_per_process,
        devices_per_process=devices_per_process,
        wait=wait,
    )
    raise typer.Exit(launch_on_ray(_training_arguments(config, overrides), job, clean.echo))


app.command(context_settings=OVERRIDES)(tpu)
app.command(context_settings=OVERRIDES)(k8s)
