"""Launches runs as SLURM jobs: builds the batch script and submits it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.core.errors import EXIT_PREEMPTED, MachineError, UserError
from lm_trainer.core.terminal import escape_line
from lm_trainer.launch.local import emulation_environ

_LAST_SECONDS = 300
"""Maximum time in seconds for the other processes of a job step to save and stop after the first one has ended."""


@dataclass(frozen=True)
class SlurmJob:
    """Settings of a run under SLURM. None leaves a setting to the defaults of the cluster.

    Raises:
        UserError: if the processes cannot be divided equally among the nodes, the GPUs of a node cannot be divided
            equally among its processes, or options are invalid or contradict each other.
    """

    name: str
    processes: int
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_process: int | None = None
    """Number of cores of each process. None requests exclusive nodes, whose processes share all cores and memory."""
    time: str | None = None
    """Time limit in SLURM's notation, such as `24:00:00` or `2-00`."""
    partition: str | None = None
    account: str | None = None
    notice: int = 120
    """Number of seconds before the time limit at which SLURM asks the processes to save and stop."""
    requeue: bool = True
    """Put a job that was stopped back into the queue, so that it resumes."""
    devices_per_process: int | None = None
    """Number of CPU devices to emulate in each process. With None, the processes of a node share its GPUs."""
    extra: tuple[str, ...] = ()
    """Extra options of sbatch, such as `--mem=0`."""

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
        wrong = [option for option in self.extra if not option.startswith("-") or escape_line(option) != option]
        if wrong:
            raise UserError(f"{wrong[0]!r} is no option of sbatch; write it as --sbatch --mem=0")

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes


def build_batch_script(job: SlurmJob, command: Sequence[str], directory: Path) -> str:
    """Builds the script for sbatch.

    Args:
        job: settings of the run.
        command: command that each process runs.
        directory: working directory of the job.

    Raises:
        UserError: if an option has a control character.
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
    lines = [_format_option(name, str(value)) for name, value in options.items() if value is not None]
    # Always set explicitly, because the default of the cluster may be either.
    lines += ["--requeue" if job.requeue else "--no-requeue"]
    if job.cpus_per_process is None:
        lines += ["--exclusive", "--mem=0"]
    lines += job.extra
    requeue_lines = f"""\
if [ "$code" -eq {EXIT_PREEMPTED} ]; then
    # scancel and scontrol requeue send SIGTERM as well: then SLURM has ended the job, and what follows is decided.
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = COMPLETING ]; then
        echo "the job was cancelled or requeued: this script does not queue it again"
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""
    variables = {} if job.devices_per_process is None else emulation_environ(os.environ, job.devices_per_process)
    # SLURM binds a task to one core by default. On exclusive nodes the job removes this restriction.
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
{requeue_lines if job.requeue else ""}exit "$code"
"""
    )


def _format_option(name: str, value: str) -> str:
    # A line feed would end the comment, so what follows it in the name of a directory would be run.
    if escape_line(value) != value:
        raise UserError(f"--{name} would be {value!r}, which does not fit on a line of the script; rename it")
    return f"--{name}={shlex.quote(value)}"


def submit_job(script: str) -> str:
    """Passes a script to sbatch and returns its output.

    Raises:
        UserError: if SLURM is not installed, or rejects the job.
        MachineError: if SLURM does not answer.
    """
    try:
        # The controller of a busy cluster may take a minute to reply; one that is down never replies.
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
