"""Peak memory of this process during a part of a program."""

from __future__ import annotations

import re
import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)
_SAMPLE_SECONDS = 0.002


class PeakMemory:
    """Context manager that measures the peak of the memory in use, by reading it every two milliseconds.

    Memory of mapped files does not count. Linux only: `peak_bytes` is 0 on other systems.

    Attributes:
        peak_bytes: largest number of bytes so far.
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
        while _STATUS.exists():
            match = _ANONYMOUS.search(_STATUS.read_text())
            self.peak_bytes = max(self.peak_bytes, 1024 * int(match[1]) if match else 0)
            if self._done.wait(_SAMPLE_SECONDS):
                return
