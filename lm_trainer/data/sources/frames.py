"""Reads files of one or more compressed frames as byte streams that detect truncation."""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable
from typing import IO, Any, NamedTuple, Protocol

from lm_trainer.core.errors import MachineError, UserError

_CHUNK = 1 << 20

_MAX_WINDOW = 1 << 31
"""Maximum window size of zstd in bytes (`--long=31`). Memory is allocated only for the window size of the file."""


class DamagedFrames(Exception):
    """Compressed bytes that are damaged."""


class _Decompressor(Protocol):
    """A decompressor of one frame."""

    @property
    def eof(self) -> bool:
        """True after the end of the frame."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Bytes after the end of the frame."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Decompresses more bytes."""
        ...


class _FrameFormat(NamedTuple):
    start: Callable[[], _Decompressor]
    """Returns a decompressor of one frame."""
    error: type[Exception]
    """Error type that the decompressor raises."""
    zeros: bool
    """True if zeros may follow a frame, as padding of xz or at the end of a tape."""


def open_frames(stored: IO[bytes], compression: str, name: str) -> IO[bytes]:
    """Opens the unpacked bytes of all frames of `stored`, since parallel compressors write many frames.

    After a good frame, Python's readers silently ignore everything from the first unreadable frame on.

    Args:
        stored: the compressed bytes.
        compression: `zstd`, `xz`, `lzma` or `bz2`.
        name: name of the file, for messages.

    Raises:
        UserError: if the package for the compression is missing.
    """
    return io.BufferedReader(_FrameReader(stored, _find_frame_format(compression, name), name), _CHUNK)  # pyright: ignore[reportReturnType]


def _find_frame_format(compression: str, name: str) -> _FrameFormat:
    if compression == "bz2":
        return _FrameFormat(bz2.BZ2Decompressor, OSError, zeros=True)
    if compression in ("xz", "lzma"):
        return _FrameFormat(lzma.LZMADecompressor, lzma.LZMAError, zeros=True)
    try:
        import zstandard
    except ImportError:
        raise UserError(f"cannot read {name}: .zst needs a package; run: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    return _FrameFormat(decompressor.decompressobj, zstandard.ZstdError, zeros=False)


class _FrameReader(io.RawIOBase):
    """Unpacks all frames.

    Raises EOFError if the last frame is incomplete, and DamagedFrames for bytes outside a frame.
    """

    def __init__(self, stored: IO[bytes], kind: _FrameFormat, name: str):
        self._stored, self._kind, self._name = stored, kind, name
        self._packed, self._ready = b"", memoryview(b"")
        self._frame: _Decompressor | None = None
        self._frames = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._unpack_chunk():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack_chunk(self) -> bool:
        """Unpacks the next chunk. Returns False at the end."""
        packed = self._packed or self._stored.read(_CHUNK)
        if not packed:
            if self._frame is not None:
                raise EOFError("the last frame is incomplete")
            return False
        self._packed = b""
        if begins := self._frame is None:
            if self._frames and self._kind.zeros and not (packed := packed.lstrip(b"\0")):
                return True
            self._frame, self._frames = self._kind.start(), self._frames + 1
        try:
            self._ready = memoryview(self._frame.decompress(packed))
        except self._kind.error as error:
            raise self._specific_error(error, begins) from None
        except MemoryError:
            raise self._memory_error("") from None
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True

    def _specific_error(self, error: Exception, begins: bool) -> Exception:
        """Converts an error of a decompressor, whose package has a single type for all errors, to a specific error."""
        text = str(error).lower()
        if "memory" in text:
            return self._memory_error(f" ({error})")
        if "dictionary" in text:
            return UserError(f"cannot read {self._name}: it was packed with a dictionary, which is not read; unpack it")
        if begins and self._frames > 1:
            return DamagedFrames(f"something else follows its end ({error})")
        return DamagedFrames(str(error))

    def _memory_error(self, reason: str) -> MachineError:
        return MachineError(
            f"cannot unpack {self._name}: there is too little memory for the window that it was packed with{reason}; "
            "read fewer files at a time (data.num_workers), or pack it with a smaller window"
        )
