"""Peak memory of this process during a part of a program."""

from __future__ import annotations

import threading

from lm_trainer.core.runtime import resident_bytes

_SAMPLE_SECONDS = 0.002


class PeakMemory:
    """Context manager that measures the peak of the resident memory, by reading it every two milliseconds.

    Attributes:
        peak_bytes: largest number of bytes so far; 0 where `resident_bytes` is unknown.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while (size := resident_bytes()) is not None:
            self.peak_bytes = max(self.peak_bytes, size)
            if self._done.wait(_SAMPLE_SECONDS):
                return
