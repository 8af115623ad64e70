"""Groups of held-out sets by their tags, and the means over each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def groups_of(labels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The groups of a tree of tags, with the sets in each: `a/b` belongs to `a/b` and to `a`.

    Args:
        labels: the name of each set -> its tags. The name is a tag as well.

    Returns:
        Group -> names of its sets, for all that are not one set under its own name; first "", all sets, where there
        are several.
    """
    found: dict[str, list[str]] = {"": list(labels)} if len(labels) > 1 else {}
    for name, tags in labels.items():
        for tag in (name, *tags):
            parts = tag.split("/")
            for depth in range(1, len(parts) + 1):
                group = "/".join(parts[:depth])
                if group != name and name not in (members := found.setdefault(group, [])):
                    members.append(name)
    return {group: members for group, members in found.items() if group not in labels or len(members) > 1}


def group_metrics(sums: Mapping[str, Mapping[str, float]], members: Sequence[str]) -> dict[str, float]:
    """The means over a group of sets: micro means weigh every token, macro means every set alike.

    Args:
        sums: of each set: `loss`, in nats, and `weight`, where they are known with `bytes`, those of the text.
        members: the names of the sets.

    Returns:
        `micro_loss` and `macro_loss` in nats per token; where the bytes of all are known, `micro_bpb` and `macro_bpb`.
    """
    each = [sums[name] for name in members]
    found = _micro_and_macro(each, "weight", 1.0, "loss")
    if all(of_set.get("bytes") for of_set in each):
        found |= _micro_and_macro(each, "bytes", math.log(2), "bpb")
    return found


def _micro_and_macro(each: Sequence[Mapping[str, float]], by: str, unit: float, name: str) -> dict[str, float]:
    total = math.fsum(x[by] for x in each)
    micro = math.fsum(x["loss"] for x in each) / unit / total if total else math.nan
    macro = math.fsum(x["loss"] / unit / x[by] if x[by] else math.nan for x in each) / len(each)
    return {f"micro_{name}": micro, f"macro_{name}": macro}
