"""Launches runs as JobSets on Kubernetes: builds the manifest for TPU slices or GPU nodes, and submits it.

The fields of `jobset.x-k8s.io/v1alpha2` are documented at https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
Rules that match failure messages require JobSet 0.10.1 or newer.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import (
    EXIT_CONFIG,
    EXIT_HARDWARE,
    EXIT_NON_FINITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
    EXIT_STOPPED,
    MachineError,
    UserError,
)
from lm_trainer.launch.local import distributed_settings
from lm_trainer.launch.tpu_slices import TpuSlice
from lm_trainer.launch.volumes import Volume

JOB = "train"
"""Name of the only replicated job in the JobSet, and name of its container."""

_PORT = 8476
_TPU_PORTS = (8471, 8431)
"""Ports of a TPU worker: the first is for communication between processes, the second for metrics."""
_CONFIG_DIRECTORY = "/etc/lmt"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FINAL = [EXIT_CONFIG, EXIT_NON_FINITE, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, EXIT_HARDWARE]
"""Exit codes after which a restart is pointless (the run would fail the same way) or unwanted (a user stopped it)."""
_LONGEST_NAME = 40
"""Maximum length of a JobSet name: pod names add a suffix to it, and are limited to 63 characters."""


@dataclass(frozen=True)
class Gpus:
    """Nodes with NVIDIA GPUs.

    Raises:
        UserError: if the GPUs of a node cannot be divided equally among its processes.
    """

    nodes: int
    per_node: int
    kind: str | None = None
    """Value of the node label `cloud.google.com/gke-accelerator`; None means any node with GPUs."""
    processes_per_node: int = 1

    def __post_init__(self) -> None:
        if self.per_node % self.processes_per_node:
            raise UserError(
                f"the {self.processes_per_node} processes of a node cannot share {self.per_node} GPUs equally; one "
                f"process for each GPU is usual"
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class KubernetesJob:
    """Settings of a run on Kubernetes.

    Raises:
        UserError: for an invalid Kubernetes name.
    """

    name: str
    image: str
    """Container image with lm_trainer and a jax installation for the accelerator."""
    hardware: TpuSlice | Gpus
    slices: int = 1
    """Number of TPU slices that train one model together."""
    namespace: str | None = None
    queue: str | None = None
    """Name of a Kueue LocalQueue."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of Kubernetes secrets whose entries become environment variables, such as WANDB_API_KEY."""
    volumes: tuple[Volume, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    spot: bool = False
    max_restarts: int = 10
    """Maximum number of restarts after crashes and lost machines. Restarts after a clean stop do not count."""
    grace: int = 300
    """Number of seconds that a stopped process has to save a checkpoint."""

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?", self.name):
            raise UserError(
                f"--name {self.name!r}: Kubernetes wants at most {_LONGEST_NAME} lower-case letters, digits and '-', "
                f"with a letter first"
            )

    @property
    def pods(self) -> int:
        return self.hardware.nodes * self.slices


def build_manifest(job: KubernetesJob, config: str, config_name: str) -> str:
    """Builds the manifest for kubectl, which contains a ConfigMap with the configuration, and the JobSet.

    Args:
        job: settings of the run.
        config: content of the configuration file.
        config_name: name of the configuration file, which becomes the name of the run.

    """
    import yaml

    metadata = {"name": f"{job.name}-config", **_namespace_metadata(job)}
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {config_name: config}},
        _build_job_set(job, config_name),
    ]
    return yaml.dump_all(documents, Dumper=_build_yaml_dumper(), sort_keys=False, width=120)


def apply_manifest(text: str) -> str:
    """Passes a manifest to kubectl and returns its output.

    Raises:
        UserError: if kubectl is not installed, or the cluster rejects the manifest.
        MachineError: if the cluster does not answer.
    """
    command = ["kubectl", "apply", "-f", "-"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError("there is no kubectl on this machine; leave --apply out to get the manifest") from None
    except subprocess.TimeoutExpired:
        raise MachineError("kubectl did not answer within two minutes") from None
    if done.returncode:
        raise UserError(f"kubectl refused the manifest: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def _namespace_metadata(job: KubernetesJob) -> dict[str, str]:
    return {} if job.namespace is None else {"namespace": job.namespace}


def _build_job_set(job: KubernetesJob, config_name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, **_namespace_metadata(job)}
    if job.queue is not None:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.queue}
    if isinstance(job.hardware, TpuSlice) and job.hardware.nodes > 1:
        # Each slice gets one job and no other: a node pool with several machines is one slice.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    template = {
        # Any failed pod fails the job, because all processes of a run have to start together.
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": job.hardware.nodes,
        "parallelism": job.hardware.nodes,
        "podFailurePolicy": _POD_FAILURES,
        "template": _build_pod(job, config_name),
    }
    replicated = {"name": JOB, "replicas": job.slices, "template": {"spec": template}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # Gives the processes DNS names by which they find each other, even before their pods are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": _FAILURES},
            "replicatedJobs": [replicated],
        },
    }


# For the exit codes listed here, a rule fails the job, and its failure message quotes the exit code. All other
# failures, such as crashes and lost machines, fail the job because a pod failed, and the JobSet restarts up to
# `max_restarts` times.
_POD_FAILURES = {
    "rules": [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": JOB, "operator": "In", "values": [EXIT_PREEMPTED]},
        },
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": JOB, "operator": "In", "values": _FINAL},
        },
    ]
}
_FAILURES = [
    {
        "name": "stoppedWithAllSaved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"exit code {EXIT_PREEMPTED} ", "DisruptionTarget"],
    },
    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
]


def _build_pod(job: KubernetesJob, config_name: str) -> dict[str, Any]:
    mounts = [volume.mount for volume in job.volumes]
    volumes = [volume.source for volume in job.volumes]
    mounts.append({"name": "config", "mountPath": _CONFIG_DIRECTORY, "readOnly": True})
    volumes.append({"name": "config", "configMap": {"name": f"{job.name}-config"}})
    if isinstance(job.hardware, Gpus):
        # NCCL uses shared memory between the GPUs of a node, and a container has only 64 MB of it by default.
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "nodeSelector": {**_hardware_labels(job), **job.node_selector},
        "tolerations": _tolerations(job),
        "containers": [_build_container(job, config_name, mounts)],
        "volumes": volumes,
    }
    if job.service_account is not None:
        spec["serviceAccountName"] = job.service_account
    annotations: dict[str, str] = {}
    for volume in job.volumes:
        annotations |= volume.annotations
    return {"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec}


def _build_container(job: KubernetesJob, config_name: str, mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    chips = _resource_limits(job.hardware)
    env: list[dict[str, Any]] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    command = ["lmt", "train", f"{_CONFIG_DIRECTORY}/{config_name}"]
    if isinstance(job.hardware, Gpus):
        command, variables = _gpu_command(job, job.hardware, command[-1])
        env += variables
    # On TPUs, GKE sets TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and, for several slices, MEGASCALE_*, which JAX reads.
    env += [{"name": name, "value": value} for name, value in job.env.items()]
    ports = _TPU_PORTS if isinstance(job.hardware, TpuSlice) else (_PORT,)
    secrets = [{"secretRef": {"name": name}} for name in job.secrets]
    return {
        "name": JOB,
        "image": job.image,
        "command": command,
        "env": env,
        **({"envFrom": secrets} if secrets else {}),
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": mounts,
    }


def _gpu_command(job: KubernetesJob, gpus: Gpus, config: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the command of a pod, which starts all processes of its node, and the environment variables it uses."""
    env: list[dict[str, Any]] = []
    if job.pods > 1:
        env = [
            {"name": "COORDINATOR_ADDRESS", "value": f"{job.name}-{JOB}-0-0.{job.name}:{_PORT}"},
            {"name": "NUM_NODES", "value": str(job.pods)},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        ]
    # Kubernetes replaces $(NAME) with the value of the variable.
    coordinator, count, index = "$(COORDINATOR_ADDRESS)", "$(NUM_NODES)", "$(NODE)"
    if gpus.processes_per_node == 1:
        return ["lmt", "train", config, *(distributed_settings(coordinator, count, index) if env else ())], env
    # CUDA numbers the GPUs of a pod from 0. The names of the device files do not matter.
    env.append({"name": "CUDA_VISIBLE_DEVICES", "value": ",".join(map(str, range(gpus.per_node)))})
    nodes = ["--nodes", count, "--node", index, "--coordinator", coordinator] if job.pods > 1 else []
    return ["lmt", "launch", "local", config, "-n", str(gpus.processes_per_node), *nodes], env


def _resource_limits(hardware: TpuSlice | Gpus) -> dict[str, int]:
    if isinstance(hardware, TpuSlice):
        return {"google.com/tpu": hardware.chips_per_node}
    return {"nvidia.com/gpu": hardware.per_node}


def _hardware_labels(job: KubernetesJob) -> dict[str, str]:
    spot = {"cloud.google.com/gke-spot": "true"} if job.spot else {}
    if isinstance(job.hardware, TpuSlice):
        return {
            "cloud.google.com/gke-tpu-accelerator": job.hardware.generation.label,
            "cloud.google.com/gke-tpu-topology": job.hardware.topology_label,
            **spot,
        }
    return {**({} if job.hardware.kind is None else {"cloud.google.com/gke-accelerator": job.hardware.kind}), **spot}


def _tolerations(job: KubernetesJob) -> list[dict[str, str]]:
    (resource,) = _resource_limits(job.hardware)
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    return [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}, *([spot] if job.spot else [])]


def _build_yaml_dumper() -> Any:
    """Builds a YAML dumper that writes repeated parts in full instead of as aliases, and multi-line texts as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    def represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, represent_text)
    return Dumper
