"""A run under a real SLURM: stopped, queued again, cancelled, cut off by its time limit, and robbed of a node."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lmt, lmt_command, lmt_environment
from tests.launch.slurm_cluster import MISSING, NODES, SlurmCluster, wait_for
from tests.run.conftest import MakeConfig, write_config
from tests.run.test_processes import caching_lmt_command, train_alone
from tests.run.test_stop_signals import losses

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A run that `lmt launch slurm` has submitted, in its directory."""

    def __init__(self, slurm: SlurmCluster, directory: Path, number: str):
        self.slurm, self.directory, self.number = slurm, directory, number

    @property
    def output(self) -> str:
        file = self.directory / f"slurm-{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def state(self) -> str:
        return self.slurm.state(self.number)

    def wait_for_state(self, state: str) -> None:
        wait_for(lambda: self.state == state, f"the job does not come to {state!r}\n{self.output}")

    def wait_for_steps(self, count: int) -> None:
        """Returns once metrics of so many steps are written."""
        metrics = self.directory / "logs/run/metrics.jsonl"

        def enough() -> bool:
            assert self.state not in OVER, self.output
            return metrics.exists() and metrics.read_bytes().count(b'"train/loss"') >= count

        wait_for(enough, f"the run does not get on\n{self.output}")

    def last_save(self) -> int:
        """The step after which the last attempt says that it has saved everything."""
        steps = re.findall(r"stopped by .+ after step (\d+); everything is saved", self.output)
        assert steps, self.output
        return int(steps[-1])


def submit(slurm: SlurmCluster, config: Path, *options: str) -> Job:
    """Submits a run by the user's own command."""
    command = caching_lmt_command(config.parent, "launch", "slurm", config, *options, "--submit")
    environment = lmt_environment(env=slurm.environment)
    done = subprocess.run(
        command, cwd=config.parent, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return Job(slurm, config.parent, done.stdout.split()[-1])


@pytest.mark.optimised
def test_a_run_that_is_stopped_requeued_cancelled_and_robbed_of_a_node_is_the_run_that_nothing_disturbed(
    slurm: SlurmCluster, make_config: MakeConfig, lmt: Lmt, tmp_path: Path
) -> None:
    policy = {"save_interval": "1h", "keep": [{"every": 10}]}
    trainer = {"num_train_steps": 150, "steps_per_eval": 50, "steps_per_log": 1, "checkpointer": policy}
    config = make_config(trainer=trainer)
    job = submit(slurm, config, "--nodes", "2", "--devices-per-process", "2")
    job.wait_for_steps(5)
    slurm.ask("scancel", "--signal=TERM", job.number)
    job.wait_for_state("PENDING BeginTime")
    stopped = job.last_save()
    assert 5 <= stopped < 150
    (attempt,) = json.loads((tmp_path / "logs/run/env.json").read_text())
    assert len(attempt["devices"]) == 4, "as many as each process is to emulate"

    slurm.begin(job.number)
    job.wait_for_steps(stopped + 5)
    assert f"resumed at step {stopped} of 150" in job.output
    assert "2 processes, as SLURM job" in job.output
    slurm.ask("scancel", job.number)
    job.wait_for_state("CANCELLED")
    assert job.last_save() > stopped
    assert "the job was cancelled or requeued" in job.output

    # Four tasks of a step that no launcher has made, until one of their nodes is lost.
    stopped = job.last_save()
    job = submit(slurm, config, "-n", "4", "--nodes", "4")
    job.wait_for_steps(stopped + 12)
    slurm.lose_node(NODES[3])
    wait_for(lambda: "is gone: it was killed, or its machine was lost" in job.output, "nobody misses the node")
    # SLURM itself queues a job again whose node has failed.
    wait_for(lambda: job.state.startswith("PENDING"), f"the job is not queued again: {job.state}\n{job.output}")
    assert f"resumed at step {stopped} of 150" in job.output
    slurm.ask("scancel", job.number)
    slurm.start_node(NODES[3])

    done = subprocess.run(
        [slurm.program("srun"), "-n", "1", *lmt_command("train", config)],
        cwd=tmp_path,
        env=lmt_environment(env=slurm.environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"resumed at step \d+0 of 150", done.stdout), done.stdout

    undisturbed = tmp_path / "undisturbed"
    train_alone(config, undisturbed, devices=1)
    assert losses(tmp_path) == losses(undisturbed)
    comparison = lmt("diff", tmp_path / "logs/run", undisturbed / "logs/run")
    assert comparison.returncode == 0, comparison.stdout


def test_a_time_limit_requeues_and_a_stop_that_a_person_asks_for_does_not(
    slurm: SlurmCluster, text_files: tuple[Path, Path], tmp_path: Path
) -> None:
    """The limit comes with a notice, which saves; the other run goes by meanwhile."""
    endless = {"trainer": {"num_train_steps": 1_000_000, "steps_per_eval": 1_000_000}}
    for name in ("limited", "asked"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name / "run.yaml", text_files, endless)
    limits = ("-n", "2", "--nodes", "2", "--time", "2", "--notice", "60")
    limited = submit(slurm, tmp_path / "limited/run.yaml", *limits)
    limited.wait_for_steps(1)
    stopped_run = submit(slurm, tmp_path / "asked/run.yaml", "-n", "1")
    stopped_run.wait_for_steps(2)
    for name in ("stop-after-save", "save-now"):
        (tmp_path / "asked/logs/run" / name).touch()
    stopped_run.wait_for_state("FAILED")
    assert stopped_run.last_save() >= 2

    limited.wait_for_state("PENDING BeginTime")
    assert (tmp_path / "limited/checkpoints/run" / str(limited.last_save())).is_dir()
    slurm.ask("scancel", limited.number)
