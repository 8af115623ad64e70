"""What SIGTERM and SIGINT do: ask the training loop to stop between two steps, or end other long work."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, Self

from lm_trainer.core.errors import Preempted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Asked:
    """While active, SIGTERM and SIGINT ask for an end; the second one ends the process at once with 128 + its number.

    Attributes:
        requested: the name of the signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            sys.stderr.flush()
            os._exit(128 + number)
        self.requested = signal.Signals(number).name
        self._answer()

    def _answer(self) -> None:
        """What the first signal does beyond being noted."""
        raise NotImplementedError


class StopRequest(_Asked):
    """While active, the first signal sets `requested`; the second ends the process at once with 128 + its number.

    Before `arm` is called there is nothing to save, and the first signal ends the run by raising `Preempted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._armed = False

    def arm(self) -> None:
        """From now on there is state that is worth saving."""
        self._armed = True

    def _answer(self) -> None:
        if not self._armed:
            raise preempted(self.requested, 0)
        os.write(2, f"\n{self.requested}: stopping after this step; once more stops at once\n".encode())


class Interruption(_Asked):
    """While active, SIGTERM and SIGINT end what goes on by an exception; the second ends the process at once.

    Python loses an exception that is raised while it collects garbage, which is why `requested` can be asked as well.

    Args:
        kept: what to tell the user of the work that was done.
    """

    def __init__(self, kept: str):
        super().__init__()
        self._kept = kept

    def came(self) -> bool:
        """Whether a signal came."""
        return self.requested is not None

    def error(self) -> BaseException:
        """What ends the work."""
        if self.requested == "SIGINT":
            return KeyboardInterrupt()
        return Preempted(f"stopped by {self.requested}; {self._kept}")

    def _answer(self) -> None:
        raise self.error()


def preempted(signal: str | None, step: int) -> Preempted:
    """What ends a run that a signal has stopped, here or in another process, after `step` steps."""
    by = signal or "another process"
    if not step:
        return Preempted(f"stopped by {by} before the first step; there was nothing to save")
    return Preempted(f"stopped by {by} after step {step}; everything is saved, and the same command goes on from here")
