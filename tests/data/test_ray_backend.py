"""Building on a Ray cluster gives the bytes of any other way to build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import RayConfig
from lm_trainer.data.tokenize.ray_backend import run_on_ray
from tests.conftest import lmt_environment
from tests.data.conftest import contents

PROGRAM = """
import gzip, json, sys
from pathlib import Path
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, RayConfig
from lm_trainer.data.tokenize.build import Build, BuildOptions
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.data.program import PART_BYTES, one_per_file

def build(directory, urls):
    shards = one_per_file(DataConfig(train_urls=urls))
    options = BuildOptions(part_bytes=PART_BYTES, ray=RayConfig(address=address))
    Build("train", KvStore(directory), shards, ByteTokenizer(), options).run()

if __name__ == "__main__":
    import ray
    corpus, out, address = sys.argv[1], sys.argv[2], None
    build(f"{out}/started", [f"{corpus}/*.jsonl*"])
    assert not ray.is_initialized(), "a cluster that a build started ends with it"

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    build(f"{out}/joined", [f"{corpus}/*.jsonl*"])
    assert ray.is_initialized(), "a cluster that was there stays"
    Path(f"{out}/z.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "x"}).encode() * 5000)[:-20])
    try:
        build(f"{out}/broken", [f"{corpus}/a.jsonl", f"{out}/z.jsonl.gz"])
    except UserError as error:
        print("refused:", error)
    ray.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_gives_the_same_bytes(corpus: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    pytest.importorskip("ray")
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(corpus), str(tmp_path)],
        env=lmt_environment(env=settings),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "started") == reference
    assert contents(tmp_path / "joined") == reference
    assert "z.jsonl.gz is damaged" in done.stdout, done.stdout


class FakeRay:
    """Notes how it is started."""

    def __init__(self, *, running: bool = False):
        self.running, self.started = running, []
        self.exceptions = SimpleNamespace(RayTaskError=KeyError, RayError=KeyError)

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: object) -> None:
        self.started.append(options)

    def remote(self, **_: object):
        return lambda task: task

    def shutdown(self) -> None:
        self.started.append("shutdown")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"address": "local"}),
        ({"start_workers": False}, {"address": "local", "num_cpus": 0}),
        ({"auto_start_cluster": False}, {"address": "auto"}),
        ({"address": "auto"}, {"address": "auto"}),
    ],
)
def test_what_is_started_is_what_was_asked_for(
    config: dict[str, object], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    run_on_ray([], RayConfig.model_validate(config), lambda: None)
    started, ended = fake.started
    assert {key: started[key] for key in ("address", "num_cpus") if key in started} == expected
    assert ended == "shutdown"
    running = FakeRay(running=True)
    monkeypatch.setitem(sys.modules, "ray", running)
    run_on_ray([], RayConfig.model_validate(config), lambda: None)
    assert running.started == [], "a cluster that this process is part of already is used and left alone"


def test_a_missing_cluster_is_named() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"there is no Ray cluster at '127\.0\.0\.1:1'.*trainer\.ray\.address"):
        run_on_ray([], RayConfig(address="127.0.0.1:1"), lambda: None)


def test_no_cluster_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(FakeRay):
        def init(self, **options: object) -> None:
            raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setitem(sys.modules, "ray", Without())
    with pytest.raises(UserError, match=r"there is no Ray cluster at 'auto'.*auto_start_cluster: true"):
        run_on_ray([], RayConfig(auto_start_cluster=False), lambda: None)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install ray"):
        run_on_ray([], RayConfig(), lambda: None)


def test_training_starts_no_cluster_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_trainer.run import train
    from lm_trainer.run.config.run_config import RunConfig

    starts = []
    monkeypatch.setattr(train, "open_data", lambda *_, ray, **__: starts.append(ray))
    for section in ({}, {"address": "auto"}):
        config = RunConfig.model_validate({"trainer": {"ray": section}})
        train.open_training_data(config, None)  # pyright: ignore[reportArgumentType]
    assert starts == [None, RayConfig(address="auto")]
