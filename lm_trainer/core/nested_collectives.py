"""Programs for CPUs that may hang after they were loaded from their serialized form.

XLA's runtime for CPUs runs independent operations of a program in any order. Only collectives have a fixed order, which
must be the same on all devices, and a serialized program keeps it only among the operations of one computation
(`ThunkSequenceSerDesProtobuf::FromProto` in XLA's `thunk_proto_serdes.cc`). In a loaded program, a collective in the
body of a loop and an independent one outside of it can start in either order. If devices start them in different
orders, they wait for one another until XLA ends the process after 40 seconds.
"""

from __future__ import annotations

import re

_ENTRY = re.compile(r"^ENTRY .*?^\}", re.MULTILINE | re.DOTALL)
_COLLECTIVE = re.compile(
    r" (?:ragged-all-to-all|all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def has_nested_collectives(hlo: str) -> bool:
    """Returns true if a program has collectives in loops, branches or calls, so that CPUs must not load it.

    Args:
        hlo: text of the compiled program.
    """
    return _COLLECTIVE.search(_ENTRY.sub("", hlo)) is not None
