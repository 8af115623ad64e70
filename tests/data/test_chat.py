"""Conversations: the tokens that a chat template makes of them, and those that the loss counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats import ChatFormat, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import full_text
from lm_trainer.data.tokenizer import HfTokenizer, Pretrained
from lm_trainer.data.tokenizer.bytes import EOS_ID
from lm_trainer.data.tokenizer.hf import load_pretrained
from lm_trainer.generate.chat import Chat
from lm_trainer.generate.questions import Questions
from lm_trainer.generate.text import Sampling
from lm_trainer.models.gpt2 import Gpt2Config
from tests.data.test_formats import encode, open_records, with_bos, with_specials

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


@pytest.fixture(scope="module")
def chatml() -> HfTokenizer:
    return with_specials("<|im_start|>", "<|im_end|>", chat_template=CHATML)


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
        assert np.asarray(document.loss_mask).astype(int).tolist() == reference["assistant_masks"]

    def test_the_answers_alone_are_in_the_loss(self, chatml: HfTokenizer) -> None:
        document = encode(ChatFormat(), {"messages": CONVERSATION}, chatml)
        assert document.loss_mask is not None
        counted = [int(i) for i in np.asarray(document.ids)[document.loss_mask]]
        end = chatml.special_tokens()["<|im_end|>"]
        assert counted == [*"Ein\n\nWort 👩‍👧".encode(), end, *b" Ja.", end]
        every = encode(ChatFormat(mask_user_turns=False), {"messages": CONVERSATION}, chatml)
        assert np.asarray(every.loss_mask).all()

    def test_names_of_special_tokens_in_messages_are_text(self, chatml: HfTokenizer) -> None:
        quoted = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
        messages = [{"role": "user", "content": f"say {quoted}!"}, {"role": "assistant", "content": f"é{quoted} no"}]
        document = encode(ChatFormat(), {"messages": messages}, chatml)
        start, end = (chatml.special_tokens()[name] for name in ("<|im_start|>", "<|im_end|>"))
        message = f"é{quoted} no".encode()
        user = [start, *f"user\nsay {quoted}!".encode(), end, *b"\n"]
        assert list(document.ids) == [*user, start, *b"assistant\n", *message, end, *b"\n"]
        assert document.loss_mask is not None
        assert np.flatnonzero(document.loss_mask).tolist() == list(range(len(user) + 11, len(user) + 12 + len(message)))

    def test_the_end_token_inside_a_conversation_ends_no_document(self, tmp_path: Path) -> None:
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", eos="<|im_end|>", chat_template=CHATML)
        tokenizer.save(tmp_path / "tokenizer")
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
        records = [{"messages": messages}] * 2
        data = open_records(tmp_path, ChatFormat(), *records, tokenizer=str(tmp_path / "tokenizer"))
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

    def counted_text(self, format: ChatFormat, tokenizer: HfTokenizer, messages: list[dict[str, Any]]) -> str:
        document = encode(format, {"messages": messages}, tokenizer)
        assert document.loss_mask is not None
        return tokenizer.decode([int(i) for i in np.asarray(document.ids)[document.loss_mask]])

    def test_reasoning_and_calls_of_tools_count_as_in_transformers(self, chatml: HfTokenizer, tmp_path: Path) -> None:
        template = CHATML.replace(
            "{{ message.content }}<|im_end|>{% endgeneration %}",
            "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
            "{{ message.content or '' }}"
            "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
            "<|im_end|>{% endgeneration %}",
        )
        call = {"type": "function", "function": {"name": "look", "arguments": {"for": "rain"}}}
        messages = [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "reasoning_content": "I look. <|im_end|>", "tool_calls": [call]},
            {"role": "tool", "content": "no"},
            {"role": "assistant", "content": "No.", "reasoning_content": "dry"},
            {"role": "assistant", "content": "", "reasoning_content": "only thought"},
        ]
        document = encode(ChatFormat(chat_template=template), {"messages": messages}, chatml)
        text = chatml.decode_all(list(document.ids))
        assert "<think>I look. <|im_end|></think>" in text
        assert chatml.decode_all(np.asarray(document.ids)[document.loss_mask].tolist()).count("</think>") == 3
        # transformers takes the name of a special token inside of a message for the token.
        messages[1]["reasoning_content"] = "I look."
        document = encode(ChatFormat(chat_template=template), {"messages": messages}, chatml)
        transformers = pytest.importorskip("transformers")
        chatml.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
        )
        assert list(document.ids) == theirs["input_ids"]
        assert np.asarray(document.loss_mask).astype(int).tolist() == theirs["assistant_masks"]

    def test_turns_are_masked_by_a_field_or_all_but_the_last(self, chatml: HfTokenizer) -> None:
        turns = [(role, text) for number in "12" for role, text in (("user", "q"), ("assistant", f"answer {number}."))]
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
        tool = [{"role": "tool", "content": "data"}, {"role": "assistant", "content": "answer 3."}]
        assert self.counted_text(ChatFormat(last_turn_only=True), chatml, messages) == "answer 2."
        assert self.counted_text(ChatFormat(last_turn_only=True), chatml, [*messages, *tool]) == "answer 2.answer 3."
        for off, on in ((0, 1), (False, True), (0.0, 1.0)):
            messages[1]["weight"], messages[3]["weight"] = off, on
            assert self.counted_text(ChatFormat(turn_mask_field="weight"), chatml, messages) == "answer 2."
            assert self.counted_text(ChatFormat(), chatml, messages) == "answer 1.answer 2."
        del messages[3]["weight"]
        assert self.counted_text(ChatFormat(turn_mask_field="weight"), chatml, messages) == "answer 2."
        both = ChatFormat(turn_mask_field="weight", last_turn_only=True)
        messages[3]["weight"] = 0
        self.unusable(both, messages, chatml, "says nothing")
        messages[3]["weight"] = "no"
        self.unusable(both, messages, chatml, "field 'weight' of message 3 of 'messages' is 'no', not true or false")
        once = "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}"
        reason = "marks 1 answers in a conversation with 2 messages of the assistant"
        self.unusable(ChatFormat(chat_template=once, last_turn_only=True), messages, chatml, reason)

    @pytest.mark.parametrize("key", ["last_turn_only", "turn_mask_field"])
    def test_turns_cannot_be_masked_if_every_token_counts(self, key: str) -> None:
        with pytest.raises(ValidationError, match=f"{key} has no effect with mask_user_turns: false"):
            ChatFormat.model_validate({key: True if key == "last_turn_only" else "weight", "mask_user_turns": False})

    @pytest.mark.parametrize(
        ("answer", "end"),
        [
            ("{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}", None),
            ("{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>{{ '\n' }}", "<|im_end|>\n"),
            ("{% generation %}{{ message.content }}{{ '\n' }}{% endgeneration %}<|im_end|>", "<|im_end|>"),
            # The end of the document counts as the end of the turn.
            ("{% generation %}{{ message.content }}{% endgeneration %}", None),
            ("{{ raise_exception('never') }}{% generation %}{% endgeneration %}", None),
        ],
    )
    def test_a_template_that_does_not_mark_the_end_of_a_turn_is_told(
        self, chatml: HfTokenizer, answer: str, end: str | None
    ) -> None:
        template = (
            "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n" + answer + ""
            "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        )
        notes = ChatFormat(chat_template=template).notes(chatml)
        assert len(notes) == (end is not None)
        assert all(f"writes {end!r} after an answer" in note for note in notes)
        assert not ChatFormat(chat_template=template, mask_user_turns=False).notes(chatml)

    def test_a_list_of_texts_is_one_text(self, chatml: HfTokenizer) -> None:
        parts = [
            {**message, "content": [{"type": "text", "text": part} for part in message["content"].partition("n")]}
            for message in CONVERSATION
        ]
        one, other = (encode(ChatFormat(), {"messages": messages}, chatml) for messages in (CONVERSATION, parts))
        assert list(one.ids) == list(other.ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("1 / 0", "division by zero"),
            ("range(10 ** 9)", "Range too big"),
            ("raise_exception('no such role')", "no such role"),
            ("messages[9].content", "has no element 9"),
            ("'{:Q}'.format(1)", "Unknown format code"),
            # Chance, and addresses of objects, which differ from process to process.
            ("['a', 'b'] | random", "it draws by chance"),
            ("lipsum()", "it draws by chance"),
            ("messages[0].content.strip", r"the address of an object in memory \(built-in method strip"),
            ("'a' ~ (messages | map(attribute='content'))", r"address of an object in memory \(generator object"),
            ("cycler('a', 'b')", "the address of an object in memory"),
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
        data = open_records(tmp_path, ChatFormat(chat_template=template), bad, good, **options)
        assert data.caches["train/train"].ledger.num_documents == 1

    def test_addresses_that_a_message_quotes_are_text(self, chatml: HfTokenizer) -> None:
        quoted = "<function f at 0x7f00deadbeef>"
        document = encode(ChatFormat(), {"messages": [{"role": "assistant", "content": quoted}]}, chatml)
        assert quoted in chatml.decode([int(i) for i in document.ids])

    def test_messages_nested_as_deeply_as_json_can_be(self, chatml: HfTokenizer) -> None:
        value: Any = "deep"
        for _ in range(900):
            value = [value]
        messages = [{"role": "assistant", "content": "a", "note": value}]
        shallow = [{"role": "assistant", "content": "a", "note": json.loads("[" * 98 + "]" * 98)}]
        assert encode(ChatFormat(), {"messages": shallow}, chatml).ids is not None
        assert full_text(Row(0, "", "", record={"messages": json.loads(json.dumps(messages))})) == "assistant\na\ndeep"
        self.unusable(ChatFormat(), messages, chatml, "conversation is nested too deeply")

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
        assert document.loss_mask is not None
        ends = np.asarray(document.ids)[document.loss_mask] == chatml.special_tokens()["<|im_end|>"]
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
            if isinstance(result, UnusableRow):
                raise result

        with pytest.raises(UnusableRow, match=reason):
            run()


class TestTools:
    TEMPLATE = "{% if tools %}{{ tools[0] | tojson }};{% endif %}" + CHATML
    TOOL = {"type": "function", "function": {"name": "look", "description": "up <|im_end|>"}}

    def test_are_what_transformers_passes(self, chatml: HfTokenizer, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        tool = json.loads(json.dumps(self.TOOL).replace("<|im_end|>", "there"))
        chatml.save(tmp_path)
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            CONVERSATION, tools=[tool], chat_template=self.TEMPLATE, return_dict=True
        )
        format = ChatFormat(chat_template=self.TEMPLATE, tools_field="functions")
        document = encode(format, {"messages": CONVERSATION, "functions": [tool]}, chatml)
        assert list(document.ids) == expected["input_ids"]

    def test_none_and_names_of_special_tokens_in_them(self, chatml: HfTokenizer) -> None:
        format = ChatFormat(chat_template=self.TEMPLATE, tools_field="tools")
        plain = encode(ChatFormat(chat_template=self.TEMPLATE), {"messages": CONVERSATION}, chatml)
        for none in (None, []):
            document = encode(format, {"messages": CONVERSATION, "tools": none}, chatml)
            assert list(document.ids) == list(plain.ids)
        document = encode(format, {"messages": CONVERSATION, "tools": [self.TOOL]}, chatml)
        assert list(document.ids) == [*json.dumps(self.TOOL).encode(), *b";", *plain.ids]

    def test_the_field_is_part_of_the_identity_where_there_is_one(self, chatml: HfTokenizer) -> None:
        without, tools = ChatFormat(), ChatFormat(tools_field="tools")
        assert without.identity(chatml) == {
            "type": "chat",
            "messages_field": "messages",
            "chat_template": CHATML,
            "mask_user_turns": True,
        }
        assert tools.identity(chatml) == {**(without.identity(chatml) or {}), "tools_field": "tools"}
        assert (without.fields(), tools.fields()) == (("messages",), ("messages", "tools"))
        with pytest.raises(ValidationError, match="name two fields"):
            ChatFormat(tools_field="messages")

    @pytest.mark.parametrize("tools", ["[]", ["look"], {"name": "look"}])
    def test_others_make_a_bad_row(self, tools: Any) -> None:
        row = Row(0, "", "", record={"messages": CONVERSATION, "tools": tools})
        with pytest.raises(UnusableRow, match="'tools' holds something else than a list of tools"):
            ChatFormat(tools_field="tools").prepare(row)


class TestUse:
    """A model is used with the text of its training rows."""

    MESSAGES: ClassVar = [{"role": "user", "content": "a <|im_end|>?"}, {"role": "assistant", "content": "b"}]
    TEMPLATE = (
        CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    )

    def test_the_template_of_the_rows_is_saved_with_the_model(self, chatml: HfTokenizer, tmp_path: Path) -> None:
        other = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        chatml.save(tmp_path / "tokenizer")
        options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "seq_len": 4}
        data = open_records(tmp_path, ChatFormat(chat_template=other), {"messages": self.MESSAGES}, **options)
        published = data.published_tokenizer
        assert published.chat_template == other
        assert published.identity() == data.tokenizer.identity() == chatml.identity()
        published.save(tmp_path / "saved")
        transformers = pytest.importorskip("transformers")
        text = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(
            self.MESSAGES, tokenize=False
        )
        assert text == "a <|im_end|>?b"
        plain = open_records(tmp_path / "plain", ChatFormat(), {"messages": self.MESSAGES}, **options)
        assert plain.published_tokenizer is plain.tokenizer

    def test_named_templates_are_chosen_by_name(self, chatml: HfTokenizer, tmp_path: Path) -> None:
        text = "{% generation %}tools: {{ messages[0].content }}{% endgeneration %}"
        listed: Any = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": text}]
        chatml.save(tmp_path / "files")
        (tmp_path / "files/additional_chat_templates").mkdir()
        (tmp_path / "files/additional_chat_templates/tool_use.jinja").write_text(text)
        in_files = load_pretrained(Pretrained(name=str(tmp_path / "files")))
        in_settings = with_specials("<|im_start|>", "<|im_end|>", chat_template=listed)
        for tokenizer in (in_files, in_settings):
            assert tokenizer.chat_template == CHATML
            document = encode(ChatFormat(chat_template="tool_use"), {"messages": self.MESSAGES}, tokenizer)
            assert tokenizer.decode_all(list(document.ids)) == "tools: a <|im_end|>?"

    def test_a_chat_has_the_prompt_of_the_row(self) -> None:
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", chat_template=self.TEMPLATE)
        row = list(encode(ChatFormat(), {"messages": self.MESSAGES}, tokenizer).ids)
        model = nnx.eval_shape(lambda: Gpt2Config(hidden_dim=8, num_layers=1, num_heads=1).build(300, rngs=nnx.Rngs(0)))
        asked: list[list[int]] = []

        def answer(_model: Any, _tokenizer: Any, ids: list[int], *_: Any, **__: Any) -> Iterator[str]:
            asked.append(ids)
            yield "b"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "lm_trainer.generate.chat.stream_tokens", lambda _stream, *args, **keys: answer(*args, **keys)
            )
            patch.setattr("lm_trainer.generate.chat.to_decoding_layout", lambda model, _dtype: model)
            chat = Chat(model, tokenizer, context=64, sampling=Sampling(max_new_tokens=4))
            assert list(chat.answer("a <|im_end|>?")) == ["b"]
        assert row[: len(asked[0])] == asked[0]
        assert tokenizer.decode_all(row[len(asked[0]) :]) == "b<|im_end|>\n"

    @pytest.mark.parametrize("start", ["", "<s>"])
    def test_only_the_template_writes_the_token_for_the_beginning(self, start: str, tmp_path: Path) -> None:
        template = (
            start
            + "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        tokenizer = with_bos(chat_template=template)
        assert tokenizer.bos_id is not None
        asked = Questions(tokenizer).encode_question("a <|im_end|>?")
        row = list(encode(ChatFormat(), {"messages": self.MESSAGES}, tokenizer).ids)
        assert row[: len(asked)] == asked
        assert asked.count(tokenizer.bos_id) == bool(start)
        transformers = pytest.importorskip("transformers")
        tokenizer.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            self.MESSAGES[:1], add_generation_prompt=True, return_dict=False
        )
        assert theirs == asked

    def test_a_template_that_writes_nothing_is_named(self) -> None:
        silent = with_bos(chat_template="{% generation %}{{ messages[0].none or '' }}{% endgeneration %}")
        with pytest.raises(UserError, match="the chat template writes nothing of the conversation"):
            Questions(silent).encode_question("a")
