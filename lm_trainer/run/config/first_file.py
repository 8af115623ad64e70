"""A first configuration from four choices: model family, size, data and devices."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import yaml

from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import escape_line
from lm_trainer.data.sources.urls import list_files
from lm_trainer.run.config.default_shards import default_microbatches

TOKENS_PER_PARAMETER = 20
"""Training tokens for each parameter, about the ratio of Hoffmann et al. 2022 (arXiv 2203.15556)."""


@dataclass(frozen=True)
class Size:
    """Shape of a model, with a batch and a learning rate that suit it."""

    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_dim: int
    """Width of a gated MLP."""
    seq_len: int
    rows: int
    """Rows of a batch."""
    learning_rate: str
    params: int
    """Approximate number of parameters, which determines the number of training tokens."""


SIZES = {
    "15M": Size(384, 6, 6, 6, 1024, 256, 128, "2e-3", 15_000_000),
    "125M": Size(768, 12, 12, 12, 2048, 1024, 512, "6e-4", 125_000_000),
    "350M": Size(1024, 24, 16, 16, 2816, 1024, 512, "3e-4", 350_000_000),
    "1B": Size(2048, 16, 32, 8, 8192, 4096, 256, "3e-4", 1_240_000_000),
    "3B": Size(3072, 28, 24, 8, 8192, 4096, 512, "3e-4", 3_200_000_000),
    "8B": Size(4096, 32, 32, 8, 14336, 8192, 512, "3e-4", 8_000_000_000),
}
"""Sizes by name: the shapes of GPT-3 (Brown et al. 2020, table 2.1) up to 350M, then of Llama 3.2 1B and 3B and Llama 3
8B. Learning rates and batches are in the range of these models' reports, not tuned."""

TIED_BELOW = 2_000_000_000
"""Models with fewer parameters use the token embedding as the output layer, which would be a large share of them."""

FAMILIES = ("llama", "qwen3", "olmo2", "olmo3", "gpt2")
"""Families of a first configuration, all with keys of the same names."""

BYTES_PER_TOKEN = 4
"""Bytes of text for a token, about what the tokenizers of published models reach on English text."""

MAX_HELD_OUT_ROWS = 512

_DEVICES = re.compile(r"(\d+)x([\w.-]+)|([\w.-]+):(\d+(?:x\d+)*)")
_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


@dataclass(frozen=True)
class Choices:
    """Answers from which a configuration is written."""

    family: str
    size: str
    data: str
    """Files or a glob, a data set on the hub (`org/name`), or `python` for the text that Python includes."""
    devices: str
    """Number and kind, such as `8xH100` or `1xcpu`."""


def estimate_tokens(data: str) -> int | None:
    """Returns the approximate number of tokens in files on this machine, with compressed files at their own size.

    Returns None for other data, and if no file has the name.
    """
    if data == "python" or "://" in data:
        return None
    try:
        files = list_files([data], "--data")
    except UserError:
        return None  # the file may be written later
    return sum(file.size for file in files) // BYTES_PER_TOKEN


def repetition_note(choices: Choices) -> str | None:
    """Returns a sentence on a run that reads its text more than once, or None."""
    tokens, size = estimate_tokens(choices.data), SIZES[choices.size.upper()]
    if not tokens or tokens >= (trained := TOKENS_PER_PARAMETER * size.params):
        return None
    return (
        f"the text has about {tokens:,} tokens, so the run reads it about {trained / tokens:,.0f} times: add text, or "
        f"lower trainer.num_train_steps"
    )


def write_first_file(choices: Choices, file: str) -> str:
    """Returns the text of a configuration.

    Args:
        choices: the choices.
        file: path of the file, for the commands in its first lines.

    Raises:
        UserError: if a choice does not exist, or the batch cannot be split over so many devices.
    """
    size = SIZES.get(choices.size.upper())
    if size is None:
        raise UserError(f"--size: there is no size {choices.size!r}; write one of {', '.join(SIZES)}")
    if choices.family not in FAMILIES:
        raise UserError(
            f"--model: {choices.family!r} is not one of {', '.join(FAMILIES)}; for other families, copy one of "
            f"configs/NAME_nano.yaml"
        )
    count, kind = _parse_devices(choices.devices)
    batch_tokens = size.rows * size.seq_len
    limit = default_microbatches(batch_tokens)
    if count > limit:
        raise UserError(
            f"--devices: a batch of {batch_tokens:,} tokens trains on at most {limit} devices; take fewer, or a larger "
            f"--size"
        )
    tokens = TOKENS_PER_PARAMETER * size.params
    is_cpu = kind.lower() == "cpu"
    sections = [_head(choices, tokens, escape_line(file)), _model(choices.family, size), _data(choices.data, size)]
    sections += [_trainer(size, round(tokens / batch_tokens), is_cpu=is_cpu), _optimizer(size)]
    return "\n".join(sections)


def _parse_devices(text: str) -> tuple[int, str]:
    """Returns number and kind of devices."""
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise UserError(f"--devices: {text!r} is not a number and a kind, such as 8xH100, 1xcpu or v5p:4x4x4")
    if match[1] is not None:
        return int(match[1]), match[2]
    count = 1
    for edge in match[4].split("x"):
        count *= int(edge)
    return count, match[3]


def _head(choices: Choices, tokens: int, file: str) -> str:
    return (
        f"# {choices.family} of about {choices.size.upper()} parameters, written by `lmt config new`. Trains on"
        f" {tokens / 1e9:.3g} billion tokens, {TOKENS_PER_PARAMETER} for each parameter.\n"
        f"# Memory, time and cost: lmt plan {file} --devices {choices.devices}\n"
        f"# Start, and resume:     lmt train {file}\n"
        f"# Batch and learning rate suit this size; they are not tuned: lmt sweep {file} optimizer.learning_rate="
        f"{size_rates(choices.size)}"
    )


def size_rates(size: str) -> str:
    """Returns learning rates to sweep, at half, once and twice the rate of a size."""
    rate = float(SIZES[size.upper()].learning_rate)
    return ",".join(f"{rate * factor:g}" for factor in (0.5, 1, 2))


def _model(family: str, size: Size) -> str:
    keys = {
        "type": family,
        "seq_len": size.seq_len,
        "hidden_dim": size.hidden_dim,
        "num_layers": size.num_layers,
        "num_heads": size.num_heads,
    }
    if family != "gpt2":
        keys |= {"num_kv_heads": size.num_kv_heads, "intermediate_dim": size.intermediate_dim}
    if family == "qwen3":
        keys["head_dim"] = size.hidden_dim // size.num_heads
    if family != "gpt2" and size.params < TIED_BELOW:
        keys["tie_word_embeddings"] = "true"
    if family in ("llama", "olmo2", "qwen3"):
        keys["rope"] = "{theta: 500000}"
    if size.params < 100_000_000:
        # The usual 0.02 suits models of a thousand dimensions and more.
        keys["initializer_range"] = f"{size.hidden_dim**-0.5:.2g}"
    return _block("model", {**keys, "cross_entropy_block_size": 4096})


def _data(data: str, size: Size) -> str:
    tokenizer = "{type: trained_bpe, vocab_size: 4096}" if size.params < 100_000_000 else "openai-community/gpt2"
    tokens = estimate_tokens(data)
    rows = MAX_HELD_OUT_ROWS if tokens is None else min(MAX_HELD_OUT_ROWS, max(1, tokens // size.seq_len // 20))
    held_out = {"num_validation_sequences": rows}
    if data == "python":
        return _block("data", {"tokenizer": "{type: trained_bpe, vocab_size: 4096}"})
    if _HUB.fullmatch(data) and "." not in data.rpartition("/")[2]:
        name, _, revision = data.partition("@")
        keys = {"id": name, **({"revision": revision} if revision else {}), "splits": "[train]"}
        return _block("data", {**keys, **held_out, "tokenizer": tokenizer})
    return _block("data", {"train_urls": f"[{_quote(data)}]", **held_out, "tokenizer": tokenizer})


def _quote(text: str) -> str:
    """Returns a text as a value of YAML on one line."""
    quoted = yaml.safe_dump(text, default_style='"', width=sys.maxsize, allow_unicode=True).strip()
    # Single quotes are easier to read where nothing has to be escaped.
    return f"'{text}'" if quoted == f'"{text}"' and "'" not in text else quoted


def _trainer(size: Size, steps: int, *, is_cpu: bool) -> str:
    precision = {} if is_cpu else {"mp": "p=f32,c=bfloat16"}
    batch = f"{size.rows} # rows of {size.seq_len} tokens: {size.rows * size.seq_len:,} tokens"
    keys = {**precision, "train_batch_size": batch, "num_train_steps": steps, "steps_per_eval": max(1, steps // 20)}
    return _block("trainer", {**keys, "max_eval_batches": 8, "checkpointer": "{save_interval: 15m}"})


def _optimizer(size: Size) -> str:
    keys = {"learning_rate": size.learning_rate, "min_lr_ratio": 0.1, "warmup": 0.02, "weight_decay": 0.1}
    return _block("optimizer", keys)


def _block(name: str, keys: dict[str, object]) -> str:
    return "".join([f"\n{name}:\n", *(f"  {key}: {value}\n" for key, value in keys.items())]).rstrip("\n") + (
        "\n" if name == "optimizer" else ""
    )
