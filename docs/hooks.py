"""Fills the reference pages from the code when the site is built, so that they cannot be out of date.

A page asks for it with a line such as `<!-- generated: configuration -->`. Below a YAML block, the line
`<!-- generated: plot -->` draws what the block configures.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lm_trainer.core.config import format_duration

Schema = dict[str, Any]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page: replaces the markers."""
    drawn = re.sub(r"(```yaml\n((?:(?!```).)*)```\n\n)<!-- generated: plot -->", _with_plot, markdown, flags=re.DOTALL)
    generators = {"configuration": configuration, "command line": command_line}
    return re.sub(r"<!-- generated: ([\w ]+) -->", lambda match: generators[match[1]](), drawn)


def command_line() -> str:
    """What `lmt --help` and `lmt COMMAND --help` say, as Markdown."""
    command = [sys.executable, "-m", "typer", "cli.main", "utils", "docs", "--name", "lmt"]
    text = html.unescape(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return re.sub(r"^(#+ `lmt)", r"#\1", text, flags=re.MULTILINE)


def configuration() -> str:
    """Every key of the configuration with its type, default and meaning."""
    from lm_trainer.config.run import RunConfig

    return render(RunConfig.model_json_schema(mode="validation"))


def _with_plot(match: re.Match[str]) -> str:
    return f"{match[1]}```text\n{schedule_plot(match[2])}```"


def schedule_plot(text: str) -> str:
    """What `lmt config plot` draws of a configuration."""
    from lm_trainer.config.loader import load
    from lm_trainer.config.run import RunConfig
    from lm_trainer.plot import plot_schedules, to_text

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return to_text(plot_schedules(load(path, [], RunConfig).config), width=96, height=8)


def render(root: Schema) -> str:
    """One heading and table for every section of a JSON schema with `$defs`, in the order of the keys."""
    return "\n".join(_Renderer(root).section("", root))


class _Renderer:
    def __init__(self, root: Schema):
        self._definitions: dict[str, Schema] = root.get("$defs", {})
        self._written: set[str] = set()

    def section(self, path: str, schema: Schema) -> Iterator[str]:
        nested = []
        rows = []
        for key, field in schema.get("properties", {}).items():
            full = f"{path}.{key}" if path else key
            names = list(dict.fromkeys(self._references(field)))
            nested += [(full, name) for name in names]
            meaning = field.get("description") or (self._summary(names[0]) if len(names) == 1 else "")
            default = "" if names and isinstance(field.get("default"), dict | list) else _default(field, schema, key)
            cells = (f"`{key}`", self._type(field), default, " ".join(meaning.split()))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if rows:
            yield from ("| key | type | default | meaning |", "|---|---|---|---|", *rows, "")
        for full, name in nested:
            if name not in self._written:
                self._written.add(name)
                yield from self._definition(full, name)

    def _definition(self, path: str, name: str) -> Iterator[str]:
        schema = self._definitions[name]
        tag = _tag(schema)
        level = "#" * min(2 + path.count("."), 4)
        yield f"{level} `{path}`" + (f" with `type: {tag}`" if tag else "") + f" {{ #{name.lower()} }}"
        yield ""
        yield schema.get("description", "")
        yield ""
        yield from self.section(path, schema)

    def _references(self, schema: Any) -> Iterator[str]:
        """Names of the definitions with keys of their own that a field leads to."""
        if isinstance(schema, dict):
            if name := _reference(schema):
                target = self._definitions[name]
                yield from [name] if "properties" in target else self._references(target)
            for key, value in schema.items():
                if key not in ("default", "discriminator", "examples"):
                    yield from self._references(value)
        elif isinstance(schema, list):
            for item in schema:
                yield from self._references(item)

    def _summary(self, name: str) -> str:
        return self._definitions[name].get("description", "").split("\n\n")[0]

    def _type(self, schema: Schema) -> str:
        if name := _reference(schema):
            target = self._definitions[name]
            if "properties" not in target:
                return self._type(target)
            return f"[{_tag(target) or 'section'}](#{name.lower()})"
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return " or ".join(dict.fromkeys(self._type(option) for option in options))
        if "const" in schema or "enum" in schema:
            return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
        if schema.get("type") == "array":
            items = schema.get("items", {})
            return f"list of {self._type(items)}" if items else "list"
        if schema.get("type") == "object":
            return "mapping"
        names = {"null": "null", "integer": "whole number", "number": "number", "boolean": "true, false"}
        name = names.get(str(schema.get("type"))) or str(schema.get("format", "text"))
        return name + _bounds(schema)


def _reference(schema: Schema) -> str | None:
    return schema["$ref"].rsplit("/", 1)[-1] if "$ref" in schema else None


def _tag(schema: Schema) -> str | None:
    return schema.get("properties", {}).get("type", {}).get("const")


def _default(field: Schema, schema: Schema, key: str) -> str:
    if "default" in field:
        value = field["default"]
        if field.get("format") == "duration":
            value = format_duration(TypeAdapter(timedelta).validate_python(value))
        return f"`{json.dumps(value)}`"
    return "required" if key in schema.get("required", []) else ""


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return "".join(f"&nbsp;{sign}&nbsp;{schema[key]}" for key, sign in signs.items() if key in schema)
