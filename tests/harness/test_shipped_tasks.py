"""Tasks that come with lm-evaluation-harness, on made-up documents: their questions as its own model asks them."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.harness.chat import TaskTemplate
from tests.harness.test_prompts import TEMPLATES, harness_peer, requests, tokenizer

lm_eval = pytest.importorskip("lm_eval")

_TEXTS = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix")
_CONFIG_KEYS = (*_TEXTS, "output_type", "target_delimiter", "fewshot_delimiter", "generation_kwargs")
_KINDS = ("multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling")


def _configs(files: list[Path]) -> Iterator[dict[str, Any]]:
    """The parts of tasks that make their texts, each once, of those that need no code for it."""
    from lm_eval.tasks._yaml_loader import load_yaml

    seen_texts: set[str] = set()
    for file in files:
        try:
            raw = load_yaml(file, resolve_func=False)
        except Exception:  # an include that is no file of the package
            continue
        config = {key: raw[key] for key in _CONFIG_KEYS if raw.get(key) is not None}
        plain = all(isinstance(config.get(key, ""), str | int | list) for key in _TEXTS)
        text = repr(sorted(config.items(), key=str))
        if plain and config.get("output_type") in _KINDS and "!function" not in text and text not in seen_texts:
            seen_texts.add(text)
            yield config


def _documents(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Documents with a value for every name that the templates read."""
    import jinja2
    from jinja2 import meta

    texts = [str(config[key]) for key in _TEXTS if key in config]
    environment = jinja2.Environment()
    names = {name for text in texts for name in meta.find_undeclared_variables(environment.parse(text))}
    # A bare name is that of a field.
    fields = {text for text in texts if re.fullmatch(r"\w+", text)}
    all_text = " ".join(texts)

    def value(name: str, number: int) -> Any:
        if name == config.get("doc_to_choice") or re.search(rf"\b{name}(\[| *\| *length|\.index)", all_text):
            return [f"{name} {number}, {choice}" for choice in range(6)]
        if name == config.get("doc_to_target") and "doc_to_choice" in config:
            return number % 2
        return f" {name} {number}.\n" if number % 2 else f"{name}: {number}"

    return [{name: value(name, number) for name in names | fields} for number in range(4)]


def _task(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    import datasets
    from datasets.table import InMemoryTable
    from lm_eval.api.task import ConfigurableTask

    # A fingerprint that is given is not computed, which takes longer than all else.
    documents = datasets.Dataset(InMemoryTable.from_pylist(_documents(config)), fingerprint="made-up")
    data = datasets.DatasetDict({"test": documents})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    splits = {"test_split": "test", "fewshot_split": "test", "dataset_path": "made-up"}
    return ConfigurableTask(config={"task": "made-up", **config, **splits})


def _compare(files: list[Path], template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tasks of each kind whose questions were compared."""
    from lm_eval.utils import env as templates

    # The harness parses a template again for each document.
    monkeypatch.setattr(templates, "from_string", functools.cache(templates.from_string))
    task_template, peer = TaskTemplate(tokenizer(tmp_path, TEMPLATES[template])), harness_peer(tmp_path)
    options: dict[str, Any] = {"fewshot_as_multiturn": True, "system_instruction": "Be brief."}
    counts: dict[str, int] = {}
    for config in _configs(files):
        try:
            task = _task(config, monkeypatch)
            expected = requests(task, peer.apply_chat_template, 1, **options)
        except Exception:  # made-up documents do not suit every task
            continue
        assert requests(task, task_template.format_messages, 1, **options) == expected, config
        counts[config["output_type"]] = counts.get(config["output_type"], 0) + bool(expected)
    return counts


def _files(*folders: str) -> list[Path]:
    home = Path(lm_eval.__path__[0]) / "tasks"
    return sorted(file for folder in folders for file in (home / folder).rglob("*.yaml"))


def test_questions_whose_answers_are_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files("humaneval", "mbpp", "arc", "discrim_eval", "llama3/instruct/arc_challenge")
    begun = [file for file in files if "gen_prefix" in file.read_text()]
    assert sum(_compare(begun, "trimming", tmp_path, monkeypatch).values()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_questions_of_many_tasks(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(template).sample(_files(""), 600)
    counts = _compare(chosen, template, tmp_path, monkeypatch)
    assert counts["multiple_choice"] > 20
    assert counts["generate_until"] > 20
