"""Formats: which tokens a row becomes, and which of them the loss counts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.builder import BuildOptions
from lm_trainer.data.formats import ChatFormat, Document, IdsFormat, SupervisedFormat, Unusable
from lm_trainer.data.marks import END, LEARN, pack_marks, unpack_marks
from lm_trainer.data.opened import Data
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import all_text
from lm_trainer.data.sources.memory import InMemory
from lm_trainer.data.store import Store
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.bytes import CONTENT, EOS_ID, ByteTokenizer

pytest.importorskip("jinja2")

CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Was  ist ein 👩‍👩‍👧 naïve?"},
    {"role": "assistant", "content": "Ein\n\nWort 👩‍👧"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": " Ja."},
]


def with_specials(*names: str, eos: str = "<|endoftext|>", **settings: str) -> HfTokenizer:
    """The bytes and some special tokens."""
    content = json.loads(CONTENT)
    template = content["added_tokens"][0]
    content["added_tokens"] += [{**template, "id": EOS_ID + 1 + i, "content": name} for i, name in enumerate(names)]
    return HfTokenizer(json.dumps(content), settings, eos_token=eos)


@pytest.fixture(scope="module")
def chatml() -> HfTokenizer:
    return with_specials("<|im_start|>", "<|im_end|>", chat_template=CHATML)


def encode(format: Any, record: dict[str, Any], tokenizer: Any) -> Document:
    prepared = format.prepare(Row(0, "here", "", record=record))
    (document,) = format.encode([prepared.value], tokenizer)
    assert isinstance(document, Document), document
    return document


def opened(tmp_path: Path, format: Any, *records: dict[str, Any], **options: Any) -> Data:
    source = InMemory(train=list(records))
    config = {"tokenizer": "bytes", "shuffle": False, "cache_dir": str(tmp_path / "cache"), **options}
    return open_data(DataConfig(source=source, format=format, **config), seq_len=8, seed=0)


def first_rows(data: Data, count: int) -> Batch:
    return next(data.train(count, rows=range(count), num_steps=1))


class TestSupervised:
    def test_only_answers_and_the_end_after_them_have_weight(self, tmp_path: Path) -> None:
        records = [
            {"prompt": "ab", "response": "XYZ"},
            {"prompt": "c", "response": "W"},
            {"prompt": "", "response": "V"},
        ]
        data = opened(tmp_path, SupervisedFormat(separate_with=":"), *records)
        stream = "ab:XYZ$c:W$:V$"
        batch = first_rows(data, 1)
        tokens = [EOS_ID if c == "$" else ord(c) for c in stream]
        assert batch.tokens[0].tolist() == tokens[:8]
        assert batch.targets[0].tolist() == tokens[1:9]
        learnt = {3, 4, 5, 6, 9, 10, 12, 13}
        assert batch.weights[0].tolist() == [float(i + 1 in learnt) for i in range(8)]
        assert batch.segments[0].tolist() == [0] * 7 + [1]
        assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]

    def test_prompts_may_be_learnt_too(self, tmp_path: Path) -> None:
        data = opened(tmp_path, SupervisedFormat(mask_inputs=False), *[{"prompt": "abc", "response": "X"}] * 3)
        assert first_rows(data, 1).weights[0].tolist() == [1, 1, 1, 1, 0, 1, 1, 1]

    def test_other_fields(self) -> None:
        format = SupervisedFormat(input_field="q", output_field="a")
        document = encode(format, {"q": "x", "a": "yz"}, ByteTokenizer())
        assert (list(document.ids), np.asarray(document.learn).tolist()) == ([*b"xyz"], [False, True, True])
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
            opened(tmp_path, SupervisedFormat(), good, record)
        data = opened(tmp_path, SupervisedFormat(), good, record, on_bad_row="skip", max_bad_rows=0.5)
        assert data.caches["train/train"].ledger.num_documents == 1


class TestChat:
    def reference(self, tokenizer: HfTokenizer, tmp_path: Path) -> dict[str, Any]:
        transformers = pytest.importorskip("transformers")
        tokenizer.save(tmp_path)
        return transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            CONVERSATION, chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
        )

    def test_tokens_and_mask_are_those_of_transformers(self, chatml: HfTokenizer, tmp_path: Path) -> None:
        reference = self.reference(chatml, tmp_path)
        document = encode(ChatFormat(), {"messages": CONVERSATION}, chatml)
        assert list(document.ids) == reference["input_ids"]
        assert np.asarray(document.learn).astype(int).tolist() == reference["assistant_masks"]

    def test_the_answers_alone_are_learnt(self, chatml: HfTokenizer) -> None:
        document = encode(ChatFormat(), {"messages": CONVERSATION}, chatml)
        assert document.learn is not None
        learnt = [int(i) for i in np.asarray(document.ids)[document.learn]]
        end = chatml.special_tokens()["<|im_end|>"]
        assert learnt == [*"Ein\n\nWort 👩‍👧".encode(), end, *b" Ja.", end]
        every = encode(ChatFormat(mask_user_turns=False), {"messages": CONVERSATION}, chatml)
        assert np.asarray(every.learn).all()

    def test_names_of_special_tokens_in_messages_are_text(self, chatml: HfTokenizer) -> None:
        quoted = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
        messages = [{"role": "user", "content": f"say {quoted}!"}, {"role": "assistant", "content": f"é{quoted} no"}]
        document = encode(ChatFormat(), {"messages": messages}, chatml)
        start, end = (chatml.special_tokens()[name] for name in ("<|im_start|>", "<|im_end|>"))
        said = f"é{quoted} no".encode()
        user = [start, *f"user\nsay {quoted}!".encode(), end, *b"\n"]
        assert list(document.ids) == [*user, start, *b"assistant\n", *said, end, *b"\n"]
        assert document.learn is not None
        assert np.flatnonzero(document.learn).tolist() == list(range(len(user) + 11, len(user) + 12 + len(said)))

    def test_the_end_token_inside_a_conversation_ends_no_document(self, tmp_path: Path) -> None:
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", eos="<|im_end|>", chat_template=CHATML)
        tokenizer.save(tmp_path / "tokenizer")
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
        records = [{"messages": messages}] * 2
        data = opened(tmp_path, ChatFormat(), *records, tokenizer=str(tmp_path / "tokenizer"))
        batch = next(iter(data.train(5, rows=range(5), num_steps=1)))
        tokens, segments, weights = (np.asarray(x).reshape(-1) for x in (batch.tokens, batch.segments, batch.weights))
        length = len(tokenizer.encode("user assistant ")) + len("SaENSbcEN$")
        ends = np.flatnonzero(tokens[:length] == tokenizer.eos_id)
        assert len(ends) == 3, "two turns, and the end of the document"
        assert ends[-1] == length - 1
        changes = [i + 1 for i in range(len(segments) - 1) if i % 8 != 7 and segments[i] != segments[i + 1]]
        assert changes == [length]
        assert np.flatnonzero(weights[:length]).tolist() == [length - 6, length - 5, length - 4], (
            "bc and the end of its turn alone"
        )

    def test_templates_come_from_the_tokenizer_a_file_or_the_configuration(self, tmp_path: Path) -> None:
        plain = with_specials("<|im_start|>", "<|im_end|>")
        (tmp_path / "t.jinja").write_text(CHATML)
        for name in (CHATML, str(tmp_path / "t.jinja")):
            document = encode(ChatFormat(chat_template=name), {"messages": CONVERSATION}, plain)
            assert len(document.ids) > 50
        with pytest.raises(UserError, match="has no chat template; name one"):
            ChatFormat().identity(plain)
        with pytest.raises(UserError, match=r"nothing\.jinja is no template, and cannot be read"):
            ChatFormat(chat_template="nothing.jinja").identity(plain)
        with pytest.raises(UserError, match=r"put \{% generation %\}"):
            ChatFormat(chat_template="{{ messages }}").identity(plain)
        with pytest.raises(UserError, match="the template is wrong"):
            ChatFormat(chat_template="{% generation %}{% endfor %}").identity(plain)

    def test_templates_get_the_tokens_and_run_in_a_sandbox(self) -> None:
        tokenizer = with_specials("<s>", bos_token="<s>")
        template = "{{ bos_token }}{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{{ eos_token }}"
        document = encode(ChatFormat(chat_template=template), {"messages": [{"role": "x", "content": "é"}]}, tokenizer)
        assert list(document.ids) == [tokenizer.special_tokens()["<s>"], *'"é"'.encode(), EOS_ID]
        escape = "{% generation %}{{ messages.__class__.__mro__ }}{% endgeneration %}"
        self.unusable(ChatFormat(chat_template=escape), CONVERSATION, tokenizer, "does not take this conversation")

    def test_a_list_of_texts_is_one_text(self, chatml: HfTokenizer) -> None:
        parts = [
            {**message, "content": [{"type": "text", "text": part} for part in message["content"].partition("n")]}
            for message in CONVERSATION
        ]
        one, other = (encode(ChatFormat(), {"messages": messages}, chatml) for messages in (CONVERSATION, parts))
        assert list(one.ids) == list(other.ids)
        np.testing.assert_array_equal(one.learn, other.learn)  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("1 / 0", "division by zero"),
            ("range(10 ** 9)", "Range too big"),
            ("raise_exception('no such role')", "no such role"),
            ("messages[9].content", "has no element 9"),
            ("'{:Q}'.format(1)", "Unknown format code"),
        ],
    )
    def test_what_a_template_raises_makes_a_bad_row(
        self, chatml: HfTokenizer, tmp_path: Path, expression: str, reason: str
    ) -> None:
        template = f"{{% if messages[0].content == 'x' %}}{{{{ {expression} }}}}{{% endif %}}{CHATML}"
        bad, good = ({"messages": [{"role": "assistant", "content": text}]} for text in ("x", "fine words"))
        self.unusable(ChatFormat(chat_template=template), bad["messages"], chatml, reason)
        chatml.save(tmp_path / "tokenizer")
        options = {"tokenizer": str(tmp_path / "tokenizer"), "on_bad_row": "skip", "max_bad_rows": 0.5}
        data = opened(tmp_path, ChatFormat(chat_template=template), bad, good, **options)
        assert data.caches["train/train"].ledger.num_documents == 1

    def test_messages_nested_as_deeply_as_json_can_be(self, chatml: HfTokenizer) -> None:
        value: Any = "deep"
        for _ in range(900):
            value = [value]
        messages = [{"role": "assistant", "content": "a", "note": value}]
        assert all_text(Row(0, "", "", record={"messages": json.loads(json.dumps(messages))})) == "assistant\na\ndeep"
        self.unusable(ChatFormat(), messages, chatml, "'messages' is nested too deeply")

    @pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {}])
    def test_calls_of_tools_need_no_content(self, chatml: HfTokenizer, message: dict[str, Any]) -> None:
        template = (
            "{% for m in messages %}{% generation %}{% if m.tool_calls and m.content is not string %}{{ "
            "m.tool_calls[0] | tojson }}{% else %}{{ m.content }}{% endif %}{% endgeneration %}|{% endfor %}"
        )
        messages = [{"role": "assistant", "tool_calls": ["look"], **message}, {"role": "tool", "content": "7"}]
        document = encode(ChatFormat(chat_template=template), {"messages": messages}, chatml)
        assert bytes(document.ids) == (b"|7|" if message.get("content") == "" else b'"look"|7|')

    def test_an_empty_answer_beside_another_one_is_kept(self, chatml: HfTokenizer) -> None:
        messages = [*CONVERSATION, {"role": "assistant", "content": ""}]
        document = encode(ChatFormat(), {"messages": messages}, chatml)
        assert document.learn is not None
        ends = np.asarray(document.ids)[document.learn] == chatml.special_tokens()["<|im_end|>"]
        assert ends.sum() == 3

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ("hello", "is a string, not a list of messages"),
            ([{"content": "x"}], "message 0 .* is no object with a role"),
            ([{"role": "user", "content": "x"}], "the assistant says nothing"),
            ([*CONVERSATION, {"role": "user", "content": "\ufdd0"}], "noncharacter"),
            ([{"role": "assistant", "content": None}], "content of message 0 of 'messages' is null, .* tool_calls"),
            ([{"role": "assistant", "content": None, "tool_calls": []}], "content of message 0 .* is null"),
            ([{"role": "user"}], "content of message 0 of 'messages' is missing"),
            ([{"role": "user", "content": 3}], "content of message 0 of 'messages' is a number, not a string"),
            ([{"role": "user", "content": {"a": 1}}], "is an object, not a string"),
            ([{"role": "user", "content": ["hi"]}], "is a list with a string in it"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "an item of type 'image_url'"),
            ([{"role": "user", "content": [{"type": "text", "text": None}]}], "an item whose text is null"),
            ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "the assistant says nothing"),
            ([{"role": "assistant", "content": [{"type": "text", "text": ""}]}], "the assistant says nothing"),
            ([{"role": "assistant", "content": None, "tool_calls": [{"f": 1}]}], "write out a null as the word None"),
        ],
    )
    def test_bad_conversations_are_named(self, chatml: HfTokenizer, messages: Any, reason: str) -> None:
        self.unusable(ChatFormat(), messages, chatml, reason)

    def unusable(self, format: ChatFormat, messages: Any, tokenizer: HfTokenizer, reason: str) -> None:
        def run() -> None:
            prepared = format.prepare(Row(0, "", "", record={"messages": messages}))
            (result,) = format.encode([prepared.value], tokenizer)
            if isinstance(result, Unusable):
                raise result

        with pytest.raises(Unusable, match=reason):
            run()


class TestIds:
    def test_are_kept_and_end_documents_where_they_say_so(self, tmp_path: Path) -> None:
        records = [{"input_ids": [1, 2, EOS_ID, 3]}, {"input_ids": [4, EOS_ID]}, {"input_ids": []}, {"input_ids": [5]}]
        data = opened(tmp_path, IdsFormat(), *records)
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
            opened(tmp_path, IdsFormat(field="x"), {"x": ids})
        records = [{"x": ids}, {"x": [*range(12)]}]
        data = opened(tmp_path, IdsFormat(field="x"), *records, on_bad_row="skip", max_bad_rows=0.5)
        assert data.caches["train/train"].ledger.num_tokens == 13


class TestCache:
    def test_another_format_over_the_same_directory_is_refused(self, tmp_path: Path) -> None:
        records = [{"prompt": "abc", "response": "some words"}] * 3
        opened(tmp_path, SupervisedFormat(), *records)
        with pytest.raises(UserError, match=r"document\.separate_with: the cache has , now :"):
            opened(tmp_path, SupervisedFormat(separate_with=":"), *records)

    def test_the_mask_is_part_of_the_fingerprint(self, tmp_path: Path) -> None:
        records = [{"prompt": "abc", "response": "some words"}] * 3
        one = opened(tmp_path / "1", SupervisedFormat(), *records)
        other = opened(tmp_path / "2", SupervisedFormat(mask_inputs=False), *records)
        assert one.fingerprint() != other.fingerprint()
        np.testing.assert_array_equal(first_rows(one, 1).tokens, first_rows(other, 1).tokens)

    def test_marks_survive_packing_at_any_place(self) -> None:
        generator = np.random.default_rng(0)
        lengths = generator.integers(1, 9, 40)
        learn = generator.random(lengths.sum()) < 0.5
        expected = learn * LEARN
        expected[np.cumsum(lengths) - 1] += END
        content = np.frombuffer(pack_marks(learn, lengths), np.uint8)
        assert len(content) == -(-len(learn) // 4)
        for start in range(0, len(learn), 3):
            for count in (0, 1, 2, 5, len(learn) - start):
                count = min(count, len(learn) - start)
                np.testing.assert_array_equal(
                    unpack_marks(content[start // 4 :], start, count), expected[start : start + count]
                )

    def test_a_remote_cache_gives_the_same_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = np.random.default_rng(0)
        records = [{"prompt": "p" * a, "response": "r" * b} for a, b in generator.integers(1, 40, (200, 2)).tolist()]
        options = partial(BuildOptions, part_bytes=(500, 900))
        monkeypatch.setattr("lm_trainer.data.caches.BuildOptions", options)
        local = opened(tmp_path, SupervisedFormat(), *records)
        assert len(local.caches["train/train"].ledger.parts) > 5
        remote = opened(tmp_path, SupervisedFormat(), *records)
        stream = remote.caches["train/train"].stream
        store = Store(str(tmp_path / "cache/train"))
        store.local = None
        assert stream.marks is not None
        stream._store = stream.marks._store = store
        for got, expected in zip(first_rows(remote, 64), first_rows(local, 64), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_tokenizer_is_trained_on_the_text_of_records(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "zebra zebra zebra " * 50}]}]
    config = DataConfig.model_validate(
        {
            "source": {"type": "memory", "train": records},
            "tokenizer": {"type": "trained_bpe", "vocab_size": 270},
            "format": {"type": "chat", "chat_template": "{{ messages[0].content }}", "mask_user_turns": False},
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
        ({"format": {"type": "chatty"}}, "'text', 'chat', 'supervised', 'ids'"),
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
