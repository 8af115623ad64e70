"""Runs one kind in a separate process: `python -m benchmarks.peers.worker KIND SHAPE WEIGHTS`.

The worker reports in one line of JSON when it is ready. Then it answers each line of its standard input with one line.
`run N` trains N steps, and `settle` returns the norm of the weights and resets the peak memory. The worker exits at the
end of its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.kinds import make
from benchmarks.peers.shapes import SHAPES


def main() -> None:
    name, shape, weights = sys.argv[1:]
    # Libraries may print to standard output, so only answers go to it, and all other output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        trainer = make(name, SHAPES[shape], Path(weights))
    except ModuleNotFoundError as error:
        say(missing=error.name)
        return
    say(device=trainer.device, facts=dict(trainer.facts))
    done, rested = 0, time.process_time()
    for line in sys.stdin:
        woken = time.process_time()
        command, *arguments = line.split()
        if command == "settle":
            say(norm=trainer.norm())
            reset_peak()
        else:
            count = int(arguments[0])
            steps = [time_step(trainer, done + i) for i in range(count)]
            done += count
            wall, cpu, loss = (list(x) for x in zip(*steps, strict=True))
            say(wall=wall, cpu=cpu, loss=loss, idle=woken - rested, peak=peak_bytes())
        rested = time.process_time()


def time_step(trainer: Any, index: int) -> tuple[float, float, float]:
    """Returns the step's wall seconds, the CPU seconds of all threads of this process, and the loss."""
    cpu, wall = time.process_time(), time.perf_counter()
    loss = trainer.step(index)
    return time.perf_counter() - wall, time.process_time() - cpu, loss


def reset_peak() -> None:
    """Resets the peak memory if the system supports it. Otherwise the peak is measured from the start."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
