"""Zstandard files as streams of bytes that know when they have been cut short."""

from __future__ import annotations

import io
from typing import IO, Any

from lm_trainer.core.errors import UserError

_CHUNK = 1 << 20


def open_zstd(stored: IO[bytes], name: str) -> IO[bytes]:
    """Opens the unpacked bytes of all frames of `stored`.

    Raises:
        UserError: if the package for it is missing.
    """
    return io.BufferedReader(_Unpacked(stored, name), _CHUNK)  # pyright: ignore[reportReturnType]


class _Unpacked(io.RawIOBase):
    """Raises EOFError where the last frame is incomplete or not of this format; the package's own reader ends there."""

    def __init__(self, stored: IO[bytes], name: str):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"cannot read {name}: .zst needs a package; run: pip install zstandard") from None
        self._stored, self._zstandard = stored, zstandard
        self._frame, self._packed = self._start(), b""
        self._ready = memoryview(b"")
        self._inside = False

    def _start(self) -> Any:
        return self._zstandard.ZstdDecompressor().decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._unpack():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> bool:
        """Unpacks a little more; False at the end."""
        packed = self._packed or self._stored.read(_CHUNK)
        if not packed:
            if self._inside:
                raise EOFError("the last frame is incomplete")
            return False
        try:
            self._ready = memoryview(self._frame.decompress(packed))
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        self._inside, self._packed = not self._frame.eof, self._frame.unused_data if self._frame.eof else b""
        # A file may be several frames one after another, as parallel compressors write them.
        if self._frame.eof:
            self._frame = self._start()
        return True
