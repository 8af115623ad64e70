"""Datasets of the Hugging Face hub. Their files are found by split and read in place. No dataset scripts are run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.core.hub import hub_unreachable_reason
from lm_trainer.core.safe_names import check_relative_path
from lm_trainer.data.sources.arrow import ArrowFiles
from lm_trainer.data.sources.base import FileSource, Shard, SourceConfig, Split
from lm_trainer.data.sources.compression import UNPACKED, file_suffix, find_compression
from lm_trainer.data.sources.csv_files import CsvFiles
from lm_trainer.data.sources.files import File, check_listed_url
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
    """A dataset of the Hugging Face hub, with files in Parquet, JSON lines, Arrow, CSV or text format.

    The files of a split are listed in the dataset card. If there is no list, file names must contain the split name.
    """

    type: Literal["huggingface"] = "huggingface"
    id: str
    """The name on the hub, such as `org/dataset`."""
    name: str | None = None
    """The configuration (subset) of the dataset; null means its default configuration."""
    revision: str | None = None
    """Branch, tag or commit; null means `main`. A branch is resolved to its commit, which is recorded in the cache."""
    stream: bool = True
    """Reads files over the network while tokenising; `false` first downloads every file to the hub cache."""
    splits: list[str] = Field(default=["train", "validation"], min_length=1, max_length=2)
    """The split for training and, optionally, the split for validation."""

    takes_urls: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls
        if split == "validation" and len(self.splits) < 2:
            return []
        split_name = self.splits[split == "validation"]
        repository = _look_up_repository(self)
        paths = repository.data_files(self.name, split_name)
        if not paths:
            # The default validation split may be absent.
            if split == "validation" and "splits" not in self.changed_fields:
                return []
            of_name = f" of {self.name!r}" if self.name else ""
            raise UserError(
                f"data.id: {self.id} has no files for the split {split_name!r}{of_name} "
                f"(files: {', '.join(sorted(repository.sizes)[:8])}). Set data.splits or data.name, or name the files "
                f"with train_urls: hf://datasets/{self.id}@{repository.commit[:12]}/..."
            )
        shards: list[Shard] = []
        for reader, run in groupby(paths, _require_reader):
            files = [repository.make_file(path, download=not self.stream) for path in run]
            if reader is TextFiles and fields:
                raise UserError(f"data.format reads the fields {', '.join(fields)}, but {files[0].url} is bare text")
            shards += reader().shards_of_files(files, text_key, fields)
        return shards


_CardConfig = dict[str, Any]
"""A configuration of a dataset card, with `config_name`, `data_files` and `default`."""


class _Repository(NamedTuple):
    """A dataset at one commit."""

    id: str
    commit: str
    sizes: dict[str, int]
    """Size in bytes of every file, keyed by path."""
    configs: list[_CardConfig]
    """The configurations that the dataset card lists."""

    def make_file(self, path: str, *, download: bool) -> File:
        url = check_listed_url(f"hf://datasets/{self.id}@{self.commit}/{check_relative_path(path, self.id)}")
        return File(url, self.sizes[path], self.commit, download)

    def data_files(self, name: str | None, split: str) -> list[str]:
        """Returns the sorted files of a split; [] if it has none."""
        if self.configs:
            return self._list_config_files(self._select_config(name), split)
        readable = sorted(path for path in self.sizes if _is_readable(path))
        if name is not None:
            readable = [path for path in readable if name in re.split(r"[/.]", path)]
        by_split = {
            split_name: [path for path in readable if _has_split_name(path, split_name)]
            for split_name in {*_ALIASES, split}
        }
        # If no file name contains a split name, all files belong to the train split.
        if not any(by_split.values()):
            return readable if split == "train" else []
        return by_split[split]

    def _select_config(self, name: str | None) -> _CardConfig:
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

    def _list_config_files(self, config: _CardConfig, split: str) -> list[str]:
        entries = config.get("data_files") or []
        if isinstance(entries, str) or (isinstance(entries, list) and entries and isinstance(entries[0], str)):
            entries = [{"split": "train", "path": entries}]
        paths: list[str] = []
        for entry in entries:
            if entry["split"] == split:
                patterns = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
                paths += [path for path in sorted(self.sizes) if any(_matches_pattern(path, p) for p in patterns)]
        return paths


def _has_split_name(path: str, split: str) -> bool:
    words = "|".join(re.escape(word) for word in _ALIASES.get(split, (split,)))
    return re.search(rf"(^|[/_.\-\d])({words})([/_.\-\d]|$)", path, re.IGNORECASE) is not None


def _matches_pattern(path: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./")
    # `*` of fnmatch also matches slashes, so `*` can replace `**/`, which may also match no directory.
    return path == pattern or fnmatch.fnmatchcase(path, pattern.replace("**/", "*"))


def _is_readable(path: str) -> bool:
    name = path.rpartition("/")[2]
    # Archives are often stored with their unpacked files, whose rows would be read twice.
    if find_compression(path) == "zip":
        return False
    return (
        _find_reader(path) is not None and not name.startswith(".") and name.lower() not in ("readme.md", "license.txt")
    )


def _find_reader(path: str) -> type[FileSource] | None:
    return next((reader for reader in _READERS if file_suffix(path) in reader.suffixes), None)


def _require_reader(path: str) -> type[FileSource]:
    reader = _find_reader(path)
    if reader is None:
        known_endings = ", ".join(ending for reader in _READERS for ending in reader.suffixes)
        raise UserError(
            f"data.id: cannot tell from its name how to read {path} (known: {known_endings}; packed: {UNPACKED})"
        )
    return reader


def _look_up_repository(source: HuggingFace) -> _Repository:
    from huggingface_hub import HfApi

    if (reason := hub_unreachable_reason()) is not None:
        raise UserError(
            f"data.id: {source.id!r} is on the Hugging Face hub, and {reason}; name local files with train_urls"
        )
    with _translate_hub_errors(source):
        info = HfApi().dataset_info(source.id, revision=source.revision, files_metadata=True)
    sizes = {sibling.rfilename: int(sibling.size or 0) for sibling in info.siblings or []}
    card = info.card_data.to_dict() if info.card_data else {}
    configs = [config for config in card.get("configs") or [] if config.get("data_files")]
    return _Repository(source.id, info.sha or "", sizes, configs)


@contextmanager
def _translate_hub_errors(source: HuggingFace) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub client raises its own errors, httpx errors and OSErrors
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"data.id: the Hugging Face hub gave no data set {source.id!r}"
            + (f" at {source.revision!r}" if source.revision else "")
            + f": {type(error).__name__}: {reason}. Without network name local files with train_urls"
        ) from None
