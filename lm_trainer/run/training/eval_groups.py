"""Groups of held-out sets by tag, and their mean metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def group_by_tag(labels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the groups in a tree of tags, with their sets.

    A set with the tag `a/b` belongs to the groups `a/b` and `a`.

    Args:
        labels: tags of each set, by name of the set. The name is also a tag.

    Returns:
        Names of the sets in each group, by name of the group. Groups that consist of a single set with the same name
        are left out. If there are several sets, the first group is "", which contains all of them.
    """
    groups: dict[str, list[str]] = {"": list(labels)} if len(labels) > 1 else {}
    for name, tags in labels.items():
        for tag in (name, *tags):
            parts = tag.split("/")
            for depth in range(1, len(parts) + 1):
                group = "/".join(parts[:depth])
                if group != name and name not in (members := groups.setdefault(group, [])):
                    members.append(name)
    return {group: members for group, members in groups.items() if group not in labels or len(members) > 1}


def group_metrics(sums: Mapping[str, Mapping[str, float]], members: Sequence[str]) -> dict[str, float]:
    """Returns the means over a group of sets.

    Micro means weight all tokens equally, and macro means weight all sets equally.

    Args:
        sums: sums `loss` (in nats) and `weight` over each set, and `bytes` of the text if known, by name of the set.
        members: names of the sets in the group.

    Returns:
        `micro_loss` and `macro_loss` in nats per token. If the number of bytes is known for all sets, also `micro_bpb`
        and `macro_bpb` in bits per byte.
    """
    member_sums = [sums[name] for name in members]
    metrics = _micro_and_macro_means(member_sums, "weight", 1.0, "loss")
    if all(s.get("bytes") for s in member_sums):
        metrics |= _micro_and_macro_means(member_sums, "bytes", math.log(2), "bpb")
    return metrics


def _micro_and_macro_means(
    sums: Sequence[Mapping[str, float]], weight: str, unit: float, name: str
) -> dict[str, float]:
    total = math.fsum(x[weight] for x in sums)
    micro = math.fsum(x["loss"] for x in sums) / unit / total if total else math.nan
    macro = math.fsum(x["loss"] / unit / x[weight] if x[weight] else math.nan for x in sums) / len(sums)
    return {f"micro_{name}": micro, f"macro_{name}": macro}
