"""Manifests for Kubernetes, checked field by field against the types of JobSet and Job."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.core.errors import UserError
from lm_trainer.launch.k8s import Gpus, KubernetesJob, apply_manifest, build_manifest
from lm_trainer.launch.tpu_slices import find_tpu_slice, usual_topology
from lm_trainer.launch.volumes import parse_volumes
from tests.conftest import Lmt

# The fields that the manifest may use, from api/jobset/v1alpha2/jobset_types.go of JobSet 0.10.1 and from the reference
# of Kubernetes 1.31 (batch/v1 JobSpec, v1 PodSpec and Container); "*": each element of a list, "": any value.
NAMED = {"name": ""}
CONTAINER = {
    **dict.fromkeys(("name", "image", "command"), ""),
    "env": {"*": {"name": "", "value": "", "valueFrom": {"fieldRef": {"fieldPath": ""}}}},
    "envFrom": {"*": {"secretRef": NAMED}},
    "ports": {"*": {"containerPort": ""}},
    "resources": {"requests": "", "limits": ""},
    "volumeMounts": {"*": {"name": "", "mountPath": "", "readOnly": ""}},
}
VOLUME = {
    "name": "",
    "configMap": NAMED,
    "emptyDir": {"medium": ""},
    "hostPath": {"path": ""},
    "persistentVolumeClaim": {"claimName": ""},
    "csi": {"driver": "", "volumeAttributes": ""},
}
POD = {
    "metadata": {"annotations": ""},
    "spec": {
        **dict.fromkeys(("restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "serviceAccountName"), ""),
        "tolerations": {"*": dict.fromkeys(("key", "operator", "value", "effect"), "")},
        "containers": {"*": CONTAINER},
        "volumes": {"*": VOLUME},
    },
}
POD_FAILURE = {
    "action": "",
    "onExitCodes": {"containerName": "", "operator": "", "values": ""},
    "onPodConditions": {"*": {"type": "", "status": ""}},
}
JOB_SPEC = {
    **dict.fromkeys(("backoffLimit", "completionMode", "completions", "parallelism"), ""),
    "podFailurePolicy": {"rules": {"*": POD_FAILURE}},
    "template": POD,
}
RULE = dict.fromkeys(("name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns"), "")
JOB_SET = {
    **dict.fromkeys(("apiVersion", "kind"), ""),
    "metadata": dict.fromkeys(("name", "namespace", "labels", "annotations"), ""),
    "spec": {
        "network": dict.fromkeys(("enableDNSHostnames", "publishNotReadyAddresses", "subdomain"), ""),
        "failurePolicy": {"maxRestarts": "", "rules": {"*": RULE}},
        "replicatedJobs": {"*": {"name": "", "replicas": "", "template": {"spec": JOB_SPEC}}},
    },
}


def find_unknown_fields(value: Any, fields: Any, prefix: str = "") -> list[str]:
    """The places of a manifest that no field of `fields` describes."""
    if fields == "":
        return []
    if "*" in fields:
        return [
            path for i, item in enumerate(value) for path in find_unknown_fields(item, fields["*"], f"{prefix}[{i}]")
        ]
    paths = [f"{prefix}.{key}" for key in value if key not in fields]
    return paths + [
        p for key in value if key in fields for p in find_unknown_fields(value[key], fields[key], f"{prefix}.{key}")
    ]


TPU = find_tpu_slice("v5p-32", None, None)


def documents(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    job = KubernetesJob(**{"name": "run", "image": "image:1", "hardware": TPU, **changes})
    config, job_set = yaml.safe_load_all(build_manifest(job, "trainer:\n  seed: 1\n", "my.yaml"))
    assert find_unknown_fields(job_set, JOB_SET) == []
    return config, job_set


def parts(job_set: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The job, its pod, and the pod's container."""
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, job["template"]["spec"], container


def test_a_tpu_slice() -> None:
    config, job_set = documents(queue="team", namespace="ml")
    job, pod, container = parts(job_set)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert job_set["metadata"]["namespace"] == config["metadata"]["namespace"] == "ml"
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (4, 4, "Indexed", 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert container["resources"] == {"requests": {"google.com/tpu": 4}, "limits": {"google.com/tpu": 4}}
    # GKE tells JAX of its neighbours.
    assert container["command"] == ["lmt", "train", "/etc/lmt/my.yaml"]


def test_the_configuration_goes_along() -> None:
    config, job_set = documents()
    _, pod, container = parts(job_set)
    assert yaml.safe_load(config["data"]["my.yaml"]) == {"trainer": {"seed": 1}}
    volume = next(v["name"] for v in pod["volumes"] if v.get("configMap") == {"name": config["metadata"]["name"]})
    assert {"name": volume, "mountPath": "/etc/lmt", "readOnly": True} in container["volumeMounts"]


def test_nodes_with_gpus_find_one_another_by_the_headless_service() -> None:
    _, job_set = documents(hardware=Gpus(3, 8, "nvidia-h100-80gb"))
    job, pod, container = parts(job_set)
    assert job["completions"] == 3
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    network = job_set["spec"]["network"]
    assert network["enableDNSHostnames"] is True
    env = {
        variable["name"]: variable.get("value") or variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in container["env"]
    }
    # A pod is called <jobset>-<replicated job>-<job>-<pod>.<subdomain>.
    host, port = env["COORDINATOR_ADDRESS"].split(":")
    assert host == f"{job_set['metadata']['name']}-train-0-0.{network['subdomain']}"
    assert {"containerPort": int(port)} in container["ports"]
    assert env["NUM_NODES"] == "3"
    assert env["NODE"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert container["command"][3:] == [
        "trainer.distributed.coordinator_address=$(COORDINATOR_ADDRESS)",
        "trainer.distributed.num_processes=$(NUM_NODES)",
        "trainer.distributed.process_id=$(NODE)",
    ]


@pytest.mark.parametrize(("nodes", "shared"), [(1, False), (3, True)])
def test_each_gpu_of_a_node_has_its_process(nodes: int, shared: bool) -> None:
    _, job_set = documents(hardware=Gpus(nodes, 4, processes_per_node=4))
    job, _, container = parts(job_set)
    assert job["completions"] == nodes
    command = ["lmt", "launch", "local", "/etc/lmt/my.yaml", "-n", "4"]
    options = ["--nodes", "$(NUM_NODES)", "--node", "$(NODE)", "--coordinator", "$(COORDINATOR_ADDRESS)"]
    assert container["command"] == [*command, *(options if shared else ())]
    names = {variable["name"] for variable in container["env"]}
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": "0,1,2,3"} in container["env"]
    assert names.issuperset(option[2:-1] for option in options if option.startswith("$")) == shared
    with pytest.raises(UserError, match="the 3 processes of a node cannot share 4 GPUs equally"):
        Gpus(nodes, 4, processes_per_node=3)


def test_one_node_is_one_process() -> None:
    _, job_set = documents(hardware=Gpus(1, 4))
    _, pod, container = parts(job_set)
    assert container["command"] == ["lmt", "train", "/etc/lmt/my.yaml"]
    assert pod["nodeSelector"] == {}


def job_failure(job: dict[str, Any], code: int | None, condition: str | None = None) -> tuple[str, str]:
    """Reason and message with which Kubernetes fails a job one of whose pods failed (pkg/controller/job)."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", ()):
            message = (
                f"Container train for pod ml/p failed with exit code {code} matching FailJob rule at index {index}"
            )
            return "PodFailurePolicy", message
        if any(pattern == {"type": condition, "status": "True"} for pattern in rule.get("onPodConditions", ())):
            return "PodFailurePolicy", f"Pod ml/p has condition {condition} matching FailJob rule at index {index}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action(job_set: dict[str, Any], reason: str, message: str) -> str:
    """The action of JobSet's first rule that matches (pkg/controllers/failure_policy.go)."""
    for rule in job_set["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(pattern in message for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "condition", "expected"),
    [
        (75, None, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, "DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),
        (1, None, "RestartJobSet"),
        (137, None, "RestartJobSet"),
        (2, None, "FailJobSet"),
        (3, None, "FailJobSet"),
        (4, None, "FailJobSet"),
        (76, None, "FailJobSet"),
    ],
)
def test_exit_codes_decide_what_happens_next(code: int, condition: str | None, expected: str) -> None:
    _, job_set = documents(max_restarts=4)
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 4
    assert action(job_set, *job_failure(parts(job_set)[0], code, condition)) == expected


def test_slices_volumes_secrets_and_spot_nodes() -> None:
    volumes = parse_volumes(["claim:/data", "gs://bucket/runs:/runs", "/mnt/disk:/local"])
    _, job_set = documents(
        slices=2, volumes=volumes, secrets=("keys",), env={"A": "1"}, spot=True, service_account="me", grace=20
    )
    _, pod, container = parts(job_set)
    assert job_set["spec"]["replicatedJobs"][0]["replicas"] == 2
    topology = job_set["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert topology == "cloud.google.com/gke-nodepool"
    sources = {v["name"]: {k: x for k, x in v.items() if k != "name"} for v in pod["volumes"]}
    mounts = {m["mountPath"]: sources[m["name"]] for m in container["volumeMounts"]}
    assert mounts["/data"] == {"persistentVolumeClaim": {"claimName": "claim"}}
    attributes = {"bucketName": "bucket", "mountOptions": "implicit-dirs,only-dir=runs"}
    assert mounts["/runs"] == {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}
    assert mounts["/local"] == {"hostPath": {"path": "/mnt/disk"}}
    annotations = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"gke-gcsfuse/volumes": "true"}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert {"name": "A", "value": "1"} in container["env"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("me", 20)


# GKE documentation, "Plan TPUs in GKE": topologies, chips and machines of each type.
@pytest.mark.parametrize(
    ("accelerator", "topology", "nodes", "chips"),
    [
        ("v4-8", "2x2x1", 1, 4),
        ("v5p-8", "2x2x1", 1, 4),
        ("v5p-128", "4x4x4", 16, 4),
        ("v5p-256", "4x4x8", 32, 4),
        ("v5litepod-1", "1x1", 1, 1),
        ("v5e-8", "2x4", 1, 8),
        ("v5e-16", "4x4", 4, 4),
        ("v6e-32", "4x8", 8, 4),
        ("v6e-256", "16x16", 64, 4),
        ("tpu7x-128", "4x4x4", 16, 4),
    ],
)
def test_slices(accelerator: str, topology: str, nodes: int, chips: int) -> None:
    slice_ = find_tpu_slice(accelerator, None, None)
    assert (slice_.topology_label, slice_.nodes, slice_.chips_per_node) == (topology, nodes, chips)


def test_a_topology_may_be_chosen() -> None:
    assert find_tpu_slice("v5p", "8x8x4", None).nodes == 64
    assert find_tpu_slice("v6e", "2x4", 4).nodes == 2
    assert usual_topology(12, 2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v5p", None, None), "give a size"),
        (("v5p-24", None, None), "no usual topology has 12 chips"),
        (("v5p-128", "4x4", None), "expected 3 numbers"),
        (("v5p-128", "4x4x8", None), "has 128 chips, but v5p-128 has 64"),
        (("v5p-128", None, 5), "does not divide"),
    ],
)
def test_slices_that_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_tpu_slice(*arguments)


@pytest.mark.parametrize("text", ["claim", ":/mount", "claim:mount", "My_Claim:/mount"])
def test_volumes_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match="--volume"):
        parse_volumes([text])


@pytest.mark.parametrize(
    "setting",
    ["data.train_urls=[https://me:secret@host/x]", "trainer.alerts.command=notify --token x1y2z3"],
)
def test_a_secret_is_not_written_down(lmt: Lmt, setting: str) -> None:
    done = lmt("launch", "k8s", "gpt2_nano", "--image", "i", "--accelerator", "v6e-8", setting)
    assert done.returncode == 2
    assert "the configuration holds a secret" in done.stderr
    assert done.stdout == ""


def fake_kubectl(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = directory / "kubectl"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_kubectl_gets_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kubectl(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args; cat > {tmp_path}/stdin; echo created')
    assert apply_manifest("text") == "created"
    assert (tmp_path / "args").read_text().split() == ["apply", "-f", "-"]
    assert (tmp_path / "stdin").read_text() == "text"


def test_a_refusal_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kubectl(tmp_path, monkeypatch, "echo 'no matches for kind JobSet' >&2; exit 1")
    with pytest.raises(UserError, match="kubectl refused the manifest: no matches for kind JobSet"):
        apply_manifest("text")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no kubectl"):
        apply_manifest("text")


def test_the_command(lmt: Lmt) -> None:
    on_gpus = ("launch", "k8s", "gpt2_nano", "--image", "i", "--accelerator", "gpu", "--gpus-per-node", "8")
    for options, command in (
        ((), ["launch", "local"]),
        (("--processes-per-node", "1"), ["train", "/etc/lmt/gpt2_nano.yaml"]),
    ):
        _, job_set = yaml.safe_load_all(lmt(*on_gpus, *options).stdout)
        assert parts(job_set)[2]["command"][1:3] == command
    done = lmt("launch", "k8s", "gpt2_nano", "--image", "i", "--accelerator", "v6e-8", "trainer.seed=7")
    assert done.returncode == 0, done.stderr
    config, job_set = yaml.safe_load_all(done.stdout)
    assert find_unknown_fields(job_set, JOB_SET) == []
    assert yaml.safe_load(config["data"]["gpt2_nano.yaml"])["trainer"]["seed"] == 7
    assert job_set["metadata"]["name"] == "lmt-gpt2-nano"
    # Two devices for each of 8 chips, where the configuration has 8 microbatches.
    many = lmt("launch", "k8s", "gpt2_nano", "--image", "i", "--accelerator", "tpu7x-16")
    assert many.returncode == 2
    assert "16 devices along the data axes cannot share 8 microbatches" in many.stderr


def test_an_accelerator_that_is_not_known(lmt: Lmt) -> None:
    done = lmt("launch", "k8s", "gpt2_nano", "--image", "i", "--accelerator", "h100")
    assert done.returncode == 2
    assert "neither a TPU" in done.stderr
