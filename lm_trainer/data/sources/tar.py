"""Tar archives, read sequentially."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Self

from lm_trainer.data.sources.files import File, damage_error, open_binary, open_seekable

_MAX_LINKS = 16
"""Maximum length of a chain of links."""


class Member(NamedTuple):
    """A file in an archive, or a link to one."""

    name: str
    read: Callable[[], bytes | None]
    """Returns the content; None for a link whose target is not in the archive. Valid until the next member is
    requested."""


@contextmanager
def open_tar(file: File) -> Iterator[Iterator[Member]]:
    """Opens an archive, and yields an iterator over its files and links in order.

    Raises:
        UserError: see `open_binary`. Also raised if the archive is truncated between two members.
    """
    try:
        with (
            ExitStack() as opened,
            open_binary(file) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictTarInfo) as archive,
        ):
            yield _iter_members(archive, _LinkResolver(file, opened))
    except tarfile.TarError as error:
        raise damage_error(file, error) from None


def _iter_members(archive: tarfile.TarFile, linked: _LinkResolver) -> Iterator[Member]:
    for member in archive:
        if member.isfile():
            yield Member(member.name, partial(_read_content, archive, member))
        elif member.islnk() or member.issym():
            yield Member(member.name, partial(linked.read, member))


def _read_content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    assert opened is not None
    return opened.read()


class _LinkResolver:
    """Resolves the links of an archive. Their targets may be anywhere, so the archive is opened a second time."""

    def __init__(self, file: File, opened: ExitStack):
        self._file, self._opened = file, opened
        self._archive: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}

    def read(self, link: tarfile.TarInfo) -> bytes | None:
        """Returns the content of the target of a link; None if the target is not a file in the archive."""
        if self._archive is None:
            stream = self._opened.enter_context(open_seekable(self._file))
            self._archive = self._opened.enter_context(
                tarfile.TarFile(fileobj=stream, mode="r", tarinfo=_StrictTarInfo)
            )
            self._members = {posixpath.normpath(member.name): member for member in self._archive}
        member: tarfile.TarInfo | None = link
        for _ in range(_MAX_LINKS):
            # Hard links hold a path within the archive, and symbolic links hold a path relative to the link.
            directory = "" if member.islnk() else posixpath.dirname(member.name)
            member = self._members.get(posixpath.normpath(posixpath.join(directory, member.linkname)))
            if member is None or member.isfile():
                break
        return None if member is None or not member.isfile() else _read_content(self._archive, member)


class _StrictTarInfo(tarfile.TarInfo):
    """A member that raises an error if the archive ends without the final zeros.

    Python accepts this as a normal end.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("unexpected end of data")
        return super().frombuf(buf, encoding, errors)
