"""Preference data: the tokens of both answers of a pair, their mask, and their place in rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.formats import EncodedDocument, PreferenceFormat, UnpairedPreferenceFormat
from lm_trainer.data.formats.answers import common_prompt
from lm_trainer.data.rows.pair_packing import pack_pairs
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded_pairs import EmbeddedPairs
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.data.tokenizer.bytes import EOS_ID, ByteTokenizer
from tests.conftest import RunLmt
from tests.data.test_chat import CHATML
from tests.data.test_formats import encode, first_rows, open_records, with_bos, with_specials

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BEST_FIT: Any = {"packing": "best_fit"}


def text_of(tokens: Any) -> str:
    return "".join("$" if token == EOS_ID else chr(token) for token in tokens)


def answers(format: Any, record: dict[str, Any], tokenizer: Any) -> list[tuple[str, str]]:
    """The text of each document of a row, and the part of it that is in the loss."""
    first = encode(format, record, tokenizer)
    documents = [first, first.partner]
    return [
        (tokenizer.decode_all(list(x.ids)), tokenizer.decode_all(np.asarray(x.ids)[x.loss_mask].tolist()))
        for x in documents
        if isinstance(x, EncodedDocument)
    ]


class TestPairs:
    def test_are_neighbouring_segments_of_a_row(self, tmp_path: Path) -> None:
        records = [
            {"prompt": "ab", "chosen": "XYZ", "rejected": "W"},
            {"prompt": "c", "chosen": "V", "rejected": "UT"},
        ]
        batch = first_rows(open_records(tmp_path, PreferenceFormat(), *records, packing="best_fit", seq_len=16), 1)
        assert text_of(batch.tokens[0]) == "abXYZabWcVcUT$$$"
        assert text_of(batch.targets[0]) == "bXYZ$bW$V$UT$$$$"
        assert batch.segments[0].tolist() == [0] * 5 + [1] * 3 + [2] * 2 + [3] * 3 + [-1] * 3
        assert batch.weights[0].tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
        assert batch.positions[0].tolist()[:10] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]

    def test_texts_begin_with_the_token_for_it(self) -> None:
        tokenizer = with_bos()
        record = {"prompt": "", "chosen": "a", "rejected": "b"}
        assert answers(PreferenceFormat(), record, tokenizer) == [("<s>a", "a"), ("<s>b", "b")]

    def test_messages_have_the_mask_of_transformers_for_the_last_answer(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", chat_template=CHATML)
        prompt = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Wie gehts?"},
        ]
        replies = [[{"role": "assistant", "content": words}] for words in ("Gut 👍", "Schlecht")]
        record = {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}
        implicit = {"chosen": prompt + replies[0], "rejected": prompt + replies[1]}
        first = encode(PreferenceFormat(), record, tokenizer)
        assert first.partner is not None
        tokenizer.save(tmp_path)
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for document, reply in zip((first, first.partner), replies, strict=True):
            expected = reference.apply_chat_template(
                prompt + reply, chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
            )
            assert list(document.ids) == expected["input_ids"]
            mask = np.array(expected["assistant_masks"])
            mask[: np.flatnonzero(np.diff(mask) == 1)[-1] + 1] = 0
            assert np.asarray(document.loss_mask).astype(int).tolist() == mask.tolist()
        for same in (encode(PreferenceFormat(prompt_field=None), implicit, tokenizer),):
            assert (list(same.ids), same.partner and list(same.partner.ids)) == (
                list(first.ids),
                list(first.partner.ids),
            )

    @pytest.mark.parametrize(
        ("record", "expected"),
        [
            # A prompt that is also given as text, as in UltraFeedback.
            (
                {
                    "prompt": "Q",
                    "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
                    "rejected": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "B"}],
                },
                [("[user]Q[assistant]A", "A"), ("[user]Q[assistant]B", "B")],
            ),
            # Answers alone as messages, or as text.
            (
                {
                    "prompt": "Q",
                    "chosen": [{"role": "assistant", "content": "A"}],
                    "rejected": [{"role": "assistant", "content": "B"}],
                },
                [("[user]Q[assistant]A", "A"), ("[user]Q[assistant]B", "B")],
            ),
            (
                {"prompt": [{"role": "user", "content": "Q"}], "chosen": "A", "rejected": "B"},
                [("[user]Q[assistant]A", "A"), ("[user]Q[assistant]B", "B")],
            ),
        ],
    )
    def test_layouts_of_published_sets(self, record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
        assert answers(PreferenceFormat(chat_template=PLAIN), record, ByteTokenizer()) == expected

    @pytest.mark.parametrize(
        ("one", "other", "prompt"),
        [
            ("The sky is blue.", "The sky is green.", "The sky is"),
            ("abc", "abd", "ab"),
            ("ab", "abc", "a"),
            ("x", "y", ""),
            (" x", " y", ""),
        ],
    )
    def test_the_common_beginning_is_the_prompt(self, one: str, other: str, prompt: str) -> None:
        assert common_prompt(one, other) == prompt

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (
                {"prompt": "a", "chosen": "b", "rejected": "b"},
                "'chosen' and 'rejected' are equal, so neither is better",
            ),
            ({"prompt": "a", "chosen": "", "rejected": "b"}, "the field 'chosen' is empty; remove the row"),
            ({"prompt": "", "chosen": "a", "rejected": "b"}, "the prompt is empty, and the tokenizer has no token"),
            (
                {"prompt": "a", "chosen": "b", "rejected": 3},
                "'rejected' is a number, not a string or a list of messages",
            ),
            ({"prompt": "a", "chosen": "b", "rejected": []}, "one of 'chosen' and 'rejected' is a text, the other"),
            (
                {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": [{"role": "user"}]},
                "the content of message 0 of 'rejected' is missing",
            ),
            (
                {
                    "prompt": "a",
                    "chosen": [{"role": "assistant", "content": ""}],
                    "rejected": [{"role": "assistant", "content": "b"}],
                },
                "the assistant says nothing in the answer of 'chosen'",
            ),
            ({"chosen": "ab", "rejected": "ac"}, r"no field 'prompt' .* data\.format\.prompt_field: null takes"),
        ],
    )
    def test_bad_pairs_are_named(self, tmp_path: Path, record: dict[str, Any], reason: str) -> None:
        good = {"prompt": "a", "chosen": "b", "rejected": "c"}
        format = PreferenceFormat(chat_template=PLAIN)
        with pytest.raises(UserError, match=rf"data\.source\.train\[1\]: .*{reason}"):
            open_records(tmp_path, format, good, record, **BEST_FIT)
        data = open_records(tmp_path, format, good, record, **BEST_FIT, on_bad_row="skip", max_bad_rows=0.5)
        assert data.caches["train/train"].ledger.num_documents == 2

    def test_pairs_longer_than_a_row_are_counted_or_refused(self, tmp_path: Path) -> None:
        records = [{"prompt": "a" * n, "chosen": "b", "rejected": "c"} for n in (1, 2, 9)]
        data = open_records(tmp_path, PreferenceFormat(), *records, **BEST_FIT)
        (counted,) = data.long_examples().values()
        assert (counted.total, counted.too_long, counted.longest) == (3, 1, 20)
        kept = text_of(np.concatenate(list(first_rows(data, 2).tokens)))
        assert "ab" in kept
        assert "aaa" not in kept
        with pytest.raises(
            UserError, match=r"1 of 3 pairs are longer than a row of model\.seq_len=8; raise it to 20, or set .* skip"
        ):
            open_records(tmp_path, PreferenceFormat(on_too_long="raise"), *records, **BEST_FIT)
        with pytest.raises(UserError, match=r"1 of 1 pairs are longer than .*; raise it to 20$"):
            open_records(tmp_path / "all", PreferenceFormat(), records[2], **BEST_FIT)

    def test_files_of_pairs_under_another_format_say_what_to_write(self, tmp_path: Path) -> None:
        for record, message in (
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"data\.format: \{type: preference\}"),
            ({"prompt": "a", "completion": "b", "label": True}, r"data\.format: \{type: unpaired_preference\}"),
        ):
            with pytest.raises(UserError, match=message):
                open_records(tmp_path, {"type": "supervised"}, record)


class TestExamples:
    def test_the_label_is_the_side(self, tmp_path: Path) -> None:
        records = [
            {"prompt": "ab", "completion": "XYZ", "label": True},
            {"prompt": "c", "completion": "V", "label": 0},
            {"prompt": "d", "completion": "U", "label": True},
        ]
        batch = first_rows(
            open_records(tmp_path, UnpairedPreferenceFormat(), *records, packing="best_fit", seq_len=12), 1
        )
        assert text_of(batch.tokens[0]) == "abXYZcVdU$$$"
        assert batch.segments[0].tolist() == [0] * 5 + [3] * 2 + [4] * 2 + [-1] * 3
        assert batch.weights[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]

    def test_the_last_example_of_the_data_may_be_undesirable_or_desirable(self, tmp_path: Path) -> None:
        for label in (True, False):
            records = [{"prompt": "ab", "completion": "X", "label": label}]
            data = open_records(tmp_path / str(label), UnpairedPreferenceFormat(), *records, **BEST_FIT)
            assert text_of(first_rows(data, 1).tokens[0]) == "abX$$$$$"

    def test_a_conversation_ends_with_the_answer(self) -> None:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        format = UnpairedPreferenceFormat(prompt_field=None, chat_template=PLAIN)
        prepared = format.prepare(Row(0, "here", "", record={"completion": messages, "label": True}))
        (document,) = format.encode([prepared.value], ByteTokenizer())
        assert isinstance(document, EncodedDocument)
        assert text_of(document.ids) == "[user]Q[assistant]A"
        assert np.flatnonzero(np.asarray(document.loss_mask)).tolist() == [len(document.ids) - 1]

    @pytest.mark.parametrize("label", ["true", None, 2, 0.5])
    def test_labels_are_true_or_false(self, tmp_path: Path, label: Any) -> None:
        with pytest.raises(UserError, match=r"train\[0\]: the field 'label' is .*, not true or false"):
            open_records(
                tmp_path, UnpairedPreferenceFormat(), {"prompt": "a", "completion": "b", "label": label}, **BEST_FIT
            )


class TestPacking:
    def test_every_pair_that_fits_is_whole_and_once_in_a_row(self) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 30, (500, 2))
        lengths[:, 0] += 1
        plan, pairs, too_long, longest = pack_pairs(lengths.reshape(-1), 40)
        sizes = (lengths - 1).sum(1)
        assert (pairs, too_long, longest) == (500, (sizes > 40).sum(), sizes.max())
        starts = (np.cumsum(lengths.reshape(-1)) - lengths.reshape(-1)).reshape(-1, 2)
        packed = list(zip(plan.starts_P.tolist(), plan.lengths_P.tolist(), strict=True))
        expected = [
            ((first, n - 1), (second if m > 1 else first, m - 1))
            for (first, second), (n, m) in zip(starts.tolist(), lengths.tolist(), strict=True)
            if n + m - 2 <= 40
        ]
        assert sorted(zip(packed[::2], packed[1::2], strict=True)) == sorted(expected)
        for begin, end in zip(plan.firsts_R, plan.firsts_R[1:], strict=False):
            assert begin % 2 == 0
            assert plan.lengths_P[begin:end].sum() <= 40
        assert plan.lengths_P.sum() / (40 * plan.num_rows) > 0.85

    def test_held_out_pairs_are_packed_in_the_same_way(self, tmp_path: Path) -> None:
        pairs = [{"prompt": "ab", "chosen": "X" * n, "rejected": "Y"} for n in (1, 2, 3)]
        source = InMemory(train=pairs, validation=pairs[:2])
        data = open_records(tmp_path, PreferenceFormat(), source=source, **BEST_FIT)
        (held_out,) = data.validation().values()
        rows = list(held_out.batches(1, rows=[0]))
        # "abX$" and "abY$" take three positions each.
        assert sorted(text_of(row.tokens[0]) for row in rows) == ["abXXabY$", "abXabY$$"]
        assert held_out.token_bytes is None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"packing": "concat"}, "packed by best_fit, so that no answer is cut; remove packing"),
            ({"exclude": ["list.jsonl"]}, "leave them out of the files"),
            ({"num_validation_sequences": 3}, "name validation_urls instead"),
        ],
    )
    def test_what_would_separate_a_pair_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            DataConfig(train_urls=["a.jsonl"], format=PreferenceFormat(), **changes)


class TestCommands:
    def test_inspect_and_stats_show_pairs(self, tmp_path: Path, lmt: RunLmt) -> None:
        pairs = [{"prompt": "ab", "chosen": "X" * n, "rejected": "Y"} for n in (1, 2, 30)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        (tmp_path / "run.yaml").write_text(
            "model: {type: gpt2, seq_len: 16}\nloss: {type: simpo}\n"
            "data: {tokenizer: bytes, train_urls: [pairs.jsonl], format: {type: preference}, num_workers: 0}\n"
        )
        built = lmt("data", "build", "run.yaml")
        assert "train: 3 pairs, 54 tokens" in built.stdout, built.stderr
        shown = lmt("data", "inspect", "run.yaml", "--first", "1", "--count", "1").stdout
        assert shown.splitlines() == [
            "[1 chosen] pairs.jsonl:2: 5 tokens, 3 of them learnt",
            "ab⟦XX⟧",
            "[1 rejected] pairs.jsonl:2: 4 tokens, 2 of them learnt",
            "ab⟦Y⟧",
        ]
        assert "there is no pair 3" in lmt("data", "inspect", "run.yaml", "--first", "3").stderr
        stats = lmt("data", "stats", "run.yaml").stdout
        assert "positions per pair: least 6, 5 % 6, median 7, 95 % 32, most 35" in stats
        assert "1 pairs (33.3%) are longer than a row" in stats
        (cache,) = json.loads(lmt("data", "stats", "run.yaml", "--json").stdout)["caches"]
        assert (cache["name"], cache["pairs"], cache["too_long"], cache["quantiles"]["most"]) == ("train", 3, 1, 35)


class TestEmbeddedPairs:
    def test_the_rejected_answer_has_the_words_of_the_chosen_one(self) -> None:
        source = EmbeddedPairs(rows=20, answer_words=5)
        (shard,) = source.shards("train", fields=("prompt", "chosen", "rejected"))
        rows = list(shard.rows())
        assert len(rows) == 20
        for row in rows:
            assert isinstance(row, Row)
            assert row.record is not None
            assert sorted(row.record["chosen"].split()) == sorted(row.record["rejected"].split())
            assert row.record["chosen"] != row.record["rejected"]
        assert list(shard.rows(7)) == rows[7:]
        (other,) = EmbeddedPairs(rows=20, answer_words=5, seed=1).shards(
            "train", fields=("prompt", "chosen", "rejected")
        )
        assert other.identity() != shard.identity()
