"""Reads files of other frameworks as plain data: YAML, JSON, TOML, and Python assignments. No code is run."""

from __future__ import annotations

import ast
import json
import operator
import re
import tomllib
from pathlib import Path

import yaml

from lm_trainer.config.yaml_nodes import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from lm_trainer.config.yaml_syntax import check_depth
from lm_trainer.core.errors import UserError

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which is extended to read `2e-5` as a number, as the frameworks do."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_foreign(file: Path) -> tuple[dict[str, object], list[str]]:
    """Returns the data of a file, parsed according to its suffix, and the Python lines that cannot be evaluated.

    Raises:
        UserError: if the file is missing, or its content does not match its suffix.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file}: is larger than {MAX_BYTES >> 20} MiB; is it a configuration?")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    skipped: list[str] = []
    try:
        if file.suffix == ".py":
            data, skipped = _evaluate_assignments(text)
        elif file.suffix == ".toml":
            data = tomllib.loads(text)
        elif file.suffix == ".json":
            data = json.loads(text)
        else:
            data = _parse_yaml(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a block of keys, found {type(data).__name__}")
    if _nesting_depth(data) > MAX_DEPTH:
        raise UserError(f"{file}: nested more than {MAX_DEPTH} levels deep; is it a configuration?")
    return data, skipped


def _nesting_depth(data: object) -> int:
    """Returns the nesting depth of blocks and lists."""
    values, depth = [data], 0
    while blocks := [value for value in values if isinstance(value, dict | list)]:
        depth += 1
        values = [value for block in blocks for value in (block.values() if isinstance(block, dict) else block)]
    return depth


def _parse_yaml(text: str) -> object:
    check_depth(text)
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_size(root)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # PyYAML's constructors do not check that a value matches its tag (`!!timestamp foo`, `!!int ""`).
        raise ValueError(f"a value is not what its tag says ({type(error).__name__}: {error})") from None
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """Raises ValueError if there are more values than any configuration has. Each use of an alias counts."""
    waiting, count = [root], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, counting those of aliases")
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _evaluate_assignments(text: str) -> tuple[dict[str, object], list[str]]:
    """Returns the values assigned in a Python file that depend only on literals and each other, and all other lines."""
    names: dict[str, object] = {}
    skipped = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name):
            skipped.append(ast.unparse(statement).splitlines()[0])
            continue
        try:
            names[target.id] = _evaluate_expression(statement.value, names)
        except (ValueError, ArithmeticError, TypeError):
            skipped.append(ast.unparse(statement).splitlines()[0])
    return names, skipped


def _evaluate_expression(node: ast.expr, names: dict[str, object]) -> object:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and (compute := _OPERATORS.get(type(node.op))):
        left, right = _evaluate_expression(node.left, names), _evaluate_expression(node.right, names)
        if not all(isinstance(operand, int | float) for operand in (left, right)):
            raise ValueError("not arithmetic")
        return compute(left, right)
    return ast.literal_eval(node)
