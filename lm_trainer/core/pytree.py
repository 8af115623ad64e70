"""The type of nested containers of arrays."""

from __future__ import annotations

from typing import Any

PyTree = Any
"""A nested container of arrays (or of shapes, shardings, dtypes) whose structure is open, as `jax.tree` handles it."""
