"""Tar archives, read from front to back."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Self

from lm_trainer.data.sources.files import File, damaged, open_binary, open_seekable

_MOST_LINKS = 16
"""Links that may lead to one another."""


class Member(NamedTuple):
    """A file of an archive, or a link to one."""

    name: str
    read: Callable[[], bytes | None]
    """Returns the content, as long as no later member was asked for; None for a link to no file of the archive."""


@contextmanager
def open_tar(file: File) -> Iterator[Iterator[Member]]:
    """Opens an archive, whose files and links are read in their order.

    Raises:
        UserError: as `open_binary`, also where the archive was cut short between two of its members.
    """
    try:
        with (
            ExitStack() as opened,
            open_binary(file) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Whole) as archive,
        ):
            yield _members(archive, _Linked(file, opened))
    except tarfile.TarError as error:
        raise damaged(file, error) from None


def _members(archive: tarfile.TarFile, linked: _Linked) -> Iterator[Member]:
    for member in archive:
        if member.isfile():
            yield Member(member.name, partial(_content, archive, member))
        elif member.islnk() or member.issym():
            yield Member(member.name, partial(linked.read, member))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    assert opened is not None
    return opened.read()


class _Linked:
    """The contents that links of an archive lead to, read from a second opening of it: they may be anywhere in it."""

    def __init__(self, file: File, opened: ExitStack):
        self._file, self._opened = file, opened
        self._archive: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}

    def read(self, link: tarfile.TarInfo) -> bytes | None:
        """Returns the content of the file that a link leads to; None if that is no file of the archive."""
        if self._archive is None:
            stream = self._opened.enter_context(open_seekable(self._file))
            self._archive = self._opened.enter_context(tarfile.TarFile(fileobj=stream, mode="r", tarinfo=_Whole))
            self._members = {posixpath.normpath(member.name): member for member in self._archive}
        member: tarfile.TarInfo | None = link
        for _ in range(_MOST_LINKS):
            # The target of a hard link is a path in the archive, that of a symbolic one is seen from the link.
            directory = "" if member.islnk() else posixpath.dirname(member.name)
            member = self._members.get(posixpath.normpath(posixpath.join(directory, member.linkname)))
            if member is None or member.isfile():
                break
        return None if member is None or not member.isfile() else _content(self._archive, member)


class _Whole(tarfile.TarInfo):
    """A member of an archive that does not end without the zeros that end one; to Python that is an end like any."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("unexpected end of data")
        return super().frombuf(buf, encoding, errors)
