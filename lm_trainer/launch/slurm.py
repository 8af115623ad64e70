"""A run as a SLURM job: its batch script, and the submission."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.core.errors import EXIT_PREEMPTED, MachineError, UserError
from lm_trainer.launch.local import emulation

_LAST_SECONDS = 300
"""Longest time in which the other processes of a job step may go on after the first has ended, to save and stop."""


@dataclass(frozen=True)
class SlurmJob:
    """The request to SLURM; None leaves a setting to the site's defaults.

    Raises:
        UserError: when the processes do not spread equally over nodes, or GPUs over processes.
    """

    name: str
    processes: int
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_process: int | None = None
    """Cores of each process; None: the job takes whole nodes, and its processes share all cores and memory."""
    time: str | None = None
    """The limit, as SLURM writes it: `24:00:00`, `2-00`."""
    partition: str | None = None
    account: str | None = None
    notice: int = 120
    """Seconds before the limit at which the processes are asked to save and stop."""
    requeue: bool = True
    """Queue a stopped job again, to go on where it was."""
    devices_per_process: int | None = None
    """Emulate so many CPU devices in each process; None: the processes of a node share its GPUs."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, as `--mem=0`."""

    def __post_init__(self) -> None:
        if self.processes % self.nodes:
            raise UserError(f"{self.processes} processes do not spread equally over {self.nodes} nodes")
        if self.gpus_per_node and self.gpus_per_node % self.processes_per_node:
            raise UserError(
                f"the {self.processes_per_node} processes of a node cannot share {self.gpus_per_node} GPUs equally; "
                f"one process for each GPU is usual: -n {self.nodes * self.gpus_per_node}"
            )
        if self.gpus_per_node and self.devices_per_process:
            raise UserError(
                f"the processes of a node share its {self.gpus_per_node} GPUs, or have {self.devices_per_process} "
                f"emulated CPU devices each; give one of --gpus-per-node and --devices-per-process"
            )
        wrong = [option for option in self.extra if not option.startswith("-")]
        if wrong:
            raise UserError(f"{wrong[0]!r} is no option of sbatch; write it as --sbatch --mem=0")

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes


def batch_script(job: SlurmJob, command: Sequence[str], directory: Path) -> str:
    """The script for sbatch.

    Args:
        job: the request to SLURM.
        command: run by each process.
        directory: where it runs.
    """
    options = {
        "job-name": job.name,
        "chdir": str(directory),
        "nodes": job.nodes,
        "ntasks": job.processes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_process,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"TERM@{job.notice}",
        "open-mode": "append",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    # In either direction: the site may have set the other as its default.
    lines += ["--requeue" if job.requeue else "--no-requeue"]
    if job.cpus_per_process is None:
        lines += ["--exclusive", "--mem=0"]
    lines += job.extra
    again = f"""\
if [ "$code" -eq {EXIT_PREEMPTED} ]; then
    # scancel and scontrol requeue send SIGTERM as well: then SLURM has ended the job, and what follows is decided.
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = COMPLETING ]; then
        echo "the job was cancelled or requeued: this script does not queue it again"
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""
    variables = {} if job.devices_per_process is None else emulation(os.environ, job.devices_per_process)
    # SLURM gives a task one core unless told otherwise: on nodes of its own the job frees its tasks from that.
    cores = "cpu-bind=none" if job.cpus_per_process is None else f"cpus-per-task={job.cpus_per_process}"
    return (
        "#!/bin/bash\n"
        + "".join(f"#SBATCH {line}\n" for line in lines)
        + "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        + f"""
# At SIGTERM, which also comes {job.notice} s before the time is over, the processes save and end with {EXIT_PREEMPTED}.
# This shell must survive it.
trap : TERM

srun --{cores} --kill-on-bad-exit=0 --wait={_LAST_SECONDS} --label {shlex.join(command)}
code=$?
{again if job.requeue else ""}exit "$code"
"""
    )


def submit(script: str) -> str:
    """Hands a script to sbatch and returns its answer.

    Raises:
        UserError: if there is no SLURM, or SLURM refuses the job.
        MachineError: if SLURM does not answer.
    """
    try:
        # The controller of a busy cluster may take a minute; one that is down would never answer.
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError(
            "there is no sbatch on this machine; submit from a login node, or leave --submit out to get the script"
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError("sbatch did not answer within two minutes") from None
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
