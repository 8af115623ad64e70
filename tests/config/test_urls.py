"""Refusal of URLs by every key that takes a path, found by walking the configuration classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeGuard, get_args

import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.config.value_type import type_tags, value_type_of_field
from lm_trainer.core.config import Config, PathType
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.core.files import KEYS_WITH_URLS, local_path
from lm_trainer.ladder import ModelLadder
from lm_trainer.run.config.run_config import RunConfig

PATH_LIKE = re.compile(r"(^|_)(log)?(dir|path|file|folder|directory|from|checkpoint)s?(_|$)")
"""Names of keys that hold a path, where their value is text."""
NAMES_NO_PATH = {"hf_family", "load_checkpoint", "gradient_checkpointing"}


class Key(NamedTuple):
    path: tuple[str | int, ...]
    config: type[Config]
    blocks: dict[str, Any]
    """The smallest document in which the key can stand."""

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)

    @property
    def annotation(self) -> Any:
        return self.config.model_fields[str(self.path[-1])]

    @property
    def takes(self) -> PathType | None:
        field = self.annotation
        return next((x for x in (*field.metadata, *parts(field.annotation)) if isinstance(x, PathType)), None)

    def document(self, value: str) -> dict[str, Any]:
        inner: Any = yaml.safe_load(yaml.safe_dump(self.blocks))
        document = inner
        for part in self.path[:-1]:
            inner = inner[part]
        inner[self.path[-1]] = value
        return document


def parts(annotation: Any) -> Iterator[Any]:
    """An annotation, all that it is made of, and the marks on it."""
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from parts(part)


def keys(config: type[Config], path: tuple[str | int, ...] = (), above: tuple[type[Config], ...] = ()) -> Iterator[Key]:
    """Every key below a class, as often as there are kinds of blocks that it can stand in."""
    for name, field in config.model_fields.items():
        yield Key((*path, name), config, {})
        for value_type in value_type_of_field(field).alternatives_or_self():
            entry = (*path, name) if value_type.kind == "model" else (*path, name, "a")
            classes = parts(value_type.inner) if value_type.kind == "mapping" else value_type.models
            for model in filter(is_config, classes):
                if model not in above:
                    for key in keys(model, entry, (*above, model)):
                        yield key._replace(
                            blocks=with_block(key.blocks, entry, {"type": t} if (t := tag(model)) else {})
                        )


def is_config(part: Any) -> TypeGuard[type[Config]]:
    return isinstance(part, type) and issubclass(part, Config)


def tag(model: type[Config]) -> str | None:
    return next(iter(type_tags(model)), None)


def with_block(blocks: Mapping[str, Any], path: tuple[str | int, ...], block: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(blocks)
    inner: Any = result
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    inner[path[-1]] = {**block, **inner.get(path[-1], {})}
    return result


ALL = [(root, key) for root in (RunConfig, ModelLadder) for key in keys(root)]
PATHS = [(root, key) for root, key in ALL if key.takes is not None]


def test_every_key_that_holds_a_path_says_whether_it_takes_urls() -> None:
    assert len({(key.config, key.path[-1]) for _, key in ALL}) > 300
    unmarked = set()
    for _, key in ALL:
        held = set(parts(key.annotation.annotation))
        is_path = any(isinstance(part, type) and issubclass(part, PurePath) for part in held)
        named_so = str in held and PATH_LIKE.search(str(key.path[-1])) and key.path[-1] not in NAMES_NO_PATH
        if key.takes is None and (is_path or named_so):
            unmarked.add(f"{key.config.__name__}.{key.path[-1]}")
    assert not unmarked, f"use LocalPath, or a mark that says which URLs work: {', '.join(sorted(unmarked))}"


def test_the_keys_that_a_refusal_names_are_those_that_take_urls() -> None:
    marked = {key.dotted for root, key in PATHS if root is RunConfig and key.takes and key.takes.schemes}
    lists = {"data.train_urls", "data.validation_urls"}
    # The sets of a mixture have the keys of a single set.
    assert {name for name in marked if ".a." not in name} == set(KEYS_WITH_URLS) - lists
    assert lists <= {key.dotted for _, key in ALL}


SOME = {(key.config, key.path[-1]): (root, key) for root, key in reversed(PATHS)}
"""Each key of a class once."""


@pytest.mark.parametrize(("root", "key"), SOME.values(), ids=[f"{c.__name__}.{n}" for c, n in SOME])
def test_a_url_that_does_not_work_is_refused_where_it_is_written(root: Any, key: Key, in_tmp_path: Path) -> None:
    file = in_tmp_path / "c.yaml"
    assert key.takes is not None
    for url in ("nfs://b/x", "nfs:/b/x") if key.takes.schemes else ("gs://b/x", "gs:/b/x", "S3://b"):
        file.write_text(yaml.safe_dump(key.document(url)))
        with pytest.raises(ConfigError) as refused:
            load(file, [], root)
        line = next(text for text in refused.value.problems if url in text)
        line_number = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if url in text)
        # A key that takes one path or several names the one that is refused.
        assert re.match(rf"{file}:{line_number}:\d+: {re.escape(key.dotted)}(\.0)?: {url} is a URL", line)
        assert all(name in line for name in KEYS_WITH_URLS)
    assert [path.name for path in in_tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "setting",
    [
        "data.cache_dir=gs://b/cache",
        "data.cache_dir=memory://cache",
        "data.train_urls=[gs://b/x.jsonl]",
        "data.source={type: cache, path: 'https://host/cache'}",
        "trainer.tracker={type: tensorboard, logdir: 's3://b/boards'}",
        "trainer.jax_compilation_cache_dir=gs://b/compiled",
        "trainer.log_dir=/a/b:c/logs",
        "trainer.log_dir=./gs:/b",
        "trainer.log_dir=run:1/logs",
        "data.tokenizer=org/name",
        "initialize_from_hf=org/name@main",
        "initialize_from_hf=true",
    ],
)
def test_what_works_is_left_as_it_is(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{}")
    assert load(file, [setting], RunConfig).config.trainer


def test_a_run_directory_in_a_bucket_is_answered_with_the_copy_beside_the_checkpoints() -> None:
    with pytest.raises(ValueError, match=r"with a bucket as trainer\.checkpointer\.base_path a copy of it is kept"):
        RunConfig.model_validate({"trainer": {"log_dir": "s3://b/x"}})


def test_a_url_of_a_file_is_answered_with_its_path() -> None:
    for url in ("file:///tmp/x", "file:/tmp/x"):
        with pytest.raises(UserError, match=f"{url} is a URL; write the path alone: /tmp/x$"):
            local_path(url)


def test_a_url_that_lost_a_slash_in_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gs:/b/x is a URL"):
        RunConfig.model_validate({"trainer": {"log_dir": Path("gs://b/x")}})
    with pytest.raises(ValueError, match=r"gs:/b/x has lost a slash of its URL.*gs://"):
        RunConfig.model_validate({"data": {"cache_dir": Path("gs://b/x")}})
    assert RunConfig.model_validate({"trainer": {"log_dir": tmp_path}}).trainer.log_dir == str(tmp_path)
