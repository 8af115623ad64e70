"""The request to SLURM, and the environment that SLURM gives to a process."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.clusters.slurm_cluster import SlurmCluster

from lm_trainer.core.errors import UserError
from lm_trainer.launch.slurm import SlurmJob, build_batch_script, submit_job
from lm_trainer.parallel.distributed import DistributedConfig, find_cluster
from tests.conftest import Lmt

STEP = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def write_fake_program(directory: Path, name: str, text: str) -> None:
    """A program of this name, first on the path."""
    path = directory / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bin_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
@pytest.mark.parametrize("value", ["x", "-1", "2x", "1.5"])
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{name} in the environment is '{value}'"):
        find_cluster({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3", name: value})


@pytest.mark.parametrize(
    ("name", "directory", "extra"),
    [("a\ntouch pwned", "/shared", ""), ("nano", "/shared/x\ntouch pwned #", ""), ("nano", "/shared", "--mem=0\nx")],
)
def test_no_name_ends_a_line_of_the_script(name: str, directory: str, extra: str) -> None:
    with pytest.raises(UserError, match=r"does not fit on a line|is no option of sbatch"):
        build_batch_script(SlurmJob(name, 1, extra=(extra,) if extra else ()), ["lmt"], Path(directory))


def test_the_script_asks_for_what_was_given() -> None:
    job = SlurmJob("nano", 16, 2, gpus_per_node=8, cpus_per_process=6, time="1-00", notice=90, extra=("--mem=0",))
    lines = build_batch_script(job, ["lmt", "train", "a b.yaml"], Path("/shared")).splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert options == {
        "--job-name=nano",
        "--chdir=/shared",
        "--nodes=2",
        "--ntasks=16",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=6",
        "--time=1-00",
        "--signal=TERM@90",
        "--open-mode=append",
        "--requeue",
        "--mem=0",
    }
    assert "srun --cpus-per-task=6 --kill-on-bad-exit=0 --wait=300 --label lmt train 'a b.yaml'" in lines


@pytest.mark.parametrize(
    ("code", "state", "requeue", "requeued"),
    [
        (75, "RUNNING", True, True),
        (75, "RUNNING", False, False),
        (1, "RUNNING", True, False),
        (76, "RUNNING", True, False),
        (75, "COMPLETING", True, False),
    ],
)
def test_a_stopped_job_is_queued_again(
    bin_first: Path, tmp_path: Path, code: int, state: str, requeue: bool, requeued: bool
) -> None:
    write_fake_program(bin_first, "srun", f'kill -TERM $PPID; sleep 0.2; echo "ran $*"; exit {code}')
    write_fake_program(bin_first, "squeue", f'[ "$2" = --jobs=812 ] && echo {state}')
    write_fake_program(bin_first, "scontrol", 'echo "scontrol $*"')
    script = build_batch_script(SlurmJob("nano", 2, requeue=requeue), ["lmt", "train"], tmp_path)
    environ = {**os.environ, "SLURM_JOB_ID": "812"}
    done = subprocess.run(["bash"], input=script, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "ran --cpu-bind=none --kill-on-bad-exit=0" in done.stdout
    assert ("scontrol requeue 812" in done.stdout) is requeued


def test_a_job_without_a_number_of_cores_takes_whole_nodes() -> None:
    lines = build_batch_script(SlurmJob("nano", 2, extra=("--mem=8G",)), ["lmt"], Path("/shared")).splitlines()
    # The user's own option comes last, and the last one counts.
    assert [line for line in lines if "exclusive" in line or "mem" in line] == [
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --mem=8G",
    ]


def test_a_script_is_handed_to_sbatch(bin_first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_program(bin_first, "sbatch", 'cat > "$0.got"; echo "Submitted batch job 812"')
    assert submit_job("the script\n") == "Submitted batch job 812"
    assert (bin_first / "sbatch.got").read_text() == "the script\n"
    write_fake_program(bin_first, "sbatch", 'echo "sbatch: error: invalid partition" >&2; exit 1')
    with pytest.raises(UserError, match="sbatch refused the job: sbatch: error: invalid partition"):
        submit_job("")
    monkeypatch.setenv("PATH", str(bin_first / "none"))
    with pytest.raises(UserError, match="there is no sbatch on this machine"):
        submit_job("")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"processes": 3, "nodes": 2}, "3 processes do not spread equally over 2 nodes"),
        ({"processes": 3, "gpus_per_node": 8}, r"cannot share 8 GPUs equally; .* -n 8"),
        ({"processes": 1, "extra": ("mem=0",)}, "write it as --sbatch"),
        ({"processes": 2, "gpus_per_node": 2, "devices_per_process": 2}, "one of --gpus-per-node and --devices-per"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SlurmJob("nano", **fields)


def test_the_command_writes_prints_and_submits(lmt: Lmt, tmp_path: Path, bin_first: Path) -> None:
    config = tmp_path / "nano.yaml"
    config.write_text("model: {type: gpt2}\ndata: {train_urls: [a.txt], tokenizer: bytes}\n")
    write_fake_program(bin_first, "sbatch", 'cat > "$0.got"; echo "Submitted batch job 812"')
    options = ("-n", "4", "--nodes", "2", "--time", "10", "--submit", "--output", "job.sh")
    done = lmt("launch", "slurm", "nano.yaml", *options, "trainer.seed=3", "--trainer.num_train_steps", "7")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 812\n"), done.stderr
    script = (tmp_path / "job.sh").read_text()
    assert (bin_first / "sbatch.got").read_text() == script
    assert f"-m lm_trainer train {config} trainer.seed=3 --trainer.num_train_steps 7" in script
    assert f"#SBATCH --chdir={tmp_path}\n" in script
    wrong = lmt("launch", "slurm", "nano.yaml", "-n", "4", "trainer.sead=3")
    assert wrong.returncode == 2
    assert "did you mean" in wrong.stderr
    many = lmt("launch", "slurm", "nano.yaml", "-n", "128", "--nodes", "16", "--gpus-per-node", "8", "--submit")
    assert many.returncode == 2
    assert "128 devices along the data axes cannot share 64 microbatches" in many.stderr
    many = lmt("launch", "slurm", "nano.yaml", "-n", "16", "--devices-per-process", "8")
    assert "128 devices along the data axes cannot share 64 microbatches" in many.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--partition", "trainer.seed=3"), "--partition has no value: trainer.seed=3 behind it is a setting"),
        (("--output", "--trainer.seed=3"), "--output has no value"),
        (("-N", "2"), "-N: no such option; did you mean '--nodes' or '--notice'?"),
        (("-p", "gpu"), "-p: no such option; did you mean '--processes' or '--partition'?"),
        (("-t10",), "-t10: no such option; did you mean '--time'?"),
    ],
)
def test_options_of_sbatch_and_options_without_a_value_are_told(
    lmt: Lmt, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "nano.yaml").write_text("model: {type: gpt2}\ndata: {train_urls: [a.txt], tokenizer: bytes}\n")
    done = lmt("launch", "slurm", "nano.yaml", "-n", "2", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert {*tmp_path.iterdir()} <= {tmp_path / "nano.yaml", tmp_path / "bin"}


def test_each_gpu_has_a_process_unless_fewer_are_asked_for(lmt: Lmt, tmp_path: Path) -> None:
    (tmp_path / "nano.yaml").write_text("model: {type: gpt2}\ndata: {train_urls: [a.txt], tokenizer: bytes}\n")
    script = lmt("launch", "slurm", "nano.yaml", "--nodes", "4", "--gpus-per-node", "2").stdout
    assert "#SBATCH --ntasks=8\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in script
    script = lmt("launch", "slurm", "nano.yaml", "-n", "4", "--nodes", "4", "--gpus-per-node", "2").stdout
    assert "#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n" in script
    script = lmt("launch", "slurm", "nano.yaml", "--nodes", "4").stdout
    assert "#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=1\n" in script
    assert "export" not in script


def test_processes_with_emulated_devices_see_them(
    bin_first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false")
    script = build_batch_script(SlurmJob("nano", 2, devices_per_process=3, requeue=False), ["lmt"], tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    write_fake_program(bin_first, "srun", 'echo "$JAX_PLATFORMS $JAX_NUM_CPU_DEVICES $XLA_FLAGS"')
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu 3 --xla_cpu_enable_fast_math=false\n"


class TestWhatAProcessFinds:
    def test_nothing(self) -> None:
        assert find_cluster({}) is None
        assert find_cluster({"SLURM_NTASKS": "1"}) is None
        assert DistributedConfig().start() is None

    def test_a_task_of_a_step(self) -> None:
        cluster = find_cluster(STEP)
        assert cluster is not None
        assert (cluster.description, cluster.several, cluster.local_device_ids) == ("SLURM job 812", True, None)

    @pytest.mark.parametrize(
        ("nodes", "expected"),
        [
            ("node001", "node001"),
            ("node001,host2", "node001"),
            ("node[001-015],host2", "node001"),
            ("node[007,009-015]", "node007"),
            ("127.0.0.[1-4]", "127.0.0.1"),
            ("r[1-2]n[5,8]-ib,r3n1-ib", "r1n5-ib"),
        ],
    )
    def test_its_coordinator(self, monkeypatch: pytest.MonkeyPatch, nodes: str, expected: str) -> None:
        cluster = find_cluster({**STEP, "SLURM_STEP_NODELIST": nodes})
        assert cluster is not None
        assert cluster.coordinator is not None
        host, port = cluster.coordinator.split(":")
        assert host == expected
        # Where JAX understands the list, the first step of a job meets those that JAX alone would start.
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        monkeypatch.setenv("SLURM_JOB_ID", STEP["SLURM_JOB_ID"])
        jax_address = SlurmCluster.get_coordinator_address(None, None)
        assert jax_address.split(":")[1] == port
        assert jax_address == cluster.coordinator or nodes.count("[") > 1

    def test_another_step_of_its_job_has_another_port(self) -> None:
        addresses = {find_cluster({**STEP, "SLURM_STEP_ID": str(step)}).coordinator for step in range(20)}  # pyright: ignore[reportOptionalMemberAccess]
        assert len(addresses) == 20

    def test_a_coordinator_that_was_named(self) -> None:
        named = find_cluster({**STEP, "JAX_COORDINATOR_ADDRESS": "host:7", "JAX_COORDINATOR_PORT": "9"})
        assert named is not None
        assert named.coordinator == "host:7"
        port = find_cluster({**STEP, "JAX_COORDINATOR_PORT": "9"})
        assert port is not None
        assert port.coordinator == "node03:9"

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
            ({"CUDA_VISIBLE_DEVICES": "5,6"}, (1,)),
            ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, (0,)),
            (
                {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
                (0, 1, 2, 3),
            ),
        ],
    )
    def test_its_gpus(self, environ: dict[str, str], expected: tuple[int, ...]) -> None:
        cluster = find_cluster({**STEP, **environ})
        assert cluster is not None
        assert cluster.local_device_ids == expected

    def test_gpus_that_cannot_be_shared(self) -> None:
        with pytest.raises(UserError, match="2 processes on this node cannot share its 3 GPUs equally"):
            find_cluster({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2"})

    def test_a_batch_shell_is_not_a_task_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"):
            monkeypatch.setenv(name, STEP[name])
        message = DistributedConfig().start()
        assert message == "SLURM job 812 has 4 tasks, but this process was not started by srun: a run of its own"

    @pytest.mark.parametrize(
        ("environ", "words"),
        [
            ({"TPU_WORKER_HOSTNAMES": "a,b"}, "the TPU pod"),
            ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "the TPU pod"),
            ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, "the TPU pod"),
            ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, "Open MPI"),
        ],
    )
    def test_other_clusters(self, environ: dict[str, str], words: str) -> None:
        cluster = find_cluster(environ)
        assert cluster is not None
        assert (cluster.description, cluster.several) == (words, True)

    def test_jax_is_given_what_was_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments: dict[str, Any] = {}
        monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: arguments.update(kwargs))
        monkeypatch.setattr(jax, "process_count", lambda: 4)
        monkeypatch.setattr(jax, "process_index", lambda: 3)
        for name, value in {**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}.items():
            monkeypatch.setenv(name, value)
        message = DistributedConfig().start()
        assert message == "4 processes, as SLURM job 812 says; this is process 3"
        assert arguments == {"coordinator_address": "node03:62252", "num_processes": None, "process_id": None} | {
            "local_device_ids": (2, 3),
            "initialization_timeout": 360,
        }
        DistributedConfig(local_device_ids=1).start()
        assert arguments["local_device_ids"] == 1
