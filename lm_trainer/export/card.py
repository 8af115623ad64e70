"""Model card (README.md) for exported weights."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# A name or a path may contain any characters. They must not be read as Markdown, or break the table.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training; None is omitted from the card."""

    step: int | None = None
    tokens: int | None = None
    train_loss: float | None = None
    validation_losses: Mapping[str, float] = field(default_factory=dict)
    """Validation loss by the name of the validation set."""


def model_card(
    name: str, *, hf_config: Mapping[str, Any], parameters: int, facts: TrainingFacts, hub_name: str | None
) -> str:
    """Formats a model card: Markdown with a YAML header for the hub.

    The card contains only the shape of the model and `facts`. It contains no part of the run's configuration, such as
    paths and project names.

    Args:
        name: title of the card; may be any text, and is escaped.
        hf_config: the content of config.json.
        parameters: number of parameters; shared parameters count once.
        facts: facts about the training.
        hub_name: `ORG/NAME` of the model on the hub; None for a local model.
    """
    from huggingface_hub import ModelCardData

    takes_audio = bool(hf_config.get("is_encoder_decoder"))
    task = "automatic-speech-recognition" if takes_audio else "text-generation"
    header = ModelCardData(library_name="transformers", pipeline_tag=task, tags=["lm_trainer", "jax"])
    architecture = ", ".join(hf_config.get("architectures") or [str(hf_config.get("model_type", "unknown"))])
    rows = [
        ("Architecture", architecture),
        ("Parameters", f"{parameters:,}"),
        ("Vocabulary", _format_count(hf_config.get("vocab_size"))),
        ("Context length", _format_count(next((hf_config[key] for key in _CONTEXTS if key in hf_config), None))),
        ("Weights", hf_config.get("dtype")),
        *_training_rows(facts),
    ]
    return (_SPEECH if takes_audio else _TEXT).format(
        header=header.to_yaml().strip(),
        title=escape_markdown(name),
        table=_markdown_rows(rows),
        source=hub_name or "path/to/this/directory",
    )


def adapter_card(
    name: str, *, base: str, rank: int, parameters: int, facts: TrainingFacts, hub_name: str | None
) -> str:
    """Formats a card like `model_card`, for a low-rank adapter in PEFT's format.

    Args:
        name: title of the card; may be any text, and is escaped.
        base: path or name of the base model.
        rank: rank of each pair of matrices.
        parameters: the number of parameters of the adapter.
        facts: facts about the training.
        hub_name: `ORG/NAME` of the adapter on the hub; None for a local adapter.
    """
    from huggingface_hub import ModelCardData

    header = ModelCardData(library_name="peft", pipeline_tag="text-generation", tags=["lm_trainer", "jax", "lora"])
    rows = [("Rank", f"{rank:,}"), ("Parameters", f"{parameters:,}"), *_training_rows(facts)]
    return _ADAPTER_TEXT.format(
        header=header.to_yaml().strip(),
        title=escape_markdown(name),
        table=_markdown_rows(rows),
        base=escape_markdown(base),
        source=hub_name or "path/to/this/directory",
    )


def _training_rows(facts: TrainingFacts) -> list[tuple[str, str | None]]:
    return [
        ("Training steps", _format_count(facts.step)),
        ("Training tokens", _format_count(facts.tokens)),
        ("Training loss (nats per token)", _format_loss(facts.train_loss)),
        *(
            (f"Validation loss on {name} (nats per token)", _format_loss(x))
            for name, x in facts.validation_losses.items()
        ),
    ]


def _markdown_rows(rows: Sequence[tuple[str, str | None]]) -> str:
    return "\n".join(
        f"| {escape_markdown(title)} | {escape_markdown(str(value))} |" for title, value in rows if value is not None
    )


_ADAPTER_TEXT = """\
---
{header}
---

# {title}

A low-rank adapter trained with `lm_trainer` on the model {base}, exported for `peft`.

| | |
|---|---|
{table}

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{source}")
base = AutoModelForCausalLM.from_pretrained("path/to/the/model/above")
model = PeftModel.from_pretrained(base, "{source}")
```
"""

_TEXT = """\
---
{header}
---

# {title}

A language model trained from text with `lm_trainer`, exported for `transformers`.

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{source}")
model = AutoModelForCausalLM.from_pretrained("{source}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

## Limits

This is a base model: it continues text and follows no instructions. What it writes mirrors its training data, errors
and biases included, and has not been reviewed.
"""


_SPEECH = """\
---
{header}
---

# {title}

A model that writes what it hears, trained with `lm_trainer`, exported for `transformers`.

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoTokenizer, WhisperForConditionalGeneration

tokenizer = AutoTokenizer.from_pretrained("{source}")
model = WhisperForConditionalGeneration.from_pretrained("{source}")
# features: log-mel spectrograms as the model was trained on, a tensor [rows, mels, frames]
print(tokenizer.batch_decode(model.generate(features), skip_special_tokens=True))
```

## Limits

It writes words that were not said where it hears badly, above all in silence and noise. What it writes mirrors its
training data, errors and biases included, and has not been reviewed.
"""

_CONTEXTS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Keys of the maximum sequence length in config.json."""


def escape_markdown(text: str) -> str:
    """Escapes a text so that Markdown shows it literally, on one line."""
    return _MARKDOWN.sub(r"\\\1", html.escape(_CONTROL.sub(" ", text), quote=False))


def _format_count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _format_loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
