"""Formats: the tokens of a row, and those that the loss counts."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.loss_mask import DOCUMENT_END, IN_LOSS, pack_loss_mask, unpack_loss_mask
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats import ChatFormat, EncodedDocument, IdsFormat, SupervisedFormat
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.data.tokenize.build import BuildOptions
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.bytes import CONTENT, EOS_ID, ByteTokenizer


def with_specials(*names: str, eos: str = "<|endoftext|>", **settings: str) -> HfTokenizer:
    """The bytes and some special tokens."""
    content = json.loads(CONTENT)
    template = content["added_tokens"][0]
    content["added_tokens"] += [{**template, "id": EOS_ID + 1 + i, "content": name} for i, name in enumerate(names)]
    return HfTokenizer(json.dumps(content), settings, eos_token=eos)


def with_bos(**settings: str) -> HfTokenizer:
    """The bytes, whose texts begin with the token <s>."""
    content = json.loads(CONTENT)
    content["added_tokens"].append({**content["added_tokens"][0], "id": EOS_ID + 1, "content": "<s>"})
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [EOS_ID + 1], "tokens": ["<s>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": parts,
        "special_tokens": special,
    }
    return HfTokenizer(json.dumps(content), settings, eos_token="<|endoftext|>")


def encode(format: Any, record: dict[str, Any], tokenizer: Any) -> EncodedDocument:
    prepared = format.prepare(Row(0, "here", "", record=record))
    (document,) = format.encode([prepared.value], tokenizer)
    assert isinstance(document, EncodedDocument), document
    return document


def open_records(tmp_path: Path, format: Any, *records: dict[str, Any], seq_len: int = 8, **options: Any) -> Data:
    config = {
        "source": InMemory(train=list(records)) if records else None,
        "tokenizer": "bytes",
        "shuffle": False,
        "packing": "concat",
        "cache_dir": str(tmp_path / "cache"),
        **options,
    }
    return open_data(DataConfig(format=format, **config), seq_len=seq_len, seed=0)


def first_rows(data: Data, count: int) -> Batch:
    return next(data.train(count, rows=range(count), num_steps=1))


class TestSupervised:
    def test_only_answers_and_the_end_after_them_have_weight(self, tmp_path: Path) -> None:
        records = [
            {"prompt": "ab", "response": "XYZ"},
            {"prompt": "c", "response": "W"},
            {"prompt": "", "response": "V"},
        ]
        data = open_records(tmp_path, SupervisedFormat(separate_with=":"), *records)
        stream = "ab:XYZ$c:W$:V$"
        batch = first_rows(data, 1)
        tokens = [EOS_ID if c == "$" else ord(c) for c in stream]
        assert batch.tokens[0].tolist() == tokens[:8]
        assert batch.targets[0].tolist() == tokens[1:9]
        counted = {3, 4, 5, 6, 9, 10, 12, 13}
        assert batch.weights[0].tolist() == [float(i + 1 in counted) for i in range(8)]
        assert batch.segments[0].tolist() == [0] * 7 + [1]
        assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]

    def test_prompts_may_be_in_the_loss_too(self, tmp_path: Path) -> None:
        data = open_records(tmp_path, SupervisedFormat(mask_inputs=False), *[{"prompt": "abc", "response": "X"}] * 3)
        assert first_rows(data, 1).weights[0].tolist() == [1, 1, 1, 1, 0, 1, 1, 1]

    def test_other_fields(self) -> None:
        format = SupervisedFormat(input_field="q", output_field="a")
        document = encode(format, {"q": "x", "a": "yz"}, ByteTokenizer())
        assert (list(document.ids), np.asarray(document.loss_mask).tolist()) == ([*b"xyz"], [False, True, True])
        with pytest.raises(ValidationError, match="name two fields"):
            SupervisedFormat(input_field="text", output_field="text")

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            ({"prompt": "a", "response": ""}, "the field 'response' is empty"),
            ({"prompt": None, "response": "a"}, "the field 'prompt' is null, not a string"),
            ({"prompt": "a"}, r"no field 'response' \(fields: prompt\); data\.format names the field"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, record: dict[str, Any], reason: str) -> None:
        good = {"prompt": "a", "response": "long enough"}
        with pytest.raises(UserError, match=rf"data\.source\.train\[1\]: {reason}"):
            open_records(tmp_path, SupervisedFormat(), good, record)
        data = open_records(tmp_path, SupervisedFormat(), good, record, on_bad_row="skip", max_bad_rows=0.5)
        assert data.caches["train/train"].ledger.num_documents == 1


class TestIds:
    def test_are_kept_and_end_documents_where_they_say_so(self, tmp_path: Path) -> None:
        records = [{"input_ids": [1, 2, EOS_ID, 3]}, {"input_ids": [4, EOS_ID]}, {"input_ids": []}, {"input_ids": [5]}]
        data = open_records(tmp_path, IdsFormat(), *records)
        assert first_rows(data, 1).tokens[0].tolist() == [1, 2, EOS_ID, 3, EOS_ID, 4, EOS_ID, 5]
        ledger = data.caches["train/train"].ledger
        assert (ledger.num_documents, ledger.empty, ledger.num_tokens) == (4, 1, 9)
        assert np.fromfile(tmp_path / "cache/train/parts/00000-00000.len", "<u4").tolist() == [3, 2, 2, 2]

    @pytest.mark.parametrize(
        ("ids", "reason"),
        [
            ([1, 257], "there is no token 257 in the vocabulary of 257"),
            ([-1], "there is no token -1"),
            ([1.5], "something else than token ids"),
            (["a"], "something else than token ids"),
            ([[1], [1, 2]], "something else than token ids"),
            ([[1], [2]], "something else than token ids"),
            ([5, True, 2], "something else than token ids"),
            ([False, 2], "something else than token ids"),
            ("a", "is a string, not a list of token ids"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, ids: Any, reason: str) -> None:
        with pytest.raises(UserError, match=rf"data\.source\.train\[0\]: .*{reason}"):
            open_records(tmp_path, IdsFormat(field="x"), {"x": ids})
        records = [{"x": ids}, {"x": [*range(12)]}]
        data = open_records(tmp_path, IdsFormat(field="x"), *records, on_bad_row="skip", max_bad_rows=0.5)
        assert data.caches["train/train"].ledger.num_tokens == 13


class TestCache:
    def test_another_format_over_the_same_directory_is_refused(self, tmp_path: Path) -> None:
        records = [{"prompt": "abc", "response": "some words"}] * 3
        open_records(tmp_path, SupervisedFormat(), *records)
        with pytest.raises(UserError, match=r"document\.separate_with: the cache has , now :"):
            open_records(tmp_path, SupervisedFormat(separate_with=":"), *records)

    def test_the_mask_is_part_of_the_fingerprint(self, tmp_path: Path) -> None:
        records = [{"prompt": "abc", "response": "some words"}] * 3
        one = open_records(tmp_path / "1", SupervisedFormat(), *records)
        other = open_records(tmp_path / "2", SupervisedFormat(mask_inputs=False), *records)
        assert one.fingerprint() != other.fingerprint()
        np.testing.assert_array_equal(first_rows(one, 1).tokens, first_rows(other, 1).tokens)

    def test_masks_survive_packing_at_any_place(self) -> None:
        generator = np.random.default_rng(0)
        lengths = generator.integers(1, 9, 40)
        in_loss = generator.random(lengths.sum()) < 0.5
        expected = in_loss * IN_LOSS
        expected[np.cumsum(lengths) - 1] += DOCUMENT_END
        content = np.frombuffer(pack_loss_mask(in_loss, lengths), np.uint8)
        assert len(content) == -(-len(in_loss) // 4)
        for start in range(0, len(in_loss), 3):
            for count in (0, 1, 2, 5, len(in_loss) - start):
                count = min(count, len(in_loss) - start)
                np.testing.assert_array_equal(
                    unpack_loss_mask(content[start // 4 :], start, count), expected[start : start + count]
                )

    def test_a_remote_cache_gives_the_same_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = np.random.default_rng(0)
        records = [{"prompt": "p" * a, "response": "r" * b} for a, b in generator.integers(1, 40, (200, 2)).tolist()]
        options = partial(BuildOptions, part_bytes=(500, 900))
        monkeypatch.setattr("lm_trainer.data.tokenize.plan.BuildOptions", options)
        local = open_records(tmp_path, SupervisedFormat(), *records)
        assert len(local.caches["train/train"].ledger.parts) > 5
        remote = open_records(tmp_path, SupervisedFormat(), *records)
        stream = remote.caches["train/train"].stream
        store = KvStore(str(tmp_path / "cache/train"))
        store.local = None
        assert stream.loss_mask is not None
        stream._store = stream.loss_mask._store = store
        for got, expected in zip(first_rows(remote, 64), first_rows(local, 64), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_row_with_an_id_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    with_specials("<image>").save(tmp_path / "tokenizer")
    records = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, EOS_ID + 1, 5]}, {"input_ids": list(range(20))}]
    data = open_records(tmp_path, IdsFormat(), *records, tokenizer=str(tmp_path / "tokenizer"))
    data.limit_ids(EOS_ID + 2)
    rows = data.train_sets[0].rows.read(np.arange(3))
    assert rows.tokens.max() == EOS_ID + 1
    data.limit_ids(EOS_ID + 1)
    np.testing.assert_array_equal(data.train_sets[0].rows.read(np.arange(1, 3)).tokens, rows.tokens[1:])
    with pytest.raises(UserError, match=r"row 1 of shard 0 has the token 257, but the model knows 0 to 256; leave"):
        data.train_sets[0].rows.read(np.arange(3))


class TestUnreadFields:
    """Fields with text that the format does not read are named when a cache is built."""

    ALPACA: ClassVar = {"instruction": "add both", "input": "2 and 3", "output": "5", "id": "abc", "score": 1}

    def test_are_named_with_an_example(self, tmp_path: Path) -> None:
        format = {"type": "supervised", "input_field": "instruction", "output_field": "output", "separate_with": "\n"}
        (note,) = open_records(tmp_path, format, self.ALPACA, seq_len=4).notes
        assert "records also have text under 'input', which is not read" in note
        assert note.endswith(":\nadd both\n⟦5⟧")
        # The cache is finished now.
        assert not open_records(tmp_path, format, self.ALPACA, seq_len=4).notes
        read = open_records(tmp_path / "all", {**format, "context_field": "input"}, self.ALPACA, seq_len=4)
        assert not read.notes

    def test_may_be_empty_in_the_first_records(self, tmp_path: Path) -> None:
        format = {"type": "supervised", "input_field": "instruction", "output_field": "output"}
        records = [{**self.ALPACA, "instruction": "sing", "input": ""}, {"instruction": "hum", "output": "mh"}]
        (note,) = open_records(tmp_path, format, *records, self.ALPACA, seq_len=4).notes
        assert "records also have text under 'input', which is not read" in note
        assert note.endswith(":\nadd both⟦5⟧")

    @pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "csv"])
    def test_are_found_in_files(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"a.{suffix}"
        if suffix in ("parquet", "arrow"):
            pyarrow = pytest.importorskip("pyarrow")
            table = pyarrow.Table.from_pylist([self.ALPACA])
            if suffix == "parquet":
                importlib.import_module("pyarrow.parquet").write_table(table, file)
            else:
                importlib.import_module("pyarrow.feather").write_feather(table, file, compression="uncompressed")
        elif suffix == "csv":
            file.write_text("instruction,input,output\nadd both,2 and 3,5\n")
        else:
            file.write_text(json.dumps(self.ALPACA) + "\n")
        format = {"type": "supervised", "input_field": "instruction", "output_field": "output"}
        data = open_records(tmp_path, format, seq_len=4, train_urls=[str(file)], source=None)
        (note,) = data.notes
        assert "text under 'input', which is not read" in note

    def test_may_hold_messages(self, tmp_path: Path) -> None:
        with_specials("<|im_end|>").save(tmp_path / "tokenizer")
        template = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
        record = {
            "messages": [{"role": "assistant", "content": "fine words"}],
            "tools": [{"name": "search"}],
            "system": "be brief",
            "source": "web",
        }
        format = {"type": "chat", "chat_template": template}
        (note,) = open_records(tmp_path, format, record, tokenizer=str(tmp_path / "tokenizer")).notes
        assert "text under 'tools' and 'system', which is not read" in note
        assert note.endswith("⟦fine words<|im_end|>⟧")


def test_a_tokenizer_is_trained_on_the_text_of_records(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "zebra zebra zebra " * 50}]}]
    config = DataConfig.model_validate(
        {
            "source": {"type": "memory", "train": records},
            "tokenizer": {"type": "trained_bpe", "vocab_size": 270},
            "format": {
                "type": "chat",
                "chat_template": "{{ messages[0].content }}",
                "mask_user_turns": False,
                "on_too_long": "split",
            },
            "cache_dir": str(tmp_path),
        }
    )
    data = open_data(config, seq_len=8, seed=0)
    assert len(data.tokenizer.encode(" zebra")) == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"format": {"type": "chat"}, "text_key": "body"}, "text_key has no effect beside format: chat"),
        ({"format": {"type": "text", "text_key": "a"}, "text_key": "b"}, "text_key has no effect beside format: text"),
        ({"format": {"type": "chatty"}}, "'text', 'chat', 'supervised', 'preference', 'unpaired_preference', 'ids'"),
    ],
)
def test_contradictions_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(section)


def test_plain_text_under_a_key_of_the_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "words of a text"}\n')
    format = {"type": "text", "text_key": "body"}
    config = DataConfig.model_validate({"train_urls": str(tmp_path / "a.jsonl"), "format": format})
    (row,) = config.shards("train")[0].rows()
    assert isinstance(row, Row)
    assert row.text == "words of a text"


def test_keys_that_came_later_leave_the_default_cache_where_it_was() -> None:
    chat = {"chat_template": None, "mask_user_turns": True, "messages_field": "messages", "tools_field": None}
    assert ChatFormat().settings_for_cache() == {"type": "chat", **chat}
    pair = {"input_field": "prompt", "output_field": "response", "separate_with": "", "mask_inputs": True}
    assert SupervisedFormat().settings_for_cache() == {"type": "supervised", **pair}
    assert ChatFormat(role_field="from").settings_for_cache()["role_field"] == "from"
    assert SupervisedFormat(context_field="input").settings_for_cache()["context_field"] == "input"
