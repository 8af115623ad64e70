"""ArrayRecord files and archives of WebDataset, as their own libraries write them; layouts of ShareGPT and Alpaca."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats import ChatFormat, SupervisedFormat, UnusableRow
from lm_trainer.data.sources import BadRow, Row, Shard
from lm_trainer.data.sources.array_record import ArrayRecordFiles
from lm_trainer.data.sources.web_dataset import WebDataset
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.data.test_chat import CHATML, CONVERSATION
from tests.data.test_formats import encode, with_specials
from tests.data.test_sources import rows_of, texts


def write_records(path: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:4")
    for record in records:
        writer.write(record)
    writer.close()


def test_array_records_from_any_row_on(tmp_path: Path) -> None:
    for name, count in (("a", 1030), ("b", 3)):
        write_records(
            tmp_path / f"{name}.array_record", [b'{"text": "%s %d"}' % (name.encode(), i) for i in range(count)]
        )
    rows = rows_of(tmp_path / "*.array_record")
    assert texts(rows) == [f"a {i}" for i in range(1030)] + ["b 0", "b 1", "b 2"]
    assert [row.number for row in rows] == list(range(1033))
    assert rows[1032].where == f"{tmp_path}/b.array_record:3"
    for start in (0, 1, 1024, 1030, 1032, 1033):
        assert rows_of(tmp_path / "*.array_record", start=start) == rows[start:]
    by_url = rows_of(f"file://{tmp_path}/a.array_record")
    assert [row._replace(where=row.where.removeprefix("file://")) for row in by_url] == rows[: len(by_url)]


def test_array_records_of_text_and_broken_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    write_records(path, [b"plain", b"\xff", "größer".encode()])
    shard: Shard
    (shard,) = ArrayRecordFiles(content="text").shards("train", [str(path)])
    one, bad, other = shard.rows()
    assert texts([one, other]) == ["plain", "größer"]
    assert isinstance(bad, BadRow)
    assert bad.where == f"{path}:2"
    (first, *_) = rows_of(path)
    assert isinstance(first, BadRow)
    assert "for plain text, set data.source.content: text" in first.reason
    with pytest.raises(UserError, match="text has no fields"):
        ArrayRecordFiles(content="text").shards("train", [str(path)], fields=("ids",))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"a\.array_record is truncated or damaged"):
        rows_of(path)


def samples_of(path: Path, text_key: str = "text", start: int = 0) -> list[Row | BadRow]:
    (shard,) = WebDataset().shards("train", [str(path)], text_key)
    return list(shard.rows(start))


def write_samples(path: Path, samples: list[dict[str, Any]]) -> None:
    import webdataset  # which imports torch

    with webdataset.TarWriter(str(path)) as writer:  # pyright: ignore[reportAttributeAccessIssue]
        for sample in samples:
            writer.write(sample)


SAMPLES = [
    {"__key__": f"dir/{i:04d}", "txt": f"text {i}", "json": {"caption": f"caption {i}"}, "png": b"\x00\xff" * 600}
    for i in range(7)
]


@pytest.mark.parametrize("packed", [False, True])
def test_samples_of_web_datasets(tmp_path: Path, packed: bool) -> None:
    write_samples(tmp_path / "a.tar", SAMPLES)
    path = tmp_path / "a.tar"
    if packed:
        path = tmp_path / "a.tar.gz"
        path.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    rows = samples_of(path, "txt")
    assert texts(rows) == [f"text {i}" for i in range(7)]
    assert rows[3].where == f"{path}:dir/0003"
    assert samples_of(path, "txt", 4) == rows[4:]
    assert texts(samples_of(path, "{txt}; {json.caption}"))[6] == "text 6; caption 6"
    (first, *_) = samples_of(path)
    assert isinstance(first, BadRow)
    assert first.reason == "no field 'text' (fields: json, png, txt); data.text_key names the field to read"


def test_damaged_archives_and_samples(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.tar", [{"__key__": "x", "txt": b"\xff"}, {"__key__": "y", "txt": "fine"}])
    bad, fine = samples_of(tmp_path / "a.tar", "txt")
    assert isinstance(bad, BadRow)
    assert bad.reason == "invalid UTF-8 at byte 0 of its .txt"
    assert texts([fine]) == ["fine"]
    content = (tmp_path / "a.tar").read_bytes()
    # Inside of a file, at its end, and inside of the header of the next one.
    for size in (700, 1024, 1100):
        (tmp_path / "a.tar").write_bytes(content[:size])
        with pytest.raises(UserError, match=r"a\.tar is damaged"):
            samples_of(tmp_path / "a.tar", "txt")


@pytest.mark.parametrize("packed", [False, True])
def test_links_of_archives_are_the_files_that_they_lead_to(tmp_path: Path, packed: bool) -> None:
    members: list[tuple[str, str | bytes]] = [
        ("dir/a.txt", b"shared"),
        ("dir/a.png", b"\0" * 2000),
        ("dir/b.txt", "hard dir/a.txt"),
        ("dir/c.txt", "symbolic a.txt"),
        ("dir/d.txt", "symbolic ./e.txt"),
        ("dir/e.txt", "hard dir/b.txt"),
        ("dir/f.txt", b""),
        ("dir/g.txt", "symbolic ../../etc/passwd"),
        ("dir/h.txt", "symbolic h.txt"),
    ]
    path = tmp_path / ("a.tar.gz" if packed else "a.tar")
    with tarfile.open(path, "w:gz" if packed else "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                kind, member.linkname = content.split()
                member.type = tarfile.LNKTYPE if kind == "hard" else tarfile.SYMTYPE
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    rows = samples_of(path, "txt")
    assert texts(rows[:6]) == ["shared"] * 5 + [""]
    for row in rows[6:]:
        assert isinstance(row, BadRow)
        assert row.reason == "its .txt is a link to no file of the archive"
    assert len(rows) == 8


class TestShareGpt:
    format = ChatFormat(messages_field="conversations", role_field="from", content_field="value")
    names = {"user": "human", "assistant": "gpt", "system": "system"}

    def test_conversations_are_those_of_roles_and_contents(self) -> None:
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", chat_template=CHATML)
        shared = [{"from": self.names[one["role"]], "value": one["content"]} for one in CONVERSATION]
        actual = encode(self.format, {"conversations": shared}, tokenizer)
        expected = encode(ChatFormat(), {"messages": CONVERSATION}, tokenizer)
        assert list(actual.ids) == list(expected.ids)
        np.testing.assert_array_equal(actual.loss_mask, expected.loss_mask)
        bots = [{**one, "from": one["from"].replace("gpt", "bot")} for one in shared]
        other = self.format.model_copy(update={"roles": {"bot": "assistant"}})
        assert list(encode(other, {"conversations": bots}, tokenizer).ids) == list(expected.ids)

    def test_the_identity_of_other_conversations_stays(self) -> None:
        tokenizer = with_specials("<|im_start|>", "<|im_end|>", chat_template=CHATML)
        keys = {"type", "messages_field", "mask_user_turns", "chat_template"}
        assert (ChatFormat().identity(tokenizer) or {}).keys() == keys
        assert "role_field" in (self.format.identity(tokenizer) or {})

    def test_the_layout_is_told_where_it_is_not_expected(self) -> None:
        row = Row(0, "here", "", record={"messages": [{"from": "human", "value": "x"}]})
        with pytest.raises(UnusableRow, match="set role_field: from and content_field: value"):
            ChatFormat().prepare(row)


class TestAlpaca:
    format = SupervisedFormat(
        input_field="instruction", context_field="input", output_field="output", separate_with="\n"
    )

    @pytest.mark.parametrize(("context", "prompt"), [("x y", "Sort.\n\nx y\n"), ("", "Sort.\n"), (None, "Sort.\n")])
    def test_the_input_belongs_to_the_prompt(self, context: str | None, prompt: str) -> None:
        record = {"instruction": "Sort.", "input": context, "output": "done"}
        document = encode(self.format, record, ByteTokenizer())
        assert bytes([*document.ids]).decode() == f"{prompt}done"
        assert np.asarray(document.loss_mask).sum() == 4

    def test_other_records_are_known_as_before(self) -> None:
        assert "context_field" not in (SupervisedFormat().identity(ByteTokenizer()) or {})
        assert "context_field" in (self.format.identity(ByteTokenizer()) or {})
        with pytest.raises(ValidationError, match="name another field"):
            SupervisedFormat(context_field="prompt")
