"""`lmt launch k8s`: starts a run on Kubernetes."""

import re
from typing import Annotated

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_resolved_config
from cli.launch_options import (
    EnvOption,
    OutputFile,
    SpotOption,
    check_device_count,
    option_without_default,
    parse_pairs,
    resource_name,
    write_or_submit,
)
from lm_trainer.core.errors import UserError


def k8s(
    ctx: typer.Context,
    config: ConfigArgument,
    image: Annotated[str, option_without_default("--image", metavar="IMAGE", help="Container image that has lmt.")],
    accelerator: Annotated[
        str,
        option_without_default(
            "--accelerator",
            metavar="TYPE",
            help="A TPU type, such as v5p-128 or v6e; the node label of a GPU, such as nvidia-h100-80gb; or gpu for "
            "any.",
        ),
    ],
    overrides: OverridesArgument = None,
    topology: Annotated[
        str | None,
        option_without_default("--topology", metavar="AxB", help="TPU: chips along each dimension, such as 4x4x8."),
    ] = None,
    chips_per_node: Annotated[
        int | None,
        option_without_default(
            "--chips-per-node",
            metavar="C",
            min=1,
            help="TPU: chips per machine. Default: 4, or all chips of a slice of up to 8.",
        ),
    ] = None,
    slices: Annotated[int, typer.Option("--slices", metavar="S", min=1, help="TPU: slices that train together.")] = 1,
    nodes: Annotated[int, typer.Option("--nodes", metavar="M", min=1, help="GPU: number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", metavar="G", min=1, help="GPU: GPUs per node.")] = 8,
    processes_per_node: Annotated[
        int | None,
        typer.Option(
            "--processes-per-node",
            metavar="P",
            min=1,
            help="GPU: processes that share the GPUs of a node equally.",
            show_default="one per GPU",
        ),
    ] = None,
    name: Annotated[
        str | None,
        option_without_default(
            "--name", metavar="NAME", help="Name of the JobSet. Default: lmt- and the configuration's name."
        ),
    ] = None,
    namespace: Annotated[str | None, option_without_default("--namespace", metavar="NAME", help="Namespace.")] = None,
    queue: Annotated[str | None, option_without_default("--queue", metavar="NAME", help="Kueue's LocalQueue.")] = None,
    env: EnvOption = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Secret whose entries are environment variables; repeatable."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            metavar="SOURCE:/MOUNT",
            help="A PersistentVolumeClaim, gs://BUCKET or a directory of the node; repeatable.",
        ),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option("--node-selector", metavar="LABEL=VALUE", help="Another label that nodes must have; repeatable."),
    ] = None,
    service_account: Annotated[
        str | None,
        option_without_default(
            "--service-account", metavar="NAME", help="Service account, for example for access to a bucket."
        ),
    ] = None,
    spot: SpotOption = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="Restarts after crashes and lost machines.")
    ] = 10,
    grace: Annotated[
        int, typer.Option("--grace", metavar="SECONDS", min=1, help="Time for a stopped process to save.")
    ] = 300,
    output: OutputFile = None,
    submit: Annotated[bool, typer.Option("--apply", help="Apply the manifest with kubectl.")] = False,
) -> None:
    """Write a Kubernetes manifest (a JobSet) for a run, or apply it with kubectl.

    Supports TPU slices of Google Kubernetes Engine, with one pod per machine, and nodes with NVIDIA GPUs, with one pod
    per node and one process per GPU. The manifest contains the configuration. A run that stopped with everything saved
    (exit code 75) is restarted any number of times. After a crash or the loss of a machine, it is restarted up to
    `--max-restarts` times. An invalid configuration or a non-finite loss ends it. `trainer.checkpointer.base_path` must
    be in a bucket, or, like `trainer.log_dir`, on a volume that all pods share. The cluster needs JobSet 0.10.1 or
    newer.

    Examples:
        lmt launch k8s my.yaml --image IMAGE --accelerator v5p-128 trainer.checkpointer.base_path=gs://bucket/runs

        lmt launch k8s my.yaml --image IMAGE --accelerator nvidia-h100-80gb --nodes 4 --queue team --apply
    """
    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.config.render import to_yaml
    from lm_trainer.launch.k8s import Gpus, KubernetesJob, apply_manifest, build_manifest
    from lm_trainer.launch.tpu_slices import find_tpu_slice, is_tpu
    from lm_trainer.launch.volumes import parse_volumes

    if is_tpu(accelerator):
        if nodes != 1 or processes_per_node is not None:
            raise UserError(
                "--nodes and --processes-per-node are for GPUs; the nodes of a TPU slice follow from its topology, and "
                "each has one process"
            )
        hardware = find_tpu_slice(accelerator, topology, chips_per_node)
    else:
        _refuse_tpu_options(accelerator, topology, chips_per_node, slices > 1)
        kind = _parse_gpu_kind(accelerator)
        hardware = Gpus(nodes, gpus_per_node, kind, processes_per_node or gpus_per_node)
    job = KubernetesJob(
        name=name or resource_name(config),
        image=image,
        hardware=hardware,
        slices=slices,
        namespace=namespace,
        queue=queue,
        env=parse_pairs("--env", env),
        secrets=tuple(secret or ()),
        volumes=parse_volumes(volume or ()),
        node_selector=parse_pairs("--node-selector", node_selector),
        service_account=service_account,
        spot=spot,
        max_restarts=max_restarts,
        grace=grace,
    )
    check_device_count(run, slices * hardware.devices)
    _warn_about_slices(slices, run.trainer.replica_dcn_axis_size)
    file_name = re.sub(r"[^\w.-]", "-", config.stem) + ".yaml"
    text = to_yaml(run)
    if to_yaml(run, redact=True) != text:
        raise UserError(
            "the configuration holds a secret (a password in a URL or a command, a token, the address of a web hook), "
            "which the manifest would show to many; take it out, or give it by --secret"
        )
    write_or_submit(build_manifest(job, text, file_name), output, apply_manifest if submit else None)


def _refuse_tpu_options(accelerator: str, *options: object) -> None:
    if any(options):
        raise UserError(f"--topology, --chips-per-node and --slices are for TPUs, and {accelerator} is none")


def _parse_gpu_kind(accelerator: str) -> str | None:
    """Returns the label of nodes with these GPUs; None for any GPU."""
    if accelerator == "gpu":
        return None
    if not accelerator.startswith("nvidia-"):
        raise UserError(
            f"--accelerator {accelerator!r} is neither a TPU (v4, v5e, v5p, v6e, tpu7x, with a size as in v5p-128) nor "
            f"a GPU (nvidia-h100-80gb and the like, as nodes are labelled, or gpu)"
        )
    return accelerator


def _warn_about_slices(slices: int, replicas: int) -> None:
    """Warns on stderr about settings that are unsuitable for several slices."""
    if slices > 1 and replicas != slices:
        clean.secho(
            f"note: trainer.replica_dcn_axis_size is {replicas} for {slices} slices; set it to {slices}, or parameters "
            f"are gathered over the slow network between them",
            err=True,
            fg=typer.colors.YELLOW,
        )
