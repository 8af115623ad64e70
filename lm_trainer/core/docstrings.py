"""Reads the docstrings of configuration fields from the source code on demand."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def field_docs(model: Any) -> dict[str, str]:
    """Returns the docstring of each documented field, from the most derived class that documents it.

    A class that declares a field again, for another default, needs no docstring of its own.

    pydantic would read the docstrings at class creation, which takes half of the import time of all configurations.
    """
    docs = {}
    for name in model.model_fields:
        owners = (base for base in model.__mro__ if name in inspect.get_annotations(base))
        texts = (_read_field_docs(inspect.getsourcefile(x)).get(x.__qualname__, {}).get(name) for x in owners)
        if text := next(filter(None, texts), None):
            docs[name] = text
    return docs


@functools.cache
def _read_field_docs(file: str | None) -> dict[str, dict[str, str]]:
    """Returns the docstrings of all classes of a file, keyed by qualified class name and then by field."""
    if file is None or not Path(file).is_file():
        return {}
    return dict(_iter_class_docs(ast.parse(Path(file).read_text(encoding="utf-8")), ""))


def _iter_class_docs(node: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, dict(_iter_field_docs(child.body))
            yield from _iter_class_docs(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield from _iter_class_docs(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _iter_class_docs(child, prefix)


def _iter_field_docs(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = getattr(below.value, "value", None)
            if isinstance(text, str):
                yield field.target.id, inspect.cleandoc(text)
