"""Dotted names for the leaves of nested containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def leaf_name(path: tuple[Any, ...]) -> str:
    """Joins a key path of `jax.tree_util` to a name, such as `blocks.0.attention.qkv`."""
    # Dict keys have the attribute `key`, attributes have `name`, and sequence indices have `idx`.
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by dotted name, in the order of `jax.tree.leaves`.

    Raises:
        ValueError: if two leaves have the same name.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {leaf_name(path): leaf for path, leaf in pairs}
    # In `{"a.b": x, "a": {"b": y}}`, one of the leaves would be lost.
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the tree have the same dotted name")
    return leaves


def from_named_leaves(like: Any, named: dict[str, Any]) -> Any:
    """Builds a tree with the structure of `like` and the leaves of `named`. This is the inverse of `named_leaves`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [named[leaf_name(path)] for path, _ in paths])


def nest_named_leaves(named: Mapping[str, Any]) -> dict[str, Any]:
    """Builds nested dicts from leaves by dotted name."""
    nested: dict[str, Any] = {}
    for name, leaf in named.items():
        *path, last = name.split(".")
        node = nested
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return nested
