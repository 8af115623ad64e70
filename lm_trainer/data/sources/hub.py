"""Data sets of the Hugging Face hub: their files, found by split and read in place. No code of theirs is run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.core.hub import why_no_hub
from lm_trainer.core.inside import check_name
from lm_trainer.data.sources.arrow import ArrowFiles
from lm_trainer.data.sources.base import FileSource, Shard, SourceConfig, Split
from lm_trainer.data.sources.compression import UNPACKED, compression_of, suffix
from lm_trainer.data.sources.csv_files import CsvFiles
from lm_trainer.data.sources.files import File, check_listed
from lm_trainer.data.sources.jsonl import JsonLines
from lm_trainer.data.sources.parquet import Parquet
from lm_trainer.data.sources.text import TextFiles

_ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "eval"),
}
_READERS: tuple[type[FileSource], ...] = (Parquet, JsonLines, ArrowFiles, CsvFiles, TextFiles)


class HuggingFace(SourceConfig):
    """A data set of the Hugging Face hub, whose files are Parquet, JSON lines, Arrow, CSV or text.

    The files of a split are those that the data set's card lists, or else those that the split's name stands in.
    """

    type: Literal["huggingface"] = "huggingface"
    id: str
    """The name on the hub, such as `org/dataset`."""
    name: str | None = None
    """The configuration (subset) of the data set; its default one, if absent."""
    revision: str | None = None
    """Branch, tag or commit; `main`, if absent. A branch is resolved to its commit, which the cache then holds to."""
    stream: bool = True
    """Read over the network while tokenising; `false` keeps a copy of every file in the hub's cache first."""
    splits: list[str] = Field(default=["train", "validation"], min_length=1, max_length=2)
    """The split to train on and, if any, that to evaluate on."""

    takes_urls: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls
        if split == "validation" and len(self.splits) < 2:
            return []
        wanted = self.splits[split == "validation"]
        repository = _look_up(self)
        paths = repository.data_files(self.name, wanted)
        if not paths:
            # A validation split that nobody asked for by name may be absent.
            if split == "validation" and "splits" not in self.changed_fields:
                return []
            of_name = f" of {self.name!r}" if self.name else ""
            raise UserError(
                f"data.id: {self.id} has no files for the split {wanted!r}{of_name} "
                f"(files: {', '.join(sorted(repository.sizes)[:8])}). Set data.splits or data.name, or name the files "
                f"with train_urls: hf://datasets/{self.id}@{repository.commit[:12]}/..."
            )
        shards: list[Shard] = []
        for reader, run in groupby(paths, _reader):
            files = [repository.file(path, download=not self.stream) for path in run]
            if reader is TextFiles and fields:
                raise UserError(f"data.format reads the fields {', '.join(fields)}, but {files[0].url} is bare text")
            shards += reader().shards_of_files(files, text_key, fields)
        return shards


class _Repository(NamedTuple):
    """A data set at one commit."""

    id: str
    commit: str
    sizes: dict[str, int]
    """Bytes of every file."""
    configs: list[dict[str, Any]]
    """The card's list of configurations: `config_name`, `data_files`, `default`."""

    def file(self, path: str, *, download: bool) -> File:
        url = check_listed(f"hf://datasets/{self.id}@{self.commit}/{check_name(path, self.id)}")
        return File(url, self.sizes[path], self.commit, download)

    def data_files(self, name: str | None, split: str) -> list[str]:
        """Returns the files of a split, sorted; [] where there are none."""
        if self.configs:
            return self._listed(self._config(name), split)
        readable = sorted(path for path in self.sizes if _is_readable(path))
        if name is not None:
            readable = [path for path in readable if name in re.split(r"[/.]", path)]
        by_split = {known: [path for path in readable if _names_split(path, known)] for known in {*_ALIASES, split}}
        # Files that name no split at all are the train split.
        if not any(by_split.values()):
            return readable if split == "train" else []
        return by_split[split]

    def _config(self, name: str | None) -> dict[str, Any]:
        names = [config.get("config_name", "default") for config in self.configs]
        if name is None:
            usual = [
                config for config in self.configs if config.get("default") or config.get("config_name") == "default"
            ]
            if usual or len(self.configs) == 1:
                return (usual or self.configs)[0]
            raise UserError(f"data.name: {self.id} has several configurations; set one of: {', '.join(names)}")
        if name not in names:
            raise UserError(f"data.name: {self.id} has no configuration {name!r}; it has: {', '.join(names)}")
        return self.configs[names.index(name)]

    def _listed(self, config: dict[str, Any], split: str) -> list[str]:
        entries = config.get("data_files") or []
        if isinstance(entries, str) or (isinstance(entries, list) and entries and isinstance(entries[0], str)):
            entries = [{"split": "train", "path": entries}]
        found: list[str] = []
        for entry in entries:
            if entry["split"] == split:
                patterns = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
                found += [path for path in sorted(self.sizes) if any(_matches(path, p) for p in patterns)]
        return found


def _names_split(path: str, split: str) -> bool:
    words = "|".join(re.escape(word) for word in _ALIASES.get(split, (split,)))
    return re.search(rf"(^|[/_.\-\d])({words})([/_.\-\d]|$)", path, re.IGNORECASE) is not None


def _matches(path: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./")
    # `*` of fnmatch crosses directories, so `**/` needs no more than it; it may also stand for no directory at all.
    return path == pattern or fnmatch.fnmatchcase(path, pattern.replace("**/", "*"))


def _is_readable(path: str) -> bool:
    name = path.rpartition("/")[2]
    # Archives often lie beside the files that they hold, whose rows would come twice.
    if compression_of(path) == "zip":
        return False
    return (
        _find_reader(path) is not None and not name.startswith(".") and name.lower() not in ("readme.md", "license.txt")
    )


def _find_reader(path: str) -> type[FileSource] | None:
    return next((reader for reader in _READERS if suffix(path) in reader.suffixes), None)


def _reader(path: str) -> type[FileSource]:
    reader = _find_reader(path)
    if reader is None:
        known = ", ".join(ending for reader in _READERS for ending in reader.suffixes)
        raise UserError(f"data.id: cannot tell from its name how to read {path} (known: {known}; packed: {UNPACKED})")
    return reader


def _look_up(source: HuggingFace) -> _Repository:
    from huggingface_hub import HfApi

    if (why := why_no_hub()) is not None:
        raise UserError(
            f"data.id: {source.id!r} is on the Hugging Face hub, and {why}; name local files with train_urls"
        )
    with _hub_errors(source):
        info = HfApi().dataset_info(source.id, revision=source.revision, files_metadata=True)
    sizes = {sibling.rfilename: int(sibling.size or 0) for sibling in info.siblings or []}
    card = info.card_data.to_dict() if info.card_data else {}
    configs = [config for config in card.get("configs") or [] if config.get("data_files")]
    return _Repository(source.id, info.sha or "", sizes, configs)


@contextmanager
def _hub_errors(source: HuggingFace) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's client raises its own, httpx's, and OSErrors
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"data.id: the Hugging Face hub gave no data set {source.id!r}"
            + (f" at {source.revision!r}" if source.revision else "")
            + f": {type(error).__name__}: {reason}. Without network name local files with train_urls"
        ) from None
