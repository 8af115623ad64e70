"""`lmt generate` as a user types it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.core.terminal import escape_for_terminal
from lm_trainer.generate.text import Sampling, read_prompts, stream_tokens
from tests.conftest import Lmt, refused


@pytest.mark.slow
def test_a_checkpoint_and_its_hugging_face_directory_write_the_same_text(
    lmt: Lmt, checkpoint: Path, hf_model: Path
) -> None:
    options = ("--prompt", "def main", "--prompt", "x", "--max-new-tokens", "8", "--num-samples", "2", "--json")
    from_checkpoint, from_hf_directory = lmt("generate", checkpoint, *options), lmt("generate", hf_model, *options)
    assert from_checkpoint.returncode == 0, from_checkpoint.stderr
    assert from_checkpoint.stdout == from_hf_directory.stdout
    samples = [json.loads(line) for line in from_checkpoint.stdout.splitlines()]
    assert [sample["prompt"] for sample in samples] == ["def main", "def main", "x", "x"]
    assert samples[0]["tokens"] != samples[1]["tokens"]
    for sample in samples:
        assert sample["finish"] == "length" if len(sample["tokens"]) == 8 else "document_end"


@pytest.mark.slow
def test_temperature_zero_is_what_transformers_generates(lmt: Lmt, hf_model: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    result = lmt("generate", hf_model, "--prompt", "hello", "--temperature", "0", "--max-new-tokens", "12", "--json")
    assert result.returncode == 0, result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_model)
    prompt = torch.tensor([list(b"hello")])
    out = model.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=256, pad_token_id=256)[0, 5:].tolist()
    expected = out[: out.index(256)] if 256 in out else out
    assert json.loads(result.stdout)["tokens"] == expected


def test_text_output_and_seeds(lmt: Lmt, hf_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    options = ("--prompt-file", "prompt.txt", "--max-new-tokens", "4")
    first, second, other = (lmt("generate", hf_model, *options, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Grüße")
    assert first.stdout == second.stdout != other.stdout


def test_what_is_refused(lmt: Lmt, hf_model: Path) -> None:
    refused(lmt("generate", "no-such-run"), "no-such-run")
    refused(lmt("generate", hf_model, "--top-p", "0"), "--top-p 0")
    refused(lmt("generate", hf_model, "--devices", "99"), "--devices 99", "or 0 for all")
    refused(lmt("generate", hf_model, "--step", "3"), "--step")
    refused(lmt("generate", hf_model, "--prompt", "x" * 200), "200", "128")
    refused(lmt("generate", hf_model, "--num-samples", "0"), "--num-samples")
    refused(lmt("generate", hf_model, "--prompt-file", "missing.txt"), "missing.txt")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"seed": 2**32},
    ],
    ids=str,
)
def test_ranges(values: dict[str, float]) -> None:
    (name, value), *_ = values.items()
    with pytest.raises(UserError, match=rf"--{name.replace('_', '-')} {value}: must be"):
        Sampling(**values)  # pyright: ignore[reportArgumentType]


def test_prompts_are_texts_and_files_in_order_and_the_start_of_a_document_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"two\nlines\r\n")
    assert read_prompts(["one"], [file]) == ["one", "two\nlines"]
    assert read_prompts([], []) == [""]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8 at byte 0"):
        read_prompts([], [file])
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts([os.fsdecode(b"\xff")], [])


def test_a_terminal_gets_no_control_sequences() -> None:
    assert escape_for_terminal("a\tb\nÜ\x1b[31mred\x07\x9b\r") == "a\tb\nÜ�[31mred���"


@pytest.mark.slow
def test_a_text_ends_a_continuation(lmt: Lmt, hf_model: Path) -> None:
    options = ("generate", hf_model, "--prompt", "def main", "--max-new-tokens", "40", "--seed", "7")
    full_sample = json.loads(lmt(*options, "--json").stdout)
    assert len(full_sample["text"]) > 14, "the document ends early; choose another seed"
    # A text that spans several tokens, in the middle of what was written.
    end = full_sample["text"][9:12]
    end_index = full_sample["text"].index(end)
    result = lmt(*options, "--json", "--stop", "never written", "--stop", end)
    assert result.returncode == 0, (end, result.stderr)
    stopped_sample = json.loads(result.stdout)
    assert stopped_sample["text"] == full_sample["text"][:end_index]
    assert stopped_sample["finish"] == "stop"
    assert stopped_sample["tokens"] == full_sample["tokens"][: len(stopped_sample["tokens"])]
    # What a terminal shows piece by piece is the same text.
    shown = lmt(*options, "--stop", end).stdout
    assert shown == escape_for_terminal("def main" + stopped_sample["text"]) + "\n"
    assert lmt(*options).stdout == escape_for_terminal("def main" + full_sample["text"]) + "\n"
    refused(lmt(*options, "--stop", ""), "--stop ''")


def test_a_stream_holds_back_what_may_change() -> None:
    pieces = ["Gr", "Gr\ufffd", "Grü", "Grüß", "Grüße ST", "Grüße STO", "Grüße STOP and more"]

    class Row(NamedTuple):
        tokens: list[int]

    class Decoded:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    def stream(model: object, prompts: object, settings: object, **options: object) -> Iterator[list[Row]]:
        for piece in pieces:
            yield [Row([ord(c) for c in piece])]

    settings = Sampling(eos_id=-1)
    streamed = list(stream_tokens(stream, None, Decoded(), [], settings, stop=["STOP"]))  # pyright: ignore[reportArgumentType]
    assert "".join(streamed) == "Grüße "
    assert streamed == ["Gr", "ü", "ß", "e "]


def test_log_probs_are_those_of_transformers(lmt: Lmt, hf_model: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = ("--prompt", "hello", "--max-new-tokens", "9", "--logprobs")
    sample = json.loads(lmt("generate", hf_model, *options, "--json").stdout)
    ids = [*b"hello", *sample["tokens"]]
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(hf_model)(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.double(), -1)[range(4, len(ids) - 1), ids[5:]].tolist()
    assert sample["logprobs"] == pytest.approx(expected, abs=1e-4)
    refused(lmt("generate", hf_model, *options), "--logprobs", "--json")


@pytest.mark.slow
def test_each_token_that_ends_texts_of_a_model_ends_one(lmt: Lmt, hf_model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompts = ["hello", "def main"]
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_model)
    free = [
        model.generate(torch.tensor([[*prompt.encode()]]), max_new_tokens=12, eos_token_id=None) for prompt in prompts
    ]
    # A token of the middle of each text, which the tokenizer takes for a byte like any other.
    ends = [int(row[0, len(prompt) + 5]) for row, prompt in zip(free, prompts, strict=True)]
    for file in hf_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *ends]}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    options = ("generate", tmp_path, "--max-new-tokens", "12", "--temperature", "0")
    for prompt in prompts:
        expected = model.generate(torch.tensor([[*prompt.encode()]]), max_new_tokens=12)[0, len(prompt) :].tolist()
        assert expected[-1] in ends
        assert len(expected) < 8
        sample = json.loads(lmt(*options, "--prompt", prompt, "--json").stdout)
        assert sample["tokens"] == expected[:-1], "the end is no part of the text"
        assert sample["finish"] == "document_end"
        # The same text piece by piece.
        assert lmt(*options, "--prompt", prompt).stdout == escape_for_terminal(prompt + sample["text"]) + "\n"
