"""Reads YAML files as plain data with the position of each value, and resolves `!include`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import JsonValue

from lm_trainer.config.document import Document, KeyPath, Origin, Problem, find_similar
from lm_trainer.config.yaml_syntax import (
    INCLUDE,
    MERGE,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    compose,
    explicit_tag,
    parse_scalar,
)
from lm_trainer.core.files import expand_home, shell_variable_problem

# Larger than any configuration, so that a data file passed by mistake is not read in full.
MAX_BYTES = 4 << 20
MAX_VALUES = 50_000
"""More values than any configuration has, since a few nested aliases can expand to billions."""
MAX_FILES = 200
MAX_DEPTH = 50


def read_file(path: Path) -> Document:
    """Reads a file and its includes, and records problems. After a fatal problem, the document has no data."""
    document = Document()
    try:
        data = _Builder(document).build_file(path, (), ())
    except ValueError as error:
        document.problems.append(Problem(Origin((0, 0, 0), str(path)), str(error)))
        return document
    except _TooLarge:
        return document
    if isinstance(data, dict):
        document.data = data
    elif () not in document.unreadable:
        document.add_problem((), "expected `key: value` lines at the top level")
    return document


def parse_override_value(text: str, path: KeyPath, origin: Origin) -> JsonValue:
    """Parses the value of an override. Included files are relative to the working directory.

    Raises:
        ValueError: if the text is not YAML, or the value is invalid.
    """
    try:
        root = compose(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is not valid YAML: {_describe_syntax_error(error, text)[2]}") from None
    if root is None:
        return None
    document = Document()
    try:
        value = _Builder(document).build_node(root, path, _Source(Path("override"), origin))
    except _TooLarge:
        value = None
    if document.problems:
        raise ValueError("; ".join(problem.text for problem in document.problems))
    return value


class _TooLarge(Exception):
    """The input is larger than any configuration. The problem has already been recorded."""


@dataclass(frozen=True)
class _Source:
    """A file that is being read, or an override."""

    path: Path
    override: Origin | None = None
    number: int = 0
    including: tuple[Path, ...] = ()
    """The chain of including files, including this file."""

    def locate(self, line: int, column: int) -> Origin:
        return self.override or Origin((self.number, line, column), f"{self.path}:{line}:{column}")

    def origin(self, node: Node) -> Origin:
        return self.locate(node.start_mark.line + 1, node.start_mark.column + 1)


class _Builder:
    """Builds the plain data of a document from the nodes of its files.

    Attributes:
        files: number of files read.
        values: number of values so far. Values of an alias count at each of its uses.
        open: ids of the nodes that enclose the current node, outermost first.
    """

    def __init__(self, document: Document):
        self.document = document
        self.files = 0
        self.values = 0
        self.open: list[int] = []

    def build_file(self, path: Path, key_path: KeyPath, including: tuple[Path, ...]) -> JsonValue:
        """Reads the file `path` as the value at `key_path`.

        Raises:
            ValueError: if the file is missing, unreadable or empty.
        """
        source = _Source(path, number=self.files, including=(*including, _resolve_links(path)))
        self.files += 1
        text = _read_file_text(path, including)
        try:
            root = compose(text)
        except (yaml.YAMLError, RecursionError) as error:
            line, column, message = _describe_syntax_error(error, text)
            return self._reject(source.locate(line, column), message, key_path)
        if root is None:
            raise ValueError("is empty; write {} for all defaults")
        if explicit_tag(root) == INCLUDE:
            message = f"a whole file cannot be an {INCLUDE}; include the value of a key (data: {INCLUDE} data.yaml)"
            return self._reject(source.origin(root), message, key_path)
        return self.build_node(root, key_path, source)

    def _reject(self, origin: Origin, message: str, key_path: KeyPath) -> None:
        self.document.problems.append(Problem(origin, message))
        self.document.unreadable.add(key_path)

    def build_node(self, node: Node, key_path: KeyPath, source: _Source) -> JsonValue:
        """Returns the plain data of a node. If it is invalid, records a problem and returns None."""
        origin = source.origin(node)
        self.document.values[key_path] = origin
        self.values += 1
        if self.values > MAX_VALUES:
            self.document.problems.append(Problem(origin, f"more than {MAX_VALUES} values, counting those of aliases"))
            raise _TooLarge
        # Every alias is the same node object, so a recursive alias would never end.
        if id(node) in self.open:
            return self._reject(origin, "this alias contains itself", key_path)
        if len(self.open) >= MAX_DEPTH:
            return self._reject(origin, f"nested more than {MAX_DEPTH} levels deep", key_path)
        self.open.append(id(node))
        try:
            return self._build_value(node, key_path, source, origin)
        except ValueError as error:
            return self._reject(origin, str(error), key_path)
        finally:
            self.open.pop()

    def _build_value(self, node: Node, key_path: KeyPath, source: _Source, origin: Origin) -> JsonValue:
        tag = explicit_tag(node)
        if tag == INCLUDE:
            return self._build_include(node, key_path, source, origin)
        if tag is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            raise ValueError(f"the tag {shown} is not supported, only {INCLUDE}; quote a value to make it text")
        if isinstance(node, ScalarNode):
            return parse_scalar(node)
        if isinstance(node, SequenceNode):
            return [self.build_node(item, (*key_path, index), source) for index, item in enumerate(node.value)]
        assert isinstance(node, MappingNode)
        return self._build_mapping(node, key_path, source)

    def _build_mapping(self, node: MappingNode, key_path: KeyPath, source: _Source) -> dict[str, JsonValue]:
        merged: dict[str, tuple[Node, Node]] = {}
        own_entries: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE and explicit_tag(key_node) is None:
                # Merges nodes, not values, because a key written here must not be built from the merged key.
                for key, pair in self._collect_merged_keys(value_node, key_path, source).items():
                    merged.setdefault(key, pair)
                continue
            key = self._key_text(key_node, source)
            if key in own_entries:
                first = source.origin(own_entries[key][0]).text
                problem = f"the key {key!r} stands here twice; the first is at {first}"
                self.document.problems.append(Problem(source.origin(key_node), problem))
            elif key is not None:
                own_entries[key] = (key_node, value_node)
        result = {}
        for key, (key_node, value_node) in {**merged, **own_entries}.items():
            self.document.keys[*key_path, key] = source.origin(key_node)
            result[key] = self.build_node(value_node, (*key_path, key), source)
        return result

    def _add_problem(self, node: Node, source: _Source, key_path: KeyPath, message: str) -> None:
        self.document.problems.append(Problem(source.origin(node), message))
        self.document.unreadable.add(key_path)

    def _key_text(self, node: Node, source: _Source) -> str | None:
        """Returns the text of a key. If it is not text, records a problem and returns None."""
        if isinstance(node, ScalarNode) and explicit_tag(node) is None:
            with contextlib.suppress(ValueError):
                value = parse_scalar(node)
                if isinstance(value, str):
                    return value
        shown = repr(node.value) if isinstance(node, ScalarNode) else "a list or a block"
        message = f"a key must be text, got {shown}"
        self.document.problems.append(Problem(source.origin(node), message + ("; quote it" if "'" in shown else "")))
        return None

    def _collect_merged_keys(self, node: Node, key_path: KeyPath, source: _Source) -> dict[str, tuple[Node, Node]]:
        """Returns the keys that `<<:` merges from one mapping or from a list of mappings, of which the first wins."""
        if explicit_tag(node) == INCLUDE:
            self._add_problem(
                node, source, key_path, f"{INCLUDE} cannot be merged with `<<`; include the value of a key instead"
            )
            return {}
        mappings = node.value if isinstance(node, SequenceNode) else [node]
        entries: dict[str, tuple[Node, Node]] = {}
        for mapping in mappings:
            if not isinstance(mapping, MappingNode) or id(mapping) in self.open:
                self._add_problem(
                    mapping, source, key_path, "`<<` takes an alias of a block, or a list of such aliases"
                )
                continue
            self.open.append(id(mapping))
            for key_node, value_node in mapping.value:
                if key_node.tag == MERGE:
                    for key, pair in self._collect_merged_keys(value_node, key_path, source).items():
                        entries.setdefault(key, pair)
                elif (key := self._key_text(key_node, source)) is not None:
                    entries.setdefault(key, (key_node, value_node))
            self.open.pop()
        return entries

    def _build_include(self, node: Node, key_path: KeyPath, source: _Source, origin: Origin) -> JsonValue:
        name = node.value
        if not isinstance(node, ScalarNode) or not name.strip():
            raise ValueError(f"{INCLUDE} takes the name of a file, relative to this one")
        if "://" in name:
            raise ValueError(f"cannot include {name}: only local files can be included")
        if problem := shell_variable_problem(name):
            raise ValueError(problem)
        # Normalised as text, so that messages show `b.yaml`, not `conf/../b.yaml`.
        path = Path(os.path.normpath(source.path.parent / expand_home(name.strip())))
        if _resolve_links(path) in source.including:
            chain = " -> ".join(p.name for p in (*source.including, path))
            raise ValueError(f"{path} includes itself: {chain}")
        if self.files > MAX_FILES:
            self.document.problems.append(Problem(origin, f"more than {MAX_FILES} files are included"))
            raise _TooLarge
        try:
            value = self.build_file(path, key_path, source.including)
        except ValueError as error:
            raise ValueError(f"cannot include {path}: {error}") from None
        # The root of the included file has already set this, unless the file could not be read.
        self.document.values.setdefault(key_path, origin)
        return value


def _resolve_links(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _read_file_text(path: Path, including: Sequence[Path]) -> str:
    """Reads the text of a file. `including` is the chain of files that include it.

    Raises:
        ValueError: if the file cannot be read; gives the reason and a remedy.
    """
    try:
        if path.is_dir():
            inside = path / "config.yaml"
            hint = f"; did you mean {inside}?" if inside.is_file() else ""
            raise ValueError(f"is a directory, expected a YAML file{hint}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"no such file{_suggest_similar_file(path, including)}") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB; is it a configuration?")
    try:
        # Some editors on Windows write a byte order mark.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"is not UTF-8 text (byte 0x{raw[error.start]:02x} in line {line})") from None


def _suggest_similar_file(path: Path, including: Sequence[Path]) -> str:
    for candidate in (
        path.with_name(f"{path.name}.yaml"),
        Path("configs") / path.name,
        Path("configs") / f"{path}.yaml",
    ):
        if candidate.is_file() and _resolve_links(candidate) not in including:
            return f"; did you mean {candidate}?"
    if not path.parent.is_dir():
        return f", nor a directory {path.parent}"
    yaml_files = (p for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    names = sorted(p.name for p in yaml_files if _resolve_links(p) not in including)
    similar_names = find_similar(path.name, names)
    return f"; did you mean {path.parent / similar_names[0]}?" if similar_names else ""


def _describe_syntax_error(error: Exception, text: str) -> tuple[int, int, str]:
    """Returns the line, the column and the message of an error that stopped the parser."""
    if isinstance(error, RecursionError):
        return 1, 1, f"nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, yaml.reader.ReaderError):
        preceding = text[: error.position]
        line, column = preceding.count("\n") + 1, error.position - (preceding.rfind("\n") + 1) + 1
        return line, column, f"the character #x{ord(text[error.position]):04x} is not allowed in YAML"
    assert isinstance(error, yaml.MarkedYAMLError)
    # PyYAML's messages about the two most common mistakes are unclear.
    mark = error.problem_mark or error.context_mark
    message = str(error.problem or error.context)
    if "'\\t'" in message:
        message = "a tab; indent with spaces"
    elif "another document" in message:
        message = "a second document (---); one file holds one configuration"
    elif error.context:
        message = f"{message} ({error.context})"
    return (mark.line + 1, mark.column + 1, message) if mark else (1, 1, message)
