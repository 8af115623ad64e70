"""Tasks of lm-evaluation-harness of three kinds, on local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QUESTIONS = [
    {"q": f"def f{n}(x):\n    return", "choices": [" x", " import os", f" f{n}", " self.x + 1"], "label": n % 4}
    for n in range(10)
]
_GENERATED = [{"q": f"import {word}\n", "a": word} for word in ("os", "sys", "json", "typing", "re", "math")]
_TEXTS = [{"text": f"class Foo{n}:\n    def __init__(self):\n        self.x = {n}\n" * (n + 1)} for n in range(4)]


def write_tasks(directory: Path) -> Path:
    """Writes `toy_choice`, `toy_written` and `toy_text`, and returns the directory."""
    _write(
        directory,
        "toy_choice",
        _QUESTIONS,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_target="label",
        doc_to_choice="choices",
        target_delimiter="",
        fewshot_split="test",
        metric_list=_metrics("acc", "acc_norm"),
    )
    _write(
        directory,
        "toy_written",
        _GENERATED,
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="a",
        generation_kwargs={"until": ["\n\n", "e"], "max_gen_toks": 20, "do_sample": False},
        metric_list=_metrics("exact_match"),
    )
    _write(
        directory,
        "toy_text",
        _TEXTS,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in ("byte_perplexity", "bits_per_byte")],
    )
    return directory


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


def _write(directory: Path, name: str, records: list[dict[str, Any]], **settings: Any) -> None:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1},
        **settings,
    }
    # JSON is YAML.
    (directory / f"{name}.yaml").write_text(json.dumps(task))
