"""The configuration reference: every key with its type, default and meaning, one page per section."""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

Schema = dict[str, Any]

INDEX = "../config"
"""The page of the top-level keys, and of every section without a separate page."""

PAGES = {
    "": INDEX,
    "model": "model",
    "data": "data",
    "data.source": "data-source",
    "data.format": "data-format",
    "data.tokenizer": "data-tokenizer",
    "trainer": "trainer",
    "trainer.tracker": "trainer-tracker",
    "trainer.alerts": "trainer-alerts",
    "trainer.checkpointer": "trainer-checkpointer",
    "optimizer": "optimizer",
    "adapter": "adapter",
    "eval_harness": "eval-harness",
}
"""Sections with a separate page -> the page in docs/reference/config/, without its suffix."""


def configuration(section: str = "") -> str:
    """Every key of a section, and of its subsections without a separate page.

    Args:
        section: the dotted key, one of `PAGES`; empty for the top-level keys.
    """
    return _pages()[PAGES[section]]


@functools.cache
def _pages() -> dict[str, str]:
    from lm_trainer.run.config.run_config import RunConfig

    return render(RunConfig.model_json_schema(mode="validation"))


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
"""Rows of the table of `what_there_is`: title -> configuration key with several kinds."""


def what_there_is() -> str:
    """The `type` of every kind of section, with a link to its keys in the reference."""
    from lm_trainer.run.config.run_config import RunConfig

    members = kinds(RunConfig.model_json_schema(mode="validation"))
    rows = (f"| {title} | {', '.join(_link(*pair) for pair in members[key])} |" for title, key in KINDS.items())
    return "\n".join(["| | `type` in the configuration |", "|---|---|", *rows])


def _link(tag: str, definition: str) -> str:
    anchor = definition.lower()
    page = next(page for page, text in _pages().items() if f"{{ #{anchor} " in text)
    return f"[`{tag}`](reference/config/{page}.md#{anchor})"


def kinds(root: Schema) -> dict[str, list[tuple[str, str]]]:
    """The keys of a JSON schema with several kinds -> (`type`, definition) of each kind, in order."""
    return dict(_Renderer(root).kinds("", root))


def render(root: Schema) -> dict[str, str]:
    """One heading and table for every section of a JSON schema with `$defs`, in the order of the keys.

    If a section has several kinds, selected by `type`, the keys shared by at least half of them are listed once, before
    the kinds.

    Returns:
        Page -> its Markdown. Links between pages are resolved.
    """
    lines: dict[str, list[str]] = {page: [] for page in PAGES.values()}
    page = INDEX
    for line in _Renderer(root).section("", root):
        if line.startswith(_TURN):
            page = line.removeprefix(_TURN)
        else:
            lines[page].append(line)
    texts = {page: "\n".join(some) for page, some in lines.items()}
    homes = {anchor: page for page, text in texts.items() for anchor in re.findall(r"\{ #([\w-]+) ", text)}
    return {page: _linked(page, text, homes) for page, text in texts.items()}


_TURN = "page: "
"""Prefix of a line that names the page of the following lines."""


def _linked(page: str, text: str, homes: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        home = homes[match[1]]
        folder = "config/" if page == INDEX else ""
        return f"](#{match[1]})" if home == page else f"]({folder}{home}.md#{match[1]})"

    return re.sub(r"\]\(#([\w-]+)\)", link, text)


def _page_of(path: str) -> tuple[str, str]:
    """The longest prefix of a dotted key with a page, and the page."""
    parts = path.split(".")
    known = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    section = next(section for section in known if section in PAGES)
    return section, PAGES[section]


class _Renderer:
    def __init__(self, root: Schema):
        self._definitions: dict[str, Schema] = root.get("$defs", {})
        self._take_written_defaults(root)
        self._written: set[str] = set()
        self._anchors: dict[tuple[str, ...], str] = {}

    def _take_written_defaults(self, root: Schema) -> None:
        """Copies defaults with a special spelling, such as durations, from the default of a section."""
        for schema in (root, *self._definitions.values()):
            for field in schema.get("properties", {}).values():
                if (name := _reference(field)) and isinstance(field.get("default"), dict):
                    for key, value in field["default"].items():
                        self._definitions[name]["properties"][key]["default"] = value

    def section(self, path: str, schema: Schema) -> Iterator[str]:
        """The table of a section's keys, and then its subsections."""
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
        """Every key below this one with several kinds, and these kinds."""
        for key, field in schema.get("properties", {}).items():
            names = list(dict.fromkeys(self._references(field)))
            tagged = [(tags[0], name) for name in names if (tags := _tags(self._definitions[name]))]
            if len(tagged) > 1:
                yield f"{path}{key}", tagged
            for name in names:
                if not _tags(self._definitions[name]):
                    yield from self.kinds(f"{path}{key}.", self._definitions[name])

    def _union(self, path: str, names: list[str], field: Schema) -> Iterator[str]:
        """Lists the kinds, the keys shared by most of them, and the keys that each kind adds or changes."""
        links = [f"[{_tags(self._definitions[name])[0]}](#{name.lower()})" for name in names]
        yield from self._heading(path, f"`{path}`", self._anchors.get(tuple(names), path.replace(".", "-")), field)
        yield f"One of {', '.join(links)}, selected by `type`; the default is {links[0]}."
        yield ""
        rows = {name: self._rows(path, name) for name in names}
        shared = _shared(list(rows.values())) if len(names) > 1 else {}
        if shared:
            yield "Keys of all kinds, unless a kind overrides them:"
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
                yield f"It does not have the keys {', '.join(lacking)}."
                yield ""
            yield from self._nested(path, schema, own)

    def _rows(self, path: str, name: str) -> dict[str, str]:
        schema = self._definitions[name]
        return {key: self._row(f"{path}.{key}", key, schema) for key in schema["properties"] if key != "type"}

    def _heading(self, path: str, title: str, anchor: str, schema: Schema) -> Iterator[str]:
        """A heading on the page of the section; the path of a kind ends in a dot, and its label is its `type`."""
        section, page = _page_of(path.strip("."))
        below = path.removeprefix(section).strip(".")
        depth = path.count(".") - section.count(".")
        label = title.rpartition(" with ")[2].replace("`type: ", "").replace("`", "") if path.endswith(".") else below
        level = 1 if section and path == section else min(2 + max(depth - bool(section), 0), 4)
        yield f"{_TURN}{page}"
        yield f'{"#" * level} {title} {{ #{anchor} data-toc-label="{label or path}" }}'
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
        """Names of the definitions with keys that a field refers to."""
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
        # The CSS class shows each row as a paragraph on narrow screens.
        yield from ('<div class="keys" markdown>', "", "| key | type | default | meaning |", "|---|---|---|---|")
        yield from (*lines, "", "</div>", "")


def _shared(kinds: list[dict[str, str]]) -> dict[str, str]:
    """The row of each key that is the same in at least half of the kinds, and at least two."""
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
    """The values of `type` that select this definition."""
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
