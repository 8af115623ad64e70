"""Audio rows: features against transformers, recordings of every kind, and rows that cannot be used."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.audio.augment import SpecAugment
from lm_trainer.data.audio.mel import LogMel
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats import AudioFormat, UnusableRow
from lm_trainer.data.inspect import cache_stats, cache_statuses, verify_cache
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.audio_files import AudioFiles
from lm_trainer.data.tokenizer.bytes import EOS_ID, ByteTokenizer
from tests.data.test_formats import encode, with_specials

soundfile = pytest.importorskip("soundfile")

RATE, MELS = 16_000, 8
FORMAT: dict[str, Any] = {"type": "audio", "seconds": 1, "num_mels": MELS}


def tone(seconds: float = 0.5, hertz: float = 440, rate: int = RATE) -> np.ndarray:
    times = np.arange(int(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def encode_recording(samples: np.ndarray, rate: int = RATE, format: str = "WAV", **options: Any) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=format, **options)
    return out.getvalue()


def compute_log_mel(samples: np.ndarray) -> np.ndarray:
    return LogMel(100, MELS)(samples)


def open_audio(directory: Path, format: dict[str, Any] | None = None, seq_len: int = 8, **options: Any) -> Data:
    section = {
        "tokenizer": "bytes",
        "shuffle": False,
        "num_workers": 0,
        "cache_dir": str(directory / "cache"),
        **options,
    }
    config = DataConfig.model_validate({"format": {**FORMAT, **(format or {})}, **section})
    return open_data(config, seq_len=seq_len, seed=0)


def first_batch(data: Data, count: int = 1) -> Batch:
    return next(data.train(count, rows=range(count), num_steps=1))


def counted_texts(batch: Batch) -> list[bytes]:
    rows = zip(np.asarray(batch.targets), np.asarray(batch.weights), strict=True)
    return [bytes(row[(weights > 0) & (row < 256)].tolist()) for row, weights in rows]


@pytest.mark.parametrize(
    ("mels", "seconds", "length"), [(80, 30, 112_123), (128, 30, 480_000), (16, 2, 100), (80, 1, 0)]
)
def test_features_are_those_of_transformers(mels: int, seconds: int, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    # From silence to loudness, so that both ends of the range of values are met.
    samples = rng.normal(size=length) * np.geomspace(1e-7, 0.3, length) if length else rng.normal(size=16_000)
    samples = samples.astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0].T
    actual = LogMel(100 * seconds, mels)(samples)
    assert actual.shape == (100 * seconds, mels)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-4)


class TestRecordings:
    @pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg"])
    def test_folders_of_files(self, tmp_path: Path, kind: str) -> None:
        for name, hertz in (("a", 300), ("b", 900)):
            (tmp_path / f"{name}.{kind}").write_bytes(encode_recording(tone(hertz=hertz), format=kind.upper()))
            (tmp_path / f"{name}.txt").write_text(f"say {name}\n")
        batch = first_batch(open_audio(tmp_path, train_urls=[str(tmp_path / f"*.{kind}")]), 2)
        assert counted_texts(batch) == [b"say a", b"say b"]
        assert np.asarray(batch.tokens)[:, 0].tolist() == [EOS_ID] * 2
        for features, hertz in zip(np.asarray(batch.features), (300, 900), strict=True):
            # What mp3 and ogg lose is small where the tone is.
            loud = compute_log_mel(tone(hertz=hertz)) > 0.8
            np.testing.assert_allclose(features[loud], compute_log_mel(tone(hertz=hertz))[loud], atol=0.12)

    @pytest.mark.parametrize("name", ["clips.tar", "clips.tar.gz"])
    def test_archives(self, tmp_path: Path, name: str) -> None:
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
            for member, content in (("x/1.txt", b"one"), ("x/1.flac", encode_recording(tone(), format="FLAC")),
                                    ("x/2.wav", encode_recording(tone())), ("x/2.txt", b"two")):  # fmt: skip
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        assert counted_texts(first_batch(open_audio(tmp_path, train_urls=[str(tmp_path / name)]), 2)) == [
            b"one",
            b"two",
        ]

    def test_two_recordings_of_one_name_are_told_apart_by_nobody(self, tmp_path: Path) -> None:
        contents = {"a.mp3": b"", "a.txt": b"x", "a.wav": b"", "b.wav": encode_recording(tone()), "b.txt": b"b"}
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"a\.mp3 and .*a\.wav have one name, so one text, .*a\.txt"):
            open_audio(tmp_path, train_urls=[str(tmp_path / "*.mp3"), str(tmp_path / "*.wav")])
        with tarfile.open(tmp_path / "clips.tar", "w") as archive:
            for name in contents:
                archive.add(tmp_path / name, name)
        with pytest.raises(UserError, match=r"clips\.tar:a: there are several recordings of this name, \.mp3, \.wav"):
            open_audio(tmp_path, train_urls=[str(tmp_path / "clips.tar")])
        skipping = open_audio(tmp_path, train_urls=[str(tmp_path / "clips.tar")], on_bad_row="skip", max_bad_rows=0.5)
        assert counted_texts(first_batch(skipping)) == [b"b"]

    def test_lists_name_recordings_beside_them(self, tmp_path: Path) -> None:
        (tmp_path / "clips").mkdir()
        (tmp_path / "clips" / "a.wav").write_bytes(encode_recording(tone()))
        (tmp_path / "list.jsonl").write_text(json.dumps({"file_name": "clips/a.wav", "said": "hey"}) + "\n")
        keys = {"audio_key": "file_name", "text_key": "said"}
        batch = first_batch(open_audio(tmp_path, keys, train_urls=[str(tmp_path / "list.jsonl")]))
        assert counted_texts(batch) == [b"hey"]
        np.testing.assert_allclose(np.asarray(batch.features)[0], compute_log_mel(tone()), atol=1e-3)

    def test_columns_of_hugging_face(self, tmp_path: Path) -> None:
        import datasets

        rows = {"audio": [{"bytes": encode_recording(tone()), "path": None}] * 3, "text": ["a", "b", "c"]}
        table = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(RATE, decode=False))
        table.to_parquet(tmp_path / "x.parquet")
        assert counted_texts(first_batch(open_audio(tmp_path, train_urls=[str(tmp_path / "x.parquet")]), 3)) == [
            b"a",
            b"b",
            b"c",
        ]

    def test_another_rate_and_several_channels_are_mixed_and_resampled(self) -> None:
        format = AudioFormat.model_validate(FORMAT)
        high = tone(rate=44_100)
        for audio in ({"bytes": encode_recording(high, 44_100)}, {"array": high.tolist(), "sampling_rate": 44_100},
                      encode_recording(np.stack([2 * high, 0 * high], axis=1), 44_100, subtype="FLOAT")):  # fmt: skip
            features = encode(format, {"audio": audio, "text": "x"}, ByteTokenizer()).features
            assert features is not None
            loud = compute_log_mel(tone()) > 0.5
            np.testing.assert_allclose(features[loud], compute_log_mel(tone())[loud], atol=0.02)


class TestBadRows:
    @pytest.mark.parametrize(
        ("audio", "reason"),
        [
            (b"", "the audio file is empty"),
            (b"RIFFxxxxWAVEnonsense", "the audio cannot be decoded"),
            (encode_recording(tone(0)), "the audio holds no samples"),
            (encode_recording(0 * tone()), "silent from beginning to end"),
            (encode_recording(tone(1.5)), "lasts 1.50 s, longer than a row of 1 s"),
            ({"array": ["x"], "sampling_rate": 16_000}, "needs numbers in it"),
            ({"array": [0.1, float("nan")], "sampling_rate": 16_000}, "samples that are no numbers"),
            ({"array": [0.1], "sampling_rate": 0}, "a sampling_rate above 0"),
            ("nowhere.wav", "the recording nowhere.wav cannot be read"),
            (None, "the field 'audio' is null, neither a path nor the bytes"),
        ],
    )
    def test_what_cannot_be_heard(self, audio: Any, reason: str) -> None:
        with pytest.raises(UnusableRow, match=reason):
            AudioFormat.model_validate(FORMAT).prepare(Row(0, "x:1", "", record={"audio": audio, "text": "a"}))

    @pytest.mark.parametrize(
        ("settings", "audio", "reason"),
        [
            ({"resample": False}, encode_recording(tone(rate=8000), 8000), "8000 samples a second, not 16000"),
            ({"mix_channels": False}, encode_recording(np.stack([tone()] * 2, 1)), "has 2 channels"),
        ],
    )
    def test_what_may_be_refused(self, settings: dict[str, Any], audio: bytes, reason: str) -> None:
        record = {"audio": audio, "text": "a"}
        AudioFormat.model_validate(FORMAT).prepare(Row(0, "x:1", "", record=record))
        with pytest.raises(UnusableRow, match=reason):
            AudioFormat.model_validate({**FORMAT, **settings}).prepare(Row(0, "x:1", "", record=record))

    def test_files_are_named_and_skipped(self, tmp_path: Path) -> None:
        for name, content in (("a", encode_recording(tone())), ("b", b"noise"), ("c", encode_recording(tone()))):
            (tmp_path / f"{name}.wav").write_bytes(content)
            (tmp_path / f"{name}.txt").write_text(name)
        (tmp_path / "c.txt").unlink()
        section: dict[str, Any] = {"train_urls": [str(tmp_path / "*.wav")]}
        with pytest.raises(UserError, match=r"b\.wav: the audio cannot be decoded.*on_bad_row: skip"):
            open_audio(tmp_path, **section)
        data = open_audio(tmp_path, on_bad_row="skip", max_bad_rows=0.7, **section)
        assert counted_texts(first_batch(data)) == [b"a"]
        (ledger,) = (cache.ledger for cache in data.caches.values())
        assert ledger.bad == 2
        assert any("there is no text beside it" in example for example in ledger.bad_examples)

    def test_texts_longer_than_the_decoder_are_named(self, tmp_path: Path) -> None:
        audio = {"array": tone(0.1).tolist(), "sampling_rate": RATE}
        source = {"type": "memory", "train": [{"audio": audio, "text": text} for text in ("ab", "abcdefgh", "c")]}
        with pytest.raises(UserError, match=r"1 of 3 texts are longer than model.seq_len \(8\); the first is .*\[1\]"):
            open_audio(tmp_path, source=source)
        with pytest.raises(UserError, match="more than data"):
            open_audio(tmp_path, source=source, on_bad_row="skip")
        data = open_audio(tmp_path, source=source, on_bad_row="skip", max_bad_rows=0.5)
        assert counted_texts(first_batch(data, 2)) == [b"ab", b"c"]
        assert counted_texts(first_batch(open_audio(tmp_path, source=source, seq_len=9), 2)) == [b"ab", b"abcdefgh"]

    def test_names_with_signs_of_urls_are_files(self, tmp_path: Path) -> None:
        (tmp_path / "a::b{1,2}.wav").write_bytes(b"sound")
        (tmp_path / "a::b{1,2}.txt").write_text("words")
        fields = ("audio", "text")
        (shard,) = AudioFiles().shards("train", [str(tmp_path / "a::b{1,2}.wav")], fields=fields)
        (row,) = shard.rows()
        assert isinstance(row, Row)
        assert row.record == {"audio": b"sound", "text": "words"}

    def test_text_formats_do_not_take_recordings(self, tmp_path: Path) -> None:
        (tmp_path / "a.wav").write_bytes(encode_recording(tone()))
        with pytest.raises(UserError, match=r"write format: \{type: audio\}"):
            open_data(DataConfig(tokenizer="bytes", train_urls=[str(tmp_path / "a.wav")]), seq_len=8, seed=0)


class TestTokens:
    def test_prompts_are_read_and_not_learnt(self) -> None:
        names = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")
        tokenizer, record = with_specials(*names), {"audio": encode_recording(tone()), "text": "ab", "lang": "de"}
        format = AudioFormat(seconds=1, num_mels=MELS, language="en", task="transcribe")
        document = encode(format, record, tokenizer)
        assert list(document.ids) == [257, 258, 260, 261, *b"ab", EOS_ID]
        assert np.asarray(document.loss_mask).tolist() == [False] * 4 + [True] * 3
        stamped = AudioFormat(seconds=1, num_mels=MELS, language_key="lang", timestamps=True, mask_prompt=False)
        document = encode(stamped, record, tokenizer)
        assert list(document.ids) == [257, 259, *b"ab", EOS_ID]
        assert np.asarray(document.loss_mask).all()
        with pytest.raises(UserError, match="no special token"):
            AudioFormat(language="fr").identity(tokenizer)
        with pytest.raises(ValidationError, match="prompt names all tokens"):
            AudioFormat(prompt=["<|en|>"], language="en")
        assert list(encode(AudioFormat(prompt=["<|de|>"]), record, tokenizer).ids) == [259, *b"ab", EOS_ID]

    def test_silence_without_a_text_is_learnt_to_be_silence(self) -> None:
        record = {"audio": encode_recording(0 * tone()), "text": ""}
        document = encode(AudioFormat.model_validate(FORMAT), record, ByteTokenizer())
        assert (list(document.ids), np.asarray(document.loss_mask).tolist()) == ([EOS_ID, EOS_ID], [False, True])


MORSE: dict[str, Any] = {"type": "morse", "rows": 12, "validation_rows": 5, "max_chars": 4, "seconds": 1}
MORSE["unit_seconds"] = (0.01, 0.015)


class TestCache:
    def test_kept_features_are_those_made_anew(self, tmp_path: Path) -> None:
        cached = open_audio(tmp_path / "kept", source=MORSE)
        recomputed = open_audio(tmp_path / "anew", {"features": "on_the_fly"}, source=MORSE)
        for one, other in zip(first_batch(cached, 12), first_batch(recomputed, 12), strict=True):
            np.testing.assert_array_equal(one, other)
        store = cached.caches["train/train"].store
        assert {key.rpartition(".")[2] for key in store.list("parts")} == {"bin", "fea", "json", "len", "msk", "row"}
        assert not [key for key in recomputed.caches["train/train"].store.list("parts") if key.endswith("fea")]
        assert verify_cache(store, cached.caches["train/train"].ledger) == []
        (key,) = [key for key in store.list("parts") if key.endswith("fea")]
        store.write(f"parts/{key}", (store.read(f"parts/{key}") or b"")[:-4] + b"wxyz")
        (problem,) = verify_cache(KvStore(store.url), cached.caches["train/train"].ledger)
        assert problem.endswith(f"{key} has changed since it was written")
        with pytest.raises(MachineError, match=f"{key} has changed since it was written"):
            first_batch(open_audio(tmp_path / "kept", source=MORSE), 12)

    def test_held_out_rows(self, tmp_path: Path) -> None:
        data = open_audio(tmp_path, source={**MORSE, "validation_rows": 0}, num_validation_sequences=5)
        (held_out,) = data.validation().values()
        assert isinstance(held_out, EvalSet)
        assert (held_out.num_rows, data.train_sets[0].num_rows) == (5, 7)
        one, two = held_out.batches(3, rows=range(3))
        assert np.asarray(two.weights)[2].sum() == 0
        assert np.asarray(two.segments)[2].tolist() == [-1] * 8
        assert not np.asarray(two.features)[2].any()
        full = first_batch(open_audio(tmp_path, source={**MORSE, "validation_rows": 0}), 12)
        np.testing.assert_array_equal(np.asarray(full.features)[7:10], one.features)

    def test_masks_depend_on_the_step_and_the_row_alone(self, tmp_path: Path) -> None:
        plain = first_batch(open_audio(tmp_path, source=MORSE), 12)
        data = open_audio(tmp_path, {"spec_augment": {"time_width": 20, "channel_width": 3}}, source=MORSE)
        batches = list(data.train(4, rows=range(4), num_steps=6))
        (other,) = data.train(4, rows=range(1, 3), first_step=4, num_steps=1)
        np.testing.assert_array_equal(other.features, np.asarray(batches[4].features)[1:3])
        first_features, repeated_features = np.asarray(batches[0].features), np.asarray(batches[3].features)
        np.testing.assert_array_equal(batches[0].tokens, batches[3].tokens)
        assert (first_features != repeated_features).any(), "the next epoch masks anew"
        masked = first_features != np.asarray(plain.features)[:4]
        assert 0 < masked.mean() < 0.9
        assert not first_features[masked].any()
        (held_out,) = data.validation().values()
        (full,) = held_out.batches(5, rows=range(5))
        assert (np.asarray(full.features)[:, 0] != 0).all(), "held-out rows have no masks"

    @pytest.mark.parametrize(("features", "stored"), [("cached", "(0.0 MB)"), ("on_the_fly", "(made on the fly)")])
    def test_features_are_told_apart_from_text(self, tmp_path: Path, features: str, stored: str) -> None:
        data = open_audio(tmp_path, {"features": features}, source=MORSE)
        train = cache_statuses(data.config)[0]
        assert f"12 documents, {train.ledger.num_tokens} tokens of 0.0 MB, features of 100 x {MELS} {stored}" in str(
            train
        )
        statistics = cache_stats(KvStore(train.url), train.ledger, None)
        # The start and the end of a text are tokens, too.
        assert statistics.bytes_per_token is not None
        assert statistics.bytes_per_token < 1
        assert not statistics.packing

    def test_widths_of_masks_have_their_limits(self) -> None:
        masks = SpecAugment(time_masks=1, time_width=5, channel_masks=0)
        features = np.ones((200, 30, 4), np.float32)
        masked = masks.apply(features, 3, np.arange(200))
        widths = (masked[:, :, 0] == 0).sum(axis=1)
        assert set(widths.tolist()) == set(range(6))
        assert (masked == masked[:, :, :1]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": {"type": "audio", "text_key": "audio"}}, "name one field twice"),
        ({"format": {"type": "audio"}, "packing": "best_fit"}, "packing has no effect beside format"),
        ({"format": {"type": "audio", "sampling_rate": 8000}}, "16000"),
        ({"source": {**MORSE, "pitch": [9, 3]}, "format": FORMAT}, "no range of values"),
        (
            {"configs": {"a": {"train_urls": "x.wav", "format": {"type": "audio"}}, "b": {"train_urls": "x.txt"}},
             "train_weights": {"a": 1, "b": 1}},
            "need features of one shape",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(changes)
