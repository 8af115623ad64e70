"""The site of the documentation is whole: pages are listed, pictures are there, what is generated is all there is."""

from __future__ import annotations

import ast
import functools
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app
from docs.generate import fill
from docs.generate.configuration import PAGES, configuration
from docs.generate.features import features
from docs.generate.llms import llms_text
from lm_trainer.config.loader import load
from lm_trainer.models import MODEL_CONFIGS
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import ROOT

DOCS = ROOT / "docs"
ELSEWHERE = sorted((DOCS / "start").glob("from-*.md"))
SCHEMA = RunConfig.model_json_schema(mode="validation")


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages)


def test_the_index_for_language_models_is_current_and_its_links_lead_somewhere() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text == llms_text(), "write it again with `python -m docs.generate.llms`"
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert {*re.findall(r"\]\(([^)]+)\)", text)} == pages
    assert text.startswith("# lm_trainer\n\n> ")


def test_every_picture_is_there_for_light_and_dark_pages() -> None:
    shown = set()
    for page in DOCS.rglob("*.md"):
        for target, theme in re.findall(r"\]\(([^)#]+\.svg)(?:#only-(\w+))?\)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name} shows {target}"
            assert path.stem.endswith(theme), f"{page.name} shows {target} on {theme} pages"
            shown.add(path.name)
    drawn = {path.name for path in (DOCS / "pictures").glob("*-*.svg")}
    assert shown == drawn
    assert all(name.replace("-light", "-dark") in drawn for name in drawn)


def test_links_of_generated_text_lead_somewhere() -> None:
    """The strict build sees the links of pages as they are written, and not those that are filled in."""
    count, broken = 0, []
    for page in DOCS.rglob("*.md"):
        written = page.read_text(encoding="utf-8")
        if "<!-- generated: " not in written:
            continue
        for target, anchor in re.findall(r"\]\(([^)#:\s]+\.md)(#[^)]*)?\)", fill(written)):
            count += 1
            linked = page.parent / target
            if not linked.is_file() or (anchor and anchor[1:] not in anchors(linked)):
                broken.append(f"{page.name}: {target}{anchor}")
    assert count > 13
    assert broken == []


def anchor(heading: str) -> str:
    """The name of a heading by the rules of Python-Markdown, which the site is built with."""
    ascii_text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip().lower())


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page."""
    text = fill(page.read_text(encoding="utf-8"))
    explicit = set(re.findall(r"\{[^}]*#([\w-]+)", text))
    headings = re.findall(r"^#+ (.+?)(?: \{.*\})?$", text, re.MULTILINE)
    return explicit | {anchor(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")) for heading in headings}


def test_a_page_is_read_without_a_request_to_another_server() -> None:
    for page in DOCS.rglob("*.md"):
        requests = re.findall(r"!\[[^]]*\]\(https?:|<(?:script|img|link|iframe)\b", page.read_text(encoding="utf-8"))
        assert not requests, page.name


MADE_FROM_CODE = re.compile(r"reference/(config/|release-notes)")
SIX_SCREENS = 1_000
"""Words of a page that takes six screens of a phone; pages of tables take fewer."""


def test_long_pages_begin_with_a_summary() -> None:
    lacking = []
    for page in DOCS.rglob("*.md"):
        text = fill(page.read_text(encoding="utf-8"))
        opening = re.sub(r"```.*?```|^\|.*?$|\{ #.*?\}", "", text.partition("\n## ")[0], flags=re.DOTALL | re.MULTILINE)
        name = page.relative_to(DOCS).as_posix()
        if len(text.split()) > SIX_SCREENS and len(opening.split()) < 30 and not MADE_FROM_CODE.match(name):
            lacking.append(f"{name}: {' '.join(opening.split())}")
    assert lacking == []


def constants() -> list[str]:
    """Every text in the code that is no docstring."""
    texts = []
    for path in [*(ROOT / "lm_trainer").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone)
        texts += [node.value for node in nodes if isinstance(node.value, str)]
    return texts


def test_errors_that_troubleshooting_explains_exist() -> None:
    page = (DOCS / "start/troubleshooting.md").read_text(encoding="utf-8")
    explained, texts = re.findall(r"^### `(.+)`$", page, re.MULTILINE), constants()
    assert len(explained) > 15
    gone = [text for text in explained if not any(text in constant for constant in texts)]
    assert not gone, f"no error says {gone}"


@functools.cache
def definitions() -> dict[str, Any]:
    return SCHEMA["$defs"]


def fields(node: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Key -> what it may be, of a section of any of its kinds."""
    fields_by_key: dict[str, list[dict[str, Any]]] = {}
    stack = [node]
    while stack:
        subschema = stack.pop()
        stack += [*subschema.get("anyOf", []), *subschema.get("oneOf", [])]
        if "$ref" in subschema:
            stack.append(definitions()[subschema["$ref"].rsplit("/", 1)[-1]])
        for key, field in subschema.get("properties", {}).items():
            fields_by_key.setdefault(key, []).append(field)
    return fields_by_key


def is_key(dotted: str) -> bool:
    nodes = [SCHEMA]
    for part in dotted.split("."):
        nodes = [field for node in nodes for field in fields(node).get(part, [])]
    return bool(nodes)


def test_a_key_that_is_none_is_noticed() -> None:
    assert is_key("optimizer.beta1")
    assert is_key("adapter.rank")
    assert not is_key("optimizer.rank")


@pytest.mark.parametrize("page", ELSEWHERE, ids=lambda page: page.stem)
def test_pages_for_those_who_come_from_elsewhere_name_keys_that_exist(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\| .*\|$", text, re.MULTILINE)]
    keys = [key for row in rows for key in re.findall(r"`([a-z_][a-z0-9_.]*)`", row[1])]
    assert len(keys) > 15
    assert not [key for key in keys if not is_key(key)]
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(block, encoding="utf-8")
        load(tmp_path / f"{number}.yaml", [], RunConfig)


def test_the_model_on_the_home_page_has_twelve_lines_and_loads(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) == 12
    (tmp_path / "my.yaml").write_text(block[1], encoding="utf-8")
    load(tmp_path / "my.yaml", [], RunConfig)


def test_pages_of_the_configuration_have_every_key() -> None:
    pages = {path.stem for path in (DOCS / "reference/config").glob("*.md")}
    assert pages == {page for section, page in PAGES.items() if section}
    for section, page in PAGES.items():
        page_file = DOCS / "reference/config" / f"{page}.md"
        marker = f"<!-- generated: configuration{f': {section}' if section else ''} -->"
        assert marker in page_file.read_text(encoding="utf-8")
    text = "\n".join(map(configuration, PAGES))
    sections = [definition for definition in definitions().values() if "properties" in definition]
    keys = {key for section in (SCHEMA, *sections) for key in section["properties"]} - {"type"}
    assert not [key for key in sorted(keys) if f"| `{key}` |" not in text]
    assert len(re.findall(r"\{ #", text)) >= len(sections) - 5


def test_the_page_of_commands_has_every_command_and_no_text_that_is_cut() -> None:
    page = fill("<!-- generated: command line -->")

    def names(command: Any, path: str) -> list[str]:
        return [path, *(n for name, c in getattr(command, "commands", {}).items() for n in names(c, f"{path} {name}"))]

    commands = names(typer.main.get_command(app), "lmt")
    assert len(commands) > 30
    assert not [name for name in commands if f"# `{name}` {{" not in page]
    assert not re.findall(r"^\|.*\.\.\. \|$", page, re.MULTILINE)
    assert "Train a model; repeat the command to resume the run where it stopped. |" in page
    assert "```bash\nlmt train configs/gpt2_nano.yaml\n" in page


def test_the_table_of_features_is_true() -> None:
    rows = [row.strip("| ").split(" | ") for row in features().splitlines() if row.startswith("| `")]
    table = {cells[0].strip("`"): cells for cells in rows[len(MODEL_CONFIGS) :]}
    made_of = {cells[0].strip("`"): cells for cells in rows[: len(MODEL_CONFIGS)]}
    assert list(table) == list(made_of) == [family.model_fields["type"].default for family in MODEL_CONFIGS]
    hugging_face, tensor, context, expert, pipeline, *_ = range(1, 9)

    def lacking(column: int) -> set[str]:
        return {name for name, cells in table.items() if cells[column] == "no"}

    assert lacking(hugging_face) == {"backpack"}
    assert lacking(tensor) == set()
    assert lacking(context) == {"whisper", "mamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granite4"}
    mixtures = {name for name, cells in made_of.items() if "experts" in cells[3]}
    assert {"mixtral", "qwen3_moe"} < mixtures
    assert set(table) - lacking(expert) == mixtures
    assert lacking(pipeline) == {*mixtures, "whisper"}
    assert made_of["gemma2"][1:3] == ["rotary", "sliding window, grouped heads, soft cap"]
    assert made_of["mpt"][1] == "ALiBi"
    assert made_of["mamba2"][1:4] == ["none", "none, state-space model", "none"]
    assert made_of["qwen3_next"][2] == "Gated DeltaNet in some layers, gated, grouped heads, query and key norm"
    assert made_of["mixtral"][3] == "8 experts, 2 for each token"
