"""A SLURM cluster of four nodes on this machine, from Debian's packages, which need not be installed."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from lm_trainer.launch.supervise import find_free_address

ROOT = Path(os.environ.get("LMT_SLURM", "/"))
"""The directory into which `.ci/get-slurm` has unpacked the packages; by default those that are installed."""
MISSING = (
    None
    if all((ROOT / "usr/sbin" / name).exists() for name in ("slurmctld-wlm", "slurmd-wlm", "munged"))
    else "needs SLURM as Debian packages it: run .ci/get-slurm DIRECTORY and set LMT_SLURM=DIRECTORY"
)
NODES = tuple(f"127.0.0.{number}" for number in range(1, 5))
"""Names of the nodes: addresses, so that each resolves without an entry in /etc/hosts."""
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
SlurmdParameters=config_overrides
# A node that answers no more is found lost after this time, and taken back when it answers again.
SlurmdTimeout=10
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The daemons of a cluster, and commands to it; a context manager.

    Attributes:
        directory: of state and logs.
        environment: variables that find the cluster.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        libraries = next(ROOT.glob("usr/lib/*/slurm-wlm"))
        path = os.pathsep.join([str(ROOT / "usr/bin"), os.environ["PATH"]])
        self.environment = {
            "LD_LIBRARY_PATH": f"{libraries.parent}:{libraries}",
            "PATH": path,
            "SLURM_CONF": str(directory / "slurm.conf"),
        }
        self._plugins = libraries
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name in ("state", "spool"):
            (self.directory / name).mkdir()
        text = _CONFIGURATION.format(
            host=socket.gethostname(),
            port=_free_port(),
            user=getpass.getuser(),
            directory=self.directory,
            plugins=self._plugins,
        )
        text += "".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={node} Port={_free_port()} CPUs=2 "
            f"RealMemory=1000 State=UNKNOWN\n"
            for node in NODES
        )
        (self.directory / "slurm.conf").write_text(text)
        key = f"{self.directory}/munge.key"
        subprocess.run([ROOT / "usr/sbin/mungekey", "-c", "-k", key], env=self._whole_environment(), check=True)
        files = [f"--{kind}-file={self.directory}/munge.{kind}" for kind in ("pid", "log", "seed")]
        munged = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={self.directory}/munge.socket", *files]
        self._start("munged", *munged)
        wait_for(lambda: (self.directory / "munge.socket").exists(), "munged does not start")
        self._start("slurmctld", "slurmctld-wlm", "-D")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "4", "the nodes do not come up")
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._start(node, "slurmd-wlm", "-D", "-N", node, "-d", str(ROOT / "usr/sbin/slurmstepd-wlm"))

    def lose_node(self, node: str) -> None:
        """Ends the daemons of a node and all that runs there, as a power cut does."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        processes = [*Path("/proc").glob("[0-9]*")]
        # First the daemons of steps, which would report the end of the tasks.
        daemons = [process for process in processes if _opens(process, self.directory / f"{node}.log")]
        tasks = [process for process in processes if _has_variable(process, f"SLURMD_NODENAME={node}")]
        for process in [*daemons, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)

    def program(self, name: str) -> str:
        """The file of one of SLURM's commands."""
        return str(ROOT / "usr/bin" / name)

    def ask(self, *command: str) -> str:
        """Runs one of SLURM's commands and returns its answer; "" where it fails."""
        return subprocess.run(
            [self.program(command[0]), *command[1:]],
            env=self._whole_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, with the reason of one that waits: `RUNNING`, `PENDING BeginTime`, `CANCELLED`."""
        state, _, reason = self.ask("squeue", "-h", "--states=all", "-j", job, "-o", "%T %r").partition(" ")
        return f"{state} {reason}" if state == "PENDING" else state

    def begin(self, job: str) -> None:
        """Starts a job soon that was queued again, after which SLURM makes it wait for two minutes."""
        # Not at once: in the second in which the nodes revoke the right of the stopped job, they would refuse it.
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def _start(self, name: str, program: str, *options: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [ROOT / "usr/sbin" / program, *options],
                env=self._whole_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _whole_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def _opens(process: Path, file: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(link) == str(file) for link in (process / "fd").iterdir())
    return False


def _has_variable(process: Path, variable: str) -> bool:
    with contextlib.suppress(OSError):
        return variable.encode() in (process / "environ").read_bytes().split(b"\0")
    return False


def wait_for(reached: Callable[[], bool], problem: str, seconds: float = 240) -> None:
    """Returns once something is so; fails with the problem after some time."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, problem
        time.sleep(0.1)


def _free_port() -> str:
    return find_free_address().rpartition(":")[2]
