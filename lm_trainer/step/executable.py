"""A compiled program with its trace, and a hash by which two programs are compared."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Executable:
    """A compiled program, and what it was made of."""

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled

    @classmethod
    def make(cls, jitted: Any, *args: Any) -> Executable:
        """Compiles for arguments like these, which may be shapes."""
        traced = jitted.trace(*args)
        return cls(traced, traced.lower().compile())

    def fingerprint(self) -> str:
        """A hash of the optimised program, without what names source lines."""
        return program_hash(self.compiled)

    def jaxpr(self) -> str:
        """The traced program, as JAX prints it."""
        return str(self.traced.jaxpr)

    def hlo(self) -> str:
        """The optimised program, as XLA prints it."""
        return self.compiled.as_text() or ""

    def memory(self) -> Any:
        """XLA's memory analysis, None where the backend has none."""
        return self.compiled.memory_analysis()


def program_hash(compiled: jax.stages.Compiled) -> str:
    """SHA-256 (16 hex digits) over the instructions of a compiled program; equal programs compute equal bits."""
    text = compiled.as_text() or ""
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    body = re.sub(r",? metadata=\{[^}]*\}", "", text[first.start() if first else 0 :])
    # On a CPU: into how many tasks an element-wise loop is cut, by the threads of the process that compiled it.
    body = re.sub(r'"outer_dimension_partitions":\[[^\]]*\],?', "", body)
    return hashlib.sha256(body.encode()).hexdigest()[:16]
