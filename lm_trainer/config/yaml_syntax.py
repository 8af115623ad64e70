"""The YAML dialect of configurations. Numbers and booleans follow YAML 1.2, and all other plain scalars are text.

PyYAML follows YAML 1.1, in which `6E-4` is text, `on` is a boolean, `010` is eight, `12:30:00` is a number, and
`2026-01-01` is a date.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

INCLUDE = "!include"
MERGE = "tag:yaml.org,2002:merge"
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_LEADING_ZERO = "leading-zero"

_DEEP = re.compile(r"(?:[\[{]\s*){100}")

_DIGITS = r"\d+(?:_\d+)*"
# Tag, pattern and possible first characters of each kind, which are tried in order. All other scalars are text.
_PLAIN_SCALARS = (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_LEADING_ZERO, r"[-+]?0[\d_]+(?:\.[\d_]*)?(?:[eE][-+]?\d+)?", list("-+0")),
    (_INT, r"[-+]?(?:0|[1-9]\d*(?:_\d+)*)|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    (
        _FLOAT,
        rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS}|{_DIGITS}(?=[eE]))(?:[eE][-+]?\d+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    (MERGE, r"<<", ["<"]),
)


class NodeLoader(yaml.SafeLoader):
    """Composes nodes, each of which has as `explicit_tag` the tag in the text, or None.

    It does not construct objects, since the caller interprets tags.
    """

    # PyYAML adds resolvers to the class's table. Without a new table, the YAML 1.1 resolvers would remain.
    yaml_implicit_resolvers = {}

    def _set_explicit_tag(self, node: Node, tag: str | None) -> Node:
        node.explicit_tag = tag  # type: ignore[attr-defined]
        return node

    def compose_scalar_node(self, anchor: Any) -> Node:
        tag = self.peek_event().tag  # type: ignore[union-attr]
        return self._set_explicit_tag(super().compose_scalar_node(anchor), tag)

    def compose_sequence_node(self, anchor: Any) -> Node:
        tag = self.peek_event().tag  # type: ignore[union-attr]
        return self._set_explicit_tag(super().compose_sequence_node(anchor), tag)

    def compose_mapping_node(self, anchor: Any) -> Node:
        tag = self.peek_event().tag  # type: ignore[union-attr]
        return self._set_explicit_tag(super().compose_mapping_node(anchor), tag)


for _tag, _pattern, _first in _PLAIN_SCALARS:
    NodeLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


class _PlainDumper(yaml.SafeDumper):
    """Quotes text that `NodeLoader` would not read as text."""

    yaml_implicit_resolvers = NodeLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        # Writes equal values twice, because anchors (`&id001`) would confuse readers.
        del data
        return True

    def represent_text(self, data: str) -> Node:
        # Unprintable text needs a style, because it would otherwise be folded over several lines.
        return self.represent_scalar(_STR, data, style=None if data.isprintable() else '"')


_PlainDumper.add_representer(str, _PlainDumper.represent_text)


def compose(text: str) -> Node | None:
    """Parses a text with at most one document, and returns the root node; None if the document is empty.

    Raises:
        yaml.YAMLError: if the text is not YAML.
        RecursionError: if the text is nested too deeply.
    """
    check_depth(text)
    loader = NodeLoader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def check_depth(text: str) -> None:
    """Raises RecursionError if a hundred lists or blocks are open at once, which PyYAML takes seconds to read."""
    if _DEEP.search(text):
        raise RecursionError("nested too deeply")


def explicit_tag(node: Node) -> str | None:
    """Returns the tag of a node in the text (`!include`, or `!!str` in its long form), or None."""
    return getattr(node, "explicit_tag", None)


def parse_scalar(node: ScalarNode) -> str | int | float | bool | None:
    """Converts a scalar without an explicit tag to its value.

    Raises:
        ValueError: if a number has a leading zero.
    """
    text = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag == _INT:
        return int(text, 0)
    if node.tag == _FLOAT:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if node.tag == _LEADING_ZERO:
        plain = re.sub(r"^([-+]?)[0_]+(?=\d)", r"\1", text)
        raise ValueError(f"{text} has a leading zero, which some read as octal; write {plain}, or quote it for text")
    return text


def to_flow_yaml(value: object) -> str:
    """Writes plain data as YAML on one line, from which `compose` reads the same data."""
    text = yaml.dump(
        value, Dumper=_PlainDumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=sys.maxsize
    )
    # PyYAML writes a document end marker after a bare scalar.
    return text.removesuffix("\n").removesuffix("\n...")


__all__ = [
    "INCLUDE",
    "MERGE",
    "MappingNode",
    "Node",
    "ScalarNode",
    "SequenceNode",
    "check_depth",
    "compose",
    "explicit_tag",
    "parse_scalar",
    "to_flow_yaml",
]
