"""Tar archives, read from front to back."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lm_trainer.data.sources.files import File, damaged, open_binary


@contextmanager
def open_tar(file: File) -> Iterator[tarfile.TarFile]:
    """Opens an archive, whose members are read in their order.

    Raises:
        UserError: as `open_binary`, also where the archive was cut short between two of its members.
    """
    try:
        with open_binary(file) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_Whole) as archive:
            yield archive
    except tarfile.TarError as error:
        raise damaged(file, error) from None


class _Whole(tarfile.TarInfo):
    """A member of an archive that does not end without the zeros that end one; to Python that is an end like any."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("unexpected end of data")
        return super().frombuf(buf, encoding, errors)
