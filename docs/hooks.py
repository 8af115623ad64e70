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
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page: replaces the markers."""
    drawn = re.sub(r"(```yaml\n((?:(?!```).)*)```\n\n)<!-- generated: plot -->", _with_plot, markdown, flags=re.DOTALL)
    generators = {
        "configuration": configuration,
        "command line": command_line,
        "what there is": what_there_is,
        "keys of Levanter": levanter_keys,
    }
    return re.sub(r"<!-- generated: ([\w ]+) -->", lambda match: generators[match[1]](), drawn)


def command_line() -> str:
    """The output of `lmt --help` and `lmt COMMAND --help` as Markdown."""
    command = [sys.executable, "-m", "typer", "cli.main", "utils", "docs", "--name", "lmt"]
    text = html.unescape(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return re.sub(r"^(#+ `lmt)", r"#\1", text, flags=re.MULTILINE)


def configuration() -> str:
    """Every key of the configuration with its type, default and meaning."""
    from lm_trainer.run.config import RunConfig

    return render(RunConfig.model_json_schema(mode="validation"))


def levanter_keys() -> str:
    """A table for each section of Levanter's reference: key, its default there, and what becomes of it here."""
    import yaml

    sections = yaml.safe_load((Path(__file__).parent / "levanter_keys.yaml").read_text(encoding="utf-8"))
    return "\n".join(_levanter_section(**section) for section in sections)


def _levanter_section(section: str, keys: dict[str, Any], type: str | None = None) -> str:
    title = f"`{section}`" + (f", `type: {type}`" if type else "")
    rows = (
        f"| `{key}` | `{json.dumps(there)}` | {levanter_key(section, type, key, there)} |"
        for key, there in keys.items()
    )
    return "\n".join([f"## {title}\n", "| key | default there | here |", "|---|---|---|", *rows, ""])


def levanter_key(section: str, kind: str | None, key: str, there: Any) -> str:
    """Says what becomes of one key of Levanter's: same, another default, read with a note, or refused.

    Args:
        section: the dotted key of the block.
        kind: the block's `type`, where it has one.
        key: the key in the block.
        there: its default there.

    Raises:
        LookupError: when no block can stand at the section.
    """
    model = _block(section, kind)
    if key in model.model_fields:
        return _compared_default(model, key, there)
    if key in model.renamed_keys:
        return f"read with a note, as `{model.renamed_keys[key]}`"
    if key in model.respelt_keys:
        return "read in another spelling"
    if key in model.ignored_keys:
        return f"read with a note: {model.ignored_keys[key].reason}"
    return f"refused: {model.refused_keys.get(key, 'there is no such key')}"


def _block(section: str, kind: str | None) -> Any:
    from lm_trainer.config.place import Place
    from lm_trainer.run.config import RunConfig

    place = Place.root(RunConfig)
    for name in section.split("."):
        place = place.step(None, name)
    model = place.model_for({"type": kind} if kind else None)
    if model is None:
        raise LookupError(f"{section}: no block of type {kind}")
    return model


def _compared_default(model: Any, key: str, there: Any) -> str:
    from pydantic import ValidationError

    default = model.model_fields[key].get_default(call_default_factory=True)
    try:
        same = getattr(model.model_validate({key: there}), key) == default
    except ValidationError:
        same = False
    shown = json.dumps(model.model_construct(**{key: default}).model_dump(mode="json", include={key})[key])
    return "same" if same else f"default differs (here: `{shown}`)"


KINDS = {
    "models": "model",
    "optimizers": "optimizer",
    "sources of data": "data.source",
    "formats of data": "data.format",
    "tokenizers": "data.tokenizer",
    "averages of weights": "trainer.model_averaging",
    "products in 8 bits": "trainer.quantization",
    "trackers": "trainer.tracker",
}
"""Rows of the table of `what_there_is`: title -> key of the configuration that takes one of several kinds."""


def what_there_is() -> str:
    """The `type` of every kind of section, with a link to its keys in the reference."""
    from lm_trainer.run.config import RunConfig

    members = kinds(RunConfig.model_json_schema(mode="validation"))
    rows = (f"| {title} | {', '.join(_link(*pair) for pair in members[key])} |" for title, key in KINDS.items())
    return "\n".join(["| | `type` in the configuration |", "|---|---|", *rows])


def _link(tag: str, definition: str) -> str:
    return f"[`{tag}`](reference/config.md#{definition.lower()})"


def kinds(root: Schema) -> dict[str, list[tuple[str, str]]]:
    """The keys of a JSON schema that take one of several kinds -> (`type`, definition) of each, in their order."""
    return dict(_Renderer(root).kinds("", root))


def _with_plot(match: re.Match[str]) -> str:
    return f"{match[1]}```text\n{schedule_plot(match[2])}```"


def schedule_plot(text: str) -> str:
    """The drawing of `lmt config plot` for a configuration."""
    from lm_trainer.config.loader import load
    from lm_trainer.plot import plot_schedules, to_text
    from lm_trainer.run.config import RunConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return to_text(plot_schedules(load(path, [], RunConfig).config), width=96, height=8)


def render(root: Schema) -> str:
    """One heading and table for every section of a JSON schema with `$defs`, in the order of the keys.

    Where a section is one of several kinds, told apart by `type`, the keys that at least half of them have alike stand
    once, before the kinds.
    """
    return "\n".join(_Renderer(root).section("", root))


class _Renderer:
    def __init__(self, root: Schema):
        self._definitions: dict[str, Schema] = root.get("$defs", {})
        self._take_written_defaults(root)
        self._written: set[str] = set()
        self._anchors: dict[tuple[str, ...], str] = {}

    def _take_written_defaults(self, root: Schema) -> None:
        """Values that have a spelling of their own, such as durations, are spelled out in the default of a section."""
        for schema in (root, *self._definitions.values()):
            for field in schema.get("properties", {}).values():
                if (name := _reference(field)) and isinstance(field.get("default"), dict):
                    for key, value in field["default"].items():
                        self._definitions[name]["properties"][key]["default"] = value

    def section(self, path: str, schema: Schema) -> Iterator[str]:
        """The table of a section's keys, and then the sections that they lead to."""
        rows = {key: self._row(f"{path}.{key}".strip("."), key, schema) for key in schema.get("properties", {})}
        yield from _table(rows.values())
        yield from self._nested(path, schema, rows)

    def _nested(self, path: str, schema: Schema, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            field = schema["properties"][key]
            full = f"{path}.{key}".strip(".") + (".NAME" if _reference(field.get("additionalProperties", {})) else "")
            names = [name for name in dict.fromkeys(self._references(field)) if name not in self._written]
            self._written.update(names)
            kinds = [name for name in names if _tags(self._definitions[name])]
            for name in names:
                if name not in kinds:
                    yield from self._heading(full, f"`{full}`", name.lower(), self._definitions[name])
                    yield from self.section(full, self._definitions[name])
            if kinds:
                yield from self._union(full, kinds, field)

    def kinds(self, path: str, schema: Schema) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Every key with sections of several kinds below this one, and these kinds."""
        for key, field in schema.get("properties", {}).items():
            names = list(dict.fromkeys(self._references(field)))
            tagged = [(tags[0], name) for name in names if (tags := _tags(self._definitions[name]))]
            if len(tagged) > 1:
                yield f"{path}{key}", tagged
            for name in names:
                if not _tags(self._definitions[name]):
                    yield from self.kinds(f"{path}{key}.", self._definitions[name])

    def _union(self, path: str, names: list[str], field: Schema) -> Iterator[str]:
        """Lists the kinds, the keys that most of them share, and those that each adds or has otherwise."""
        links = [f"[{_tags(self._definitions[name])[0]}](#{name.lower()})" for name in names]
        yield from self._heading(path, f"`{path}`", self._anchors.get(tuple(names), path.replace(".", "-")), field)
        yield f"One of {', '.join(links)}, told apart by `type`; without it, {links[0]}."
        yield ""
        rows = {name: self._rows(path, name) for name in names}
        shared = _shared(list(rows.values())) if len(names) > 1 else {}
        if shared:
            yield "Keys of all of them, where a kind does not say otherwise:"
            yield ""
            yield from _table(shared.values())
            for key in shared:
                owner = next(name for name in names if rows[name].get(key) == shared[key])
                yield from self._nested(path, self._definitions[owner], [key])
        for name in names:
            schema, own = self._definitions[name], rows[name]
            tags = " or ".join(f"`type: {tag}`" for tag in _tags(schema))
            yield from self._heading(f"{path}.", f"`{path}` with {tags}", name.lower(), schema)
            yield from _table(row for key, row in own.items() if shared.get(key) != row)
            if lacking := [f"`{key}`" for key in shared if key not in own]:
                yield f"Of the keys above it has no {', '.join(lacking)}."
                yield ""
            yield from self._nested(path, schema, own)

    def _rows(self, path: str, name: str) -> dict[str, str]:
        schema = self._definitions[name]
        return {key: self._row(f"{path}.{key}", key, schema) for key in schema["properties"] if key != "type"}

    def _heading(self, path: str, title: str, anchor: str, schema: Schema) -> Iterator[str]:
        yield f"{'#' * min(2 + path.count('.'), 4)} {title} {{ #{anchor} }}"
        yield ""
        yield schema.get("description", "")
        yield ""

    def _row(self, path: str, key: str, schema: Schema) -> str:
        field = schema["properties"][key]
        names = list(dict.fromkeys(self._references(field)))
        meaning = field.get("description") or (self._summary(names[0]) if len(names) == 1 else "")
        cells = (f"`{key}`", self._type(path, field), _default(field, schema, key), " ".join(meaning.split()))
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

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

    def _type(self, path: str, schema: Schema) -> str:
        if name := _reference(schema):
            target = self._definitions[name]
            return f"[section](#{name.lower()})" if "properties" in target else self._type(path, target)
        if "discriminator" in schema:
            names = tuple(dict.fromkeys(self._references(schema)))
            return f"[section by `type`](#{self._anchors.setdefault(names, path.replace('.', '-'))})"
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return " or ".join(dict.fromkeys(self._type(path, option) for option in options))
        if "const" in schema or "enum" in schema:
            return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
        if schema.get("type") == "array":
            items = schema.get("items", {})
            return f"list of {self._type(path, items)}" if items else "list"
        if schema.get("type") == "object":
            values = schema.get("additionalProperties")
            return f"mapping from names to {self._type(path, values)}" if isinstance(values, dict) else "mapping"
        names = {"null": "null", "integer": "whole number", "number": "number", "boolean": "true, false"}
        name = names.get(str(schema.get("type"))) or str(schema.get("format", "text"))
        return name + _bounds(schema)


def _table(rows: Iterable[str]) -> Iterator[str]:
    lines = list(rows)
    if lines:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *lines, "")


def _shared(kinds: list[dict[str, str]]) -> dict[str, str]:
    """The row of each key that at least half of the kinds, and at least two, have alike."""
    counts = Counter(item for rows in kinds for item in rows.items())
    common: dict[str, str] = {}
    for (key, row), count in counts.most_common():
        if count >= max(2, len(kinds) / 2):
            common.setdefault(key, row)
    order = list(dict.fromkeys(key for rows in kinds for key in rows))
    return {key: common[key] for key in order if key in common}


def _reference(schema: Any) -> str | None:
    return schema["$ref"].rsplit("/", 1)[-1] if isinstance(schema, dict) and "$ref" in schema else None


def _tags(schema: Schema) -> list[str]:
    """The values of `type` that mean this definition."""
    kind = schema.get("properties", {}).get("type", {})
    return [kind["const"]] if "const" in kind else kind.get("enum", [])


def _default(field: Schema, schema: Schema, key: str) -> str:
    if "default" not in field:
        return "required" if key in schema.get("required", []) else ""
    value = field["default"]
    if isinstance(value, dict):
        return f"`type: {value['type']}`" if "type" in value else "`{}`" if not value else "as below"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [{k: v for k, v in item.items() if v is not None} for item in value]
    return f"`{json.dumps(value)}`"


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return "".join(f"&nbsp;{sign}&nbsp;{schema[key]}" for key, sign in signs.items() if key in schema)
