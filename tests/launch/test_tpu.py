"""Runs on TPU VMs, against a gcloud that keeps the state of one queued resource and runs what ssh is given here."""

from __future__ import annotations

import os
import stat
import textwrap
from pathlib import Path

import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.launch.tpu import TpuJob, TpuRun, describe_commands
from tests.conftest import Lmt

CONFIG = "trainer:\n  num_train_steps: 3\n"

GCLOUD = r"""
echo "$*" >> "$FAKE/calls"
command="" source=""
for argument in "$@"; do
    case "$argument" in
        --command=*) command="${argument#--command=}" ;;
        /*) source="$argument" ;;
    esac
done
case "$3 $4" in
"queued-resources create")
    # The requests to come, one on each line: the states that they go through.
    head -n 1 "$FAKE/requests" | tr ' ' '\n' > "$FAKE/states"; sed -i 1d "$FAKE/requests" ;;
"queued-resources describe")
    [ -s "$FAKE/states" ] || { echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1; }
    reason='"failedData": {"error": {"message": "no quota"}}'
    echo "{\"state\": {\"state\": \"$(head -n 1 "$FAKE/states")\", $reason}}"
    [ "$(wc -l < "$FAKE/states")" = 1 ] || sed -i 1d "$FAKE/states" ;;
"queued-resources delete") rm -rf "$FAKE/states" "$FAKE/home"; mkdir "$FAKE/home" ;;
"tpu-vm scp") cp -r "$source" "$FAKE/home" ;;
"tpu-vm ssh")
    cd "$FAKE/home"
    if [ -f "$FAKE/breaks" ] && [[ "$command" == *follow* ]]; then
        rm "$FAKE/breaks"; timeout 0.5 bash -c "$command"; exit 255
    fi
    bash -c "$command" ;;
esac
"""
UV = r"""
case "$*" in
    *install*) cp "$FAKE/lmt" venv/bin/lmt; echo "$*" >> "$FAKE/installed" ;;
    venv*) mkdir -p venv/bin; cp "$FAKE/lmt" venv/bin/python ;;
esac
"""


class Cloud:
    """Directory in which the fake commands keep what they are told to do and what they did."""

    def __init__(self, directory: Path):
        self.directory = directory

    def requests(self, *states: str) -> None:
        (self.directory / "requests").write_text("\n".join(states) + "\n")

    def training(self, text: str) -> None:
        self._program(self.directory / "lmt", text)

    def gcloud(self) -> None:
        self._program(self.directory / "bin/gcloud", GCLOUD)
        self._program(self.directory / "bin/uv", UV)
        self._program(self.directory / "bin/python3", "exit 0")

    def calls(self, *words: str) -> int:
        lines = (self.directory / "calls").read_text().splitlines()
        return sum(all(word in line for word in words) for line in lines)

    def _program(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{textwrap.dedent(text)}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    (tmp_path / "home").mkdir()
    fake = Cloud(tmp_path)
    fake.gcloud()
    fake.training("exit 0")
    fake.requests("WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    return fake


def job(**changes: object) -> TpuJob:
    return TpuJob(**{"name": "t", "accelerator": "v5p-16", "zone": "z", "install": "lmt", **changes})  # type: ignore[arg-type]


def run(tpu_job: TpuJob, write: object = None) -> tuple[int, list[str]]:
    lines: list[str] = []
    output = write or lines.append
    return TpuRun(tpu_job, CONFIG, "my.yaml", output, interval=0.01, settle=0).run(), lines  # type: ignore[arg-type]


def test_a_run_is_asked_for_installed_and_followed_to_its_end(cloud: Cloud) -> None:
    cloud.training('echo "$* $NAME"; cat "$2"; echo step 3')
    code, lines = run(job(env={"NAME": "a b"}, setup="touch mounted"))
    assert code == 0
    assert lines.index("train my.yaml a b") < lines.index("  num_train_steps: 3") < lines.index("step 3")
    assert "t is WAITING_FOR_RESOURCES" in lines
    assert (cloud.directory / "home/t/mounted").exists()
    assert "--python venv/bin/python lmt" in (cloud.directory / "installed").read_text()
    assert cloud.calls("create t", "--node-id=t", "--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5") == 1
    assert cloud.calls("delete") == 0
    assert "delete it by: gcloud compute tpus queued-resources delete t --force --quiet --zone=z" in lines[-1]


def test_a_preempted_run_is_asked_for_again_and_goes_on(cloud: Cloud) -> None:
    cloud.requests("ACTIVE", "WAITING_FOR_RESOURCES ACTIVE")
    cloud.training("""
        if [ -f "$FAKE/checkpoint" ]; then echo step 2; exit 0; fi
        touch "$FAKE/checkpoint"; echo step 1; echo SUSPENDED > "$FAKE/states"; exit 75
    """)
    code, lines = run(job(delete=True))
    assert code == 0
    assert lines.index("step 1") < lines.index("starting again (1 of at most 100 times)") < lines.index("step 2")
    assert (cloud.calls("create"), cloud.calls("delete")) == (2, 2)


@pytest.mark.parametrize("code", [1, 137])
def test_a_machine_that_is_lost_with_its_training_counts_as_preempted(cloud: Cloud, code: int) -> None:
    cloud.requests("ACTIVE", "ACTIVE")
    cloud.training(f"""
        [ ! -f "$FAKE/checkpoint" ] || exit 0
        touch "$FAKE/checkpoint"; echo SUSPENDING > "$FAKE/states"; exit {code}
    """)
    assert run(job())[0] == 0
    assert cloud.calls("create") == 2


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_failure_of_the_training_is_not_repeated(cloud: Cloud, code: int) -> None:
    cloud.training(f"echo broken; exit {code}")
    exit_code, lines = run(job())
    assert exit_code == code
    assert cloud.calls("start.sh") == 1
    assert "  | broken" in lines


def test_a_training_that_was_stopped_on_a_tpu_that_stays_is_started_there_again(cloud: Cloud) -> None:
    cloud.training('[ ! -f "$FAKE/checkpoint" ] || exit 0; touch "$FAKE/checkpoint"; exit 75')
    assert run(job())[0] == 0
    assert (cloud.calls("create"), cloud.calls("start.sh")) == (1, 2)


def test_preemptions_have_a_limit(cloud: Cloud) -> None:
    cloud.training("exit 75")
    with pytest.raises(MachineError, match="more than 1 times"):
        run(job(restarts=1))
    assert cloud.calls("start.sh") == 2


@pytest.mark.slow
def test_a_connection_that_breaks_is_taken_up_at_the_next_line(cloud: Cloud) -> None:
    (cloud.directory / "breaks").touch()
    cloud.training("echo step 1; sleep 1.5; echo step 2")
    code, lines = run(job())
    assert code == 0
    assert [line for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    assert any("connecting again" in line for line in lines)


def test_requests_that_fail_again_and_again_are_given_up_with_the_reason(cloud: Cloud) -> None:
    cloud.requests("FAILED", "FAILED", "FAILED", "FAILED")
    with pytest.raises(MachineError, match="3 requests failed, the last one: no quota"):
        run(job())


def test_an_installation_that_fails_is_shown(cloud: Cloud) -> None:
    with pytest.raises(MachineError, match=r"(?s)install.sh.*no such bucket"):
        run(job(setup="echo no such bucket; false"))


@pytest.mark.parametrize("delete", [True, False])
def test_an_interrupt_lets_the_training_save_and_then_does_as_asked(cloud: Cloud, delete: bool) -> None:
    cloud.training("trap 'echo saved; exit 75' TERM; echo step 1; while :; do sleep 0.1; done")
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if line == "step 1":
            raise KeyboardInterrupt

    assert run(job(delete=delete), write)[0] == 75
    assert lines.count("step 1") == 1
    assert "saved" in lines
    assert cloud.calls("delete") == delete


def test_an_interrupt_may_leave_the_training_and_the_same_command_follows_it(cloud: Cloud) -> None:
    cloud.training("echo step 1; sleep 1; echo step 2")

    def write(line: str) -> None:
        if line == "step 1":
            raise KeyboardInterrupt

    assert run(job(on_interrupt="leave", delete=True), write)[0] == 130
    assert cloud.calls("delete") == cloud.calls("stop.sh") == 0
    code, lines = run(job())
    assert code == 0
    assert "the training is running already" in lines
    assert [line for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    assert cloud.calls("create") == cloud.calls("install.sh") == 1


def test_an_interrupt_in_the_queue_withdraws_the_request_if_asked(cloud: Cloud) -> None:
    cloud.requests("WAITING_FOR_RESOURCES")

    def write(line: str) -> None:
        if "WAITING" in line:
            raise KeyboardInterrupt

    assert run(job(delete=True), write)[0] == 130
    assert cloud.calls("delete") == 1


def test_without_gcloud_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="install the Google Cloud CLI"):
        run(job())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My_Run"}, "lower-case"),
        ({"accelerator": "v5p"}, "such as v5p-128"),
        ({"accelerator": "tpu7x-128"}, "lmt launch k8s"),
        ({"create_options": ("network=x",)}, "no option of gcloud"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(**changes)


@pytest.mark.parametrize(
    ("accelerator", "kind", "runtime"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_the_software_of_each_generation(accelerator: str, kind: str, runtime: str) -> None:
    commands = [*describe_commands(job(accelerator=accelerator), "my.yaml")]
    assert f"--accelerator-type={kind} --runtime-version={runtime}" in commands[1]


def test_a_dry_run_prints_the_commands_and_runs_none(cloud: Cloud, lmt: Lmt) -> None:
    done = lmt(
        *("launch", "tpu", "gpt2_nano", "--accelerator", "v5p-16", "--zone", "z", "--project", "p"),
        *("--spot", "--gcloud=--network=n", "--dry-run", "trainer.num_train_steps=5"),
    )
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [line.split()[3:5] for line in commands] == [
        *(["queued-resources", "create"], ["queued-resources", "describe"], ["tpu-vm", "scp"]),
        *[["tpu-vm", "ssh"]] * 4,
        ["queued-resources", "delete"],
    ]
    assert "--spot --network=n --quiet --zone=z --project=p" in commands[0]
    assert not (cloud.directory / "calls").exists()


def test_the_source_is_packed_for_a_pip_that_builds_it(cloud: Cloud) -> None:
    import tarfile

    cloud.training("exit 0")
    assert run(job(install=None))[0] == 0
    with tarfile.open(cloud.directory / "home/t/source.tar.gz") as archive:
        names = archive.getnames()
    assert {"lm_trainer/pyproject.toml", "lm_trainer/lm_trainer/__init__.py", "lm_trainer/cli/main.py"} <= {*names}
    assert not [name for name in names if "__pycache__" in name]
    installed = (cloud.directory / "installed").read_text()
    assert "--constraint constraints.txt lm_trainer[tpu] @ file://" in installed
