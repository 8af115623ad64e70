"""Transcription of recordings of any length, against `generate` of transformers, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import TextModel
from lm_trainer.generate.transcribe import (
    Segment,
    Transcriber,
    TranscribeSettings,
    Transcript,
    as_json,
    as_srt,
    as_vtt,
    split_at_stamps,
)
from lm_trainer.models import Gpt2Config
from tests.generate.test_speech import RULES
from tests.models.common import change
from tests.models.speech import MELS, VOCAB
from tests.models.test_whisper import make, read_model

soundfile = pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TextModel]:
    directory = tmp_path_factory.mktemp("transcribe")
    reference = make(directory, init_std=0.4)
    config, params = read_model(directory)
    return reference, TextModel(change(config, generation_config=RULES), VOCAB, params, ByteTokenizer(), "tiny")


def record(path: Path, seconds: float) -> np.ndarray:
    samples = (0.3 * np.random.default_rng(4).standard_normal(int(16_000 * seconds))).astype(np.float32)
    samples *= np.repeat(np.random.default_rng(5).uniform(0.01, 1, -(-len(samples) // 800)), 800)[: len(samples)]
    soundfile.write(path, samples, 16_000, subtype="FLOAT")
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "beams"),
    [
        pytest.param(0.1, 1, marks=pytest.mark.slow, id="one window"),
        pytest.param(0.9, 1, id="many windows"),
        pytest.param(0.9, 3, marks=pytest.mark.slow, id="beams"),
    ],
)
def test_passages_are_those_of_transformers(
    models: tuple[Any, TextModel], tmp_path: Path, seconds: float, beams: int
) -> None:
    from transformers import GenerationConfig, WhisperFeatureExtractor

    reference, source = models
    samples = record(tmp_path / "a.wav", seconds)
    settings = TranscribeSettings(language="de", timestamps=True, beams=beams)
    transcript = Transcriber(source, settings).transcribe(tmp_path / "a.wav")
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    # A row of the tiny model is shorter than any that the extractor fills up.
    short = np.pad(samples, (0, max(0, 1920 - len(samples))))
    inputs = extractor(short, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest",
                      return_attention_mask=True)  # fmt: skip
    reference.generation_config = GenerationConfig(**{**RULES, "no_speech_threshold": None})
    expected = reference.generate(
        inputs.input_features, attention_mask=inputs.attention_mask, language="de", task="transcribe",
        return_timestamps=True, return_segments=True, do_sample=False, num_beams=beams,
    )  # fmt: skip
    segments = expected["segments"][0]
    assert len(segments) > 1 or seconds < 0.2
    texts = [segment["tokens"].tolist() for segment in segments]
    # They keep one timestamp of the passage that follows, which the next window hears from its beginning.
    texts = [text[:-1] if min(text[-2:]) > RULES["no_timestamps_token_id"] else text for text in texts]
    assert [segment.tokens for segment in transcript.segments] == texts[: len(transcript.segments)]
    for actual, reference_segment in zip(transcript.segments, segments, strict=False):
        assert actual.start == pytest.approx(float(reference_segment["start"]))
        assert actual.end == pytest.approx(min(float(reference_segment["end"]), seconds))
    left_out = segments[len(transcript.segments) :]
    assert all(float(segment["start"]) > seconds for segment in left_out)
    assert transcript.language == "de"


def test_windows_without_timestamps_follow_one_another(models: tuple[Any, TextModel], tmp_path: Path) -> None:
    rules = {key: value for key, value in RULES.items() if key != "no_timestamps_token_id"}
    source = models[1]
    record(tmp_path / "a.wav", 0.3)
    bare = TextModel(change(source.config, generation_config=rules), VOCAB, source.params, source.tokenizer, "bare")
    transcript = Transcriber(bare, TranscribeSettings(language="en", max_new_tokens=4)).transcribe(tmp_path / "a.wav")
    assert [segment.start for segment in transcript.segments] == pytest.approx([0, 0.12, 0.24])
    assert [segment.end for segment in transcript.segments] == pytest.approx([0.12, 0.24, 0.3])


def test_timestamps_that_nobody_asked_for_cut_nothing(
    models: tuple[Any, TextModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "a.wav", 0.1)
    stamp = RULES["no_timestamps_token_id"] + 1
    written = iter([[[5, stamp, stamp, 6]]])
    monkeypatch.setattr("lm_trainer.generate.transcribe.transcribe_features", lambda *_, **__: next(written))
    transcript = Transcriber(models[1], TranscribeSettings(language="en")).transcribe(tmp_path / "a.wav")
    assert [segment.tokens for segment in transcript.segments] == [[5, stamp, stamp, 6]]


@pytest.mark.parametrize(
    ("ids", "pieces", "consumed"),
    [
        ([], [], 300),
        ([5, 6], [(0, 3.0, [5, 6])], 300),
        ([10, 5, 60], [(0, 1.0, [10, 5, 60])], 300),
        # The last passage is unfinished: the next window begins where it does.
        ([10, 5, 60, 60, 6], [(0, 1.0, [10, 5, 60])], 100),
        # Its end stands there alone: nothing follows it.
        ([10, 5, 60, 60, 6, 110], [(0, 1.0, [10, 5, 60]), (1.0, 2.0, [60, 6, 110])], 300),
        ([10, 5, 60, 60, 6, 110, 110], [(0, 1.0, [10, 5, 60]), (1.0, 2.0, [60, 6, 110])], 200),
    ],
)
def test_pairs_of_timestamps_cut(ids: list[int], pieces: list[tuple[float, float, list[int]]], consumed: int) -> None:
    segments, frames = split_at_stamps(ids, 10, 300)
    assert [(segment[0], segment[1], segment[2]) for segment in segments] == [
        (pytest.approx(a), pytest.approx(b), c) for a, b, c in pieces
    ]
    assert frames == consumed


def test_files() -> None:
    segments = [Segment(0.0, 1.5, " Hello.", [1]), Segment(3661.25, 3662.0, " a --> b", [2])]
    transcript = Transcript("x.wav", 4000.0, "en", "Hello. a --> b", segments)
    assert as_srt(transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n2\n01:01:01,250 --> 01:01:02,000\na --> b\n"
    )
    assert as_vtt(transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n01:01:01.250 --> 01:01:02.000\na -> b\n"
    )
    assert json.loads(json.dumps(as_json(transcript)))["segments"][0] == {
        "start": 0.0, "end": 1.5, "text": " Hello.", "tokens": [1],
    }  # fmt: skip


def test_what_cannot_be_transcribed(models: tuple[Any, TextModel], tmp_path: Path) -> None:
    source = models[1]
    (tmp_path / "noise.wav").write_bytes(b"noise")
    transcriber = Transcriber(source, TranscribeSettings())
    with pytest.raises(UserError, match=r"noise\.wav: the audio cannot be decoded"):
        transcriber.transcribe(tmp_path / "noise.wav")
    with pytest.raises(UserError, match=r"gone\.wav: cannot be read \(No such file"):
        transcriber.transcribe(tmp_path / "gone.wav")
    with pytest.raises(UserError, match="'xx' is unknown to the model"):
        Transcriber(source, TranscribeSettings(language="xx"))
    with pytest.raises(UserError, match="hears nothing"):
        Transcriber(TextModel(Gpt2Config(), VOCAB, {}, ByteTokenizer(), "reader"), TranscribeSettings())
