"""Separation of parameters that the optimizer does not update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def split_params(tree: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a tree by parameter name into the entries of all other parameters, and the entries of `names`."""
    others = {name: x for name, x in tree.items() if name not in names}
    return others, {name: tree[name] for name in tree if name in names}
