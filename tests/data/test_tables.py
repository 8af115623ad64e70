"""CSV, TSV and Arrow files, fields inside of others, and texts of several fields."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.sources import BadRow, Shard
from lm_trainer.data.sources.csv_files import CsvFiles
from tests.data.test_sources import rows_of, texts

RECORDS: list[dict[str, Any]] = [
    {"title": "one", "body": {"raw": 'He said "yes",\nand\tleft.'}},
    {"title": "zwei, größer", "body": {"raw": "x" * 200_000}},
    {"title": "", "body": {"raw": ""}},
    {"title": "{brace}", "body": {"raw": "plain"}},
]
FLAT = [{"title": record["title"], "text": record["body"]["raw"]} for record in RECORDS]


def write_csv(path: Path, **options: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["title", "text"], **options)
        writer.writeheader()
        writer.writerows(FLAT)


@pytest.mark.parametrize(("ending", "options"), [(".csv", {}), (".tsv", {"delimiter": "\t"})])
def test_csv_as_it_was_written(tmp_path: Path, ending: str, options: dict[str, Any]) -> None:
    write_csv(tmp_path / f"a{ending}", **options)
    rows = rows_of(tmp_path / f"a{ending}")
    assert texts(rows) == [record["text"] for record in FLAT]
    # The first record has a line end inside, so the second begins in line 4.
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "4", "5", "6"]
    for start in range(5):
        assert rows_of(tmp_path / f"a{ending}", start=start) == rows[start:]


def test_bad_records_of_csv_are_named_and_those_after_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,n\nfine,1\nshort\n"a"b,2\n\xff\xfe,3\n"two\nlines",4\nlast,5\n')
    rows = rows_of(tmp_path / "a.csv")
    contents = [row.reason if isinstance(row, BadRow) else row.text for row in rows]
    assert contents[0] == "fine"
    assert contents[1] == "1 fields, but there are 2 columns"
    assert contents[2].startswith("not CSV: ")
    assert contents[3:] == ["invalid UTF-8", "two\nlines", "last"]
    assert rows[3].where == f"{tmp_path}/a.csv:5"
    assert rows[5].where == f"{tmp_path}/a.csv:8"


def only_shard(source: CsvFiles, path: Path) -> Shard:
    (shard,) = source.shards("train", [str(path)])
    return shard


def test_csv_without_names_or_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('7;"one\n8;two"\n')
    source = CsvFiles(delimiter=";", columns=["n", "text"], quotes=False)
    assert texts([*only_shard(source, tmp_path / "a.csv").rows()]) == ['"one', 'two"']
    assert (
        only_shard(source, tmp_path / "a.csv").identity()
        != only_shard(CsvFiles(delimiter=";"), tmp_path / "a.csv").identity()
    )
    (tmp_path / "b.csv").write_text("text,text\na,b\n")
    with pytest.raises(UserError, match=r"does not name the columns, each once; name them in data\.source\.columns"):
        rows_of(tmp_path / "b.csv")
    with pytest.raises(ValidationError, match="expected one character"):
        CsvFiles(delimiter=", ")


def write_arrow(path: Path, kind: str) -> None:
    table = pyarrow.Table.from_pylist(RECORDS * 2)
    if kind == "feather":
        pyarrow.feather.write_feather(table, str(path), compression="zstd")
        return
    new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.mark.parametrize("kind", ["file", "stream", "feather"])
def test_arrow_from_any_row_on(tmp_path: Path, kind: str) -> None:
    write_arrow(tmp_path / "a.arrow", kind)
    rows = rows_of(tmp_path / "a.arrow", text_key="body.raw")
    assert texts(rows) == [record["body"]["raw"] for record in RECORDS * 2]
    assert rows[4].where == f"{tmp_path}/a.arrow:5"
    for start in (0, 2, 3, 5, 8):
        assert rows_of(tmp_path / "a.arrow", text_key="body.raw", start=start) == rows[start:]
    with pytest.raises(UserError, match=r"has no column 'body\.html' \(columns: title, body\)"):
        rows_of(tmp_path / "a.arrow", text_key="body.html")
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged"):
        rows_of(tmp_path / "a.arrow", text_key="body.raw")


def write(path: Path) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    elif path.suffix == ".arrow":
        write_arrow(path, "file")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
def test_texts_of_several_fields(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a{ending}")
    config = DataConfig(train_urls=[str(tmp_path / f"a{ending}")], text_template="# {title}\n\n{body.raw} {{end}}")
    (shard,) = config.shards("train")
    expected = [f"# {one['title']}\n\n{one['body']['raw']} {{end}}" if one["title"] else "" for one in RECORDS]
    assert texts([*shard.rows()][:4]) == expected
    assert shard.identity()["text_key"] == config.text_template


def test_fields_that_are_missing_or_no_text(tmp_path: Path) -> None:
    lines = [{"a": {"b": "x"}}, {"a": {}}, {"a": "x"}, {"a": {"b": 3}}, {"a.b": "by its own name", "a": {"b": "x"}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = rows_of(tmp_path / "a.jsonl", text_key="a.b")
    assert texts([rows[0], rows[4]]) == ["x", "by its own name"]
    reasons = [row.reason for row in rows if isinstance(row, BadRow)]
    assert reasons[0] == reasons[1] == "no field 'a.b' (fields: a); data.text_key names the field to read"
    assert reasons[2] == "the field 'a.b' is a number, not a string"
    (bad, *_) = rows_of(tmp_path / "a.jsonl", text_key="{a.b}: {c}")
    assert isinstance(bad, BadRow)
    assert bad.reason == "no field 'c' (fields: a); data.text_template names the field to read"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"text_template": "no field"}, "names no field"),
        ({"text_template": "{}"}, "a brace without the name of a field"),
        ({"text_template": "{a"}, "text_template: expected '}'"),
        ({"text_template": "{a}", "text_key": "b"}, "has no effect beside text_key"),
        ({"text_template": "{a}", "format": {"type": "ids"}}, "or a format that names its fields"),
        ({"text_key": "{a}"}, "a text of several is text_template"),
    ],
)
def test_templates_that_cannot_be_meant(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"train_urls": ["a.jsonl"], **keys})


def test_the_fields_of_a_format_may_lie_inside_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": {"ids": [5, 6, 7]}}) * 1 + "\n")
    section = {"train_urls": [str(tmp_path / "a.jsonl")], "format": {"type": "ids", "field": "x.ids"}}
    more = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    data = open_data(DataConfig.model_validate({**section, **more}), seq_len=2, seed=0)
    np.testing.assert_array_equal(next(data.train(1, rows=range(1), num_steps=1)).tokens, [[5, 6]])
