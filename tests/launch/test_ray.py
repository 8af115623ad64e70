"""Processes of a run on a Ray cluster that is there already."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.launch.ray_actors import RayJob, launch_on_ray
from tests.conftest import RunLmt, lmt_environment
from tests.run.conftest import MakeConfig, make_config, text_files

__all__ = ["make_config", "text_files"]

CLUSTER = """
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
input()
ray.shutdown()
"""


@pytest.mark.slow
def test_two_actors_train_one_run(run_lmt: RunLmt, make_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    settings = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    config = make_config(trainer={"num_train_steps": 4})
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=lmt_environment(env=settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    with cluster:
        address = cluster.stdout.readline().strip()
        options = ("--address", address, "--devices-per-process", "1", "--cpus-per-process", "0.5")
        done = run_lmt("launch", "ray", config, "-n", "2", *options, env=settings, timeout=600)
        full = run_lmt("launch", "ray", config, "-n", "8", *options[:4], "--wait", "1", env=settings, timeout=600)
        cluster.stdin.write("\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] 2 processes, as trainer.distributed says; this is process 0" in done.stdout
    assert "[0] done: step 4" in done.stdout
    lines = (tmp_path / "logs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    assert full.returncode == 2
    assert "no room for 8 processes" in full.stderr


def test_no_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"there is no Ray cluster at '127.0.0.1:1'.*ray start --head"):
        launch_on_ray(["-c", ""], RayJob(2, "127.0.0.1:1"), print)


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install ray"):
        launch_on_ray(["-c", ""], RayJob(2, "auto"), print)
