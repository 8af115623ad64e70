"""Names from outside stay in their directory: one function decides, and everything that takes such a name calls it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lm_trainer.core.bucket import Bucket
from lm_trainer.core.bucket_files import download_objects
from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import check_relative_path, path_inside
from lm_trainer.data.cache.format import RECORD_KEYS, read_record
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import UnusableRow
from lm_trainer.data.formats.audio import AudioFormat
from lm_trainer.data.sources.base import Row
from lm_trainer.data.sources.files import check_listed_url
from lm_trainer.data.sources.hub import _Repository
from lm_trainer.data.sources.levanter import LevanterCache
from lm_trainer.data.tokenizer import load_tokenizer
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.output import atomic_directory, list_exported_files
from lm_trainer.export.peft_files import AdaptedWeights
from lm_trainer.export.weights import INDEX_FILE, Weights, read_json
from lm_trainer.report.figures import write_figures
from lm_trainer.reproduce.record import RunRecord
from tests.test_project import ROOT, nodes

LEAD_OUT = {
    "absolute": "/elsewhere/x",
    "of a key with two slashes": "/elsewhere/.bashrc",
    "above": "../x",
    "above, later": "a/../../x",
    "above, at the end": "a/..",
    "itself": ".",
    "a part that is itself": "a/./b",
    "empty": "",
    "two slashes": "a//b",
    "a slash at the end": "a/",
    "a zero": "a\0b",
    "a line feed": "a\nb",
    "an escape sequence": "\x1b]0;x\x07",
    "half a character": "\ud800",
    "of Windows": "..\\x",
    "a drive": "C:x",
    "a drive with a path": "c:/x",
    "no text": 3,
    "nothing": None,
}


@pytest.mark.parametrize("name", LEAD_OUT.values(), ids=LEAD_OUT)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UserError, match=r"^the list: the name .*; rename or remove it there$"):
        path_inside(tmp_path, name, "the list")


@pytest.mark.parametrize("name", ["a", "a/b.c/d", ".hidden", "...", "a..b", "a b", "ä:1", "model-00001-of-00002", "-x"])
def test_other_names_are_taken(tmp_path: Path, name: str) -> None:
    assert path_inside(tmp_path, name, "the list") == tmp_path / name
    assert check_relative_path(name, "the list") == name


def test_links_lead_to_the_directory_or_nowhere(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    for directory in (home / "real", outside):
        directory.mkdir(parents=True)
    (home / "inside").symlink_to("real")
    (home / "out").symlink_to(outside)
    (home / "file").symlink_to(outside / "not there yet")
    (home / "loop").symlink_to("loop")
    (tmp_path / "alias").symlink_to(home)
    assert path_inside(home, "inside/x", home) == home / "inside/x"
    # The directory itself may be behind a link: it is the user's choice.
    assert path_inside(tmp_path / "alias", "real/x", home) == tmp_path / "alias/real/x"
    for name in ("out/x", "file"):
        with pytest.raises(UserError, match=r"is a link to .*outside"):
            path_inside(home, name, home)
    with pytest.raises(UserError, match="is a link that leads back to itself"):
        path_inside(home, "loop", home)


class Objects(Bucket):
    """A bucket in memory."""

    def __init__(self, objects: dict[str, bytes]):
        super().__init__("s3://bucket/exp")
        self._objects = objects

    def read(self, key: str, **_: Any) -> bytes | None:
        return self._objects.get(key)

    def list(self, key: str = "", **_: Any) -> list[str]:
        start = f"{key}/" if key else ""
        return sorted(name.removeprefix(start) for name in self._objects if name.startswith(start))


@pytest.mark.parametrize("name", ["/elsewhere/.bashrc", "../x", "a/../../x", "a//b", "a\\b", "\x1b[2J"])
def test_no_key_of_a_bucket_leads_out_and_nothing_is_copied_before_all_are_looked_at(tmp_path: Path, name: str) -> None:
    to = tmp_path / "a" / "to"
    objects = Objects({"config.json": b"{}", name: b"evil", "zz": b"last"})
    with pytest.raises(UserError, match=r"s3://bucket/exp: the name .*; rename or remove it there"):
        download_objects(objects, objects.list(), to)
    assert not to.exists()


def test_a_link_that_was_planted_in_the_target_is_not_written_through(tmp_path: Path) -> None:
    to, victim = tmp_path / "to", tmp_path / "victim"
    to.mkdir()
    victim.write_text("mine")
    (to / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(UserError, match=r"metrics\.jsonl: is a link to .*victim"):
        download_objects(Objects({"metrics.jsonl": b"theirs"}), ["metrics.jsonl"], to)
    assert victim.read_text() == "mine"


def test_the_marks_of_folders_that_consoles_make_are_passed_over(tmp_path: Path) -> None:
    download_objects(Objects({"run/": b"", "run/a": b"1"}), ["run/", "run/a"], tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == ["run/a"]


def test_a_name_that_is_a_file_and_a_directory_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"b: s3://bucket/exp/a/b cannot be written there"):
        download_objects(Objects({"a": b"1", "a/b": b"2"}), ["a", "a/b"], tmp_path)


@pytest.mark.parametrize("files", [["x"], {"x": "1"}, {"x": -1}, "x", {"../x": 1}])
def test_the_list_of_an_export_is_checked(tmp_path: Path, files: Any) -> None:
    objects = Objects({"_COMPLETE.json": json.dumps({"files": files}).encode(), "x": b"1", "../x": b"1"})

    def read() -> None:
        listed = list_exported_files(objects)
        download_objects(objects, listed, tmp_path / "to", listed)

    with pytest.raises(UserError, match=r"is damaged|may lead out"):
        read()


def _open_linked_adapter(directory: Path) -> None:
    base = directory / "base"
    base.mkdir()
    save_file({"x": np.ones((2, 2), np.float32)}, base / "model.safetensors")
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (directory / "adapter_model.safetensors").symlink_to(directory.parent / "outside" / "x")
    AdaptedWeights(directory, base)


def _open_linked_tokenizer(name: str) -> Callable[[Path], Any]:
    def load(directory: Path) -> None:
        ByteTokenizer().save(directory)
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(directory.parent / "outside" / "x")
        load_tokenizer(directory)

    return load


def _read_linked_config(directory: Path) -> None:
    (directory / "config.json").symlink_to(directory.parent / "outside" / "x")
    read_json(directory / "config.json")


def _open_linked_index(directory: Path) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "x.safetensors"}}))
    (directory / "x.safetensors").symlink_to(directory.parent / "outside" / "x")
    Weights(directory)


LINKS: dict[str, Callable[[Path], Any]] = {
    "an adapter": _open_linked_adapter,
    "a chat template": _open_linked_tokenizer("chat_template.jinja"),
    "settings of a tokenizer": _open_linked_tokenizer("tokenizer_config.json"),
    "a configuration": _read_linked_config,
    "a shard": _open_linked_index,
}


@pytest.mark.parametrize("read", LINKS.values(), ids=LINKS)
def test_links_in_a_directory_of_somebody_else_take_no_file_of_this_machine_along(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("{}")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"is a link to .*outside"):
        read(tmp_path / "model")


def test_a_draft_that_is_a_link_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    (tmp_path / ".out.incomplete").symlink_to("mine")
    with (
        pytest.raises(UserError, match="is a link, and what it leads to would be emptied"),
        atomic_directory(tmp_path / "out", overwrite=True, replaceable=["*"]),
    ):
        pass
    assert (tmp_path / "mine" / "thesis").exists()


@pytest.mark.parametrize("name", ["../00000-00000", "/elsewhere/00000-00000", "00000-00000/../x", 3])
def test_parts_of_a_cache_have_the_names_that_it_gives(tmp_path: Path, name: Any) -> None:
    store = KvStore(str(tmp_path))
    lists = {"tokens": [1], "documents": [1], "sha256": ["0"], "text_bytes": [1]}
    store.write_json("ledger.json", {"format": 1, "parts": [name], **lists})
    with pytest.raises(UserError, match=r"ledger\.json is damaged"):
        Ledger.read(store)


def test_a_part_has_no_other_files_than_a_cache_makes(tmp_path: Path) -> None:
    store = KvStore(str(tmp_path))
    record = {**dict.fromkeys(RECORD_KEYS, 0), "blobs": {"bin/../../../x": {"sha256": "0", "bytes": 1}}}
    store.write_json("parts/00000-00000.json", record)
    with pytest.raises(UserError, match=r"00000-00000\.json is damaged"):
        read_record(store, "00000-00000")


@pytest.mark.parametrize(
    "path",
    ["/elsewhere/a.wav", "~/a.wav", "file:///elsewhere/a.wav", "local:///a.wav", "a::file:///elsewhere/a.wav",
     "simplecache::file:///a.wav", "git:///elsewhere:a.wav"],
)  # fmt: skip
@pytest.mark.parametrize(
    "row_location", ["s3://bucket/list.jsonl:3", "hf://datasets/a/b@1/x.parquet:7", "https://h/l.jsonl[2]"]
)
def test_a_list_from_elsewhere_names_no_recording_of_this_machine(row_location: str, path: str) -> None:
    row = Row(0, row_location, "", record={"audio": path, "text": "a"})
    with pytest.raises(UnusableRow, match="which a list from elsewhere may not"):
        AudioFormat().prepare(row)


@pytest.mark.parametrize("row_location", ["list.jsonl:3", "file:///d/list.jsonl:3"])
def test_a_list_of_this_machine_may(tmp_path: Path, row_location: str) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound")
    row = Row(0, row_location, "", record={"audio": str(tmp_path / "a.wav"), "text": "a"})
    with pytest.raises(UnusableRow) as raised:
        AudioFormat().prepare(row)
    assert "may not" not in str(raised.value)


@pytest.mark.parametrize("name", ["../x.jsonl", "/x.jsonl", "data::file:///x.jsonl", "data::memory:y.jsonl"])
def test_files_of_a_data_set_of_the_hub_are_files_of_it(name: str) -> None:
    with pytest.raises(UserError, match=r"leads? out|empty part|chain of URLs"):
        _Repository("org/set", "0" * 40, {name: 1}, []).make_file(name, download=False)


def test_a_listed_object_is_no_chain_of_urls() -> None:
    assert check_listed_url("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl"
    with pytest.raises(UserError, match="chain of URLs"):
        check_listed_url("s3://bucket/a::file:///elsewhere/x.jsonl")


@pytest.mark.parametrize("url", ["s3://bucket/..", "gs://bucket/a/../b", "s3://bucket/a\nb"])
def test_the_url_of_a_bucket_is_no_other_directory_here(url: str) -> None:
    with pytest.raises(UserError, match="rename or remove it"):
        Bucket(url)


def _write_run(directory: Path, **changes: Any) -> Path:
    record = {"id": "run", "checkpoints": "c", "identity": {"model": {}, "data": {}}, **changes}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "env.json").write_text('[{"step": 0}]')
    (directory / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    return directory


@pytest.mark.parametrize("name", ["../../x", "/elsewhere/x", "a\nb", 7])
def test_a_record_of_a_run_names_the_run_and_files_of_it(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UserError, match=r"run\.json: the name"):
        RunRecord.read(_write_run(tmp_path, id=name))
    changed = RunRecord.read(_write_run(tmp_path, changes=[{"step": 5, "config_before": name}]))
    with pytest.raises(UserError, match=r"run\.json: the name"):
        changed.load_config(1)


@pytest.mark.parametrize("name", ["../../x", "/elsewhere/x", 3])
def test_shards_of_a_cache_of_levanter_are_in_it(tmp_path: Path, name: Any) -> None:
    (tmp_path / "train").mkdir()
    ledger = {"is_finished": True, "layout": "sharded", "finished_shards": [name]}
    (tmp_path / "train" / "shard_ledger.json").write_text(json.dumps(ledger))
    (shard,) = LevanterCache(path=str(tmp_path)).shards("train")
    with pytest.raises(UserError, match=r"train: the name .*; rename or remove it there"):
        shard.token_arrays(np.dtype(np.int32))  # pyright: ignore[reportAttributeAccessIssue]


def test_figures_of_a_report_are_in_its_directory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    values = np.arange(3.0)

    def run(metric: str) -> Any:
        return SimpleNamespace(name="$run", path=Path("logs/run"), metrics={metric: (values, values)}, prediction=None)

    written = write_figures([run("eval/../../x$")], tmp_path / "figures")
    assert {path.parent for path in written} == {tmp_path / "figures"}
    with pytest.raises(UserError, match=r"logs/run: the name .* has a control character"):
        write_figures([run("eval/\x1bx")], tmp_path / "figures")


OUTSIDE = {
    "lm_trainer/core/bucket_files.py": {"directory.name"},
    "lm_trainer/export/output.py": {"f'.{out.name}.incomplete'", "f'.{out.name}.replaced'", "name"},
    "lm_trainer/export/weights.py": {"filename"},
    "lm_trainer/export/peft_files.py": {"name"},
    "lm_trainer/run/files/bucket_mirror.py": {"name"},
    "lm_trainer/run/files/directory.py": {"name"},
    "lm_trainer/data/tokenizer/hf.py": {"near[0]"},
    "lm_trainer/data/tokenizer/files.py": set(),
    "lm_trainer/data/sources/levanter.py": {"split", "entry.name"},
    "lm_trainer/ladder/curve/register.py": set(),
    "lm_trainer/ladder/fit/register.py": {"self.measured"},
    "lm_trainer/report/figures.py": set(),
    "lm_trainer/reproduce/proof.py": {"name", "record.id", "run_id", "run_path"},
    "lm_trainer/reproduce/record.py": set(),
    "lm_trainer/reproduce/verify.py": set(),
}
"""Modules that make paths of names from outside, and what `/` joins in them beside constants: names of our own making
and of the user's own files, and the base of an adapter, which its file names as a path."""


def joined_operands(source: str) -> set[str]:
    """Operands that `/` joins to paths in a module, but for constants."""
    names = {
        ast.unparse(node.right)
        for node in nodes(ROOT / source)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        # Numbers are divided as well.
        if isinstance(node.right, ast.Name | ast.Attribute | ast.Subscript | ast.JoinedStr)
    }
    return {name for name in names if not name.isupper()}


@pytest.mark.parametrize("source", OUTSIDE)
def test_names_from_outside_are_joined_in_one_place_alone(source: str) -> None:
    assert joined_operands(source) == OUTSIDE[source]


def test_every_reader_of_a_listing_is_known() -> None:
    """A new module that copies objects, or opens a directory of somebody else, has to be looked at."""
    readers = {"download_objects", "list_exported_files", "path_inside", "check_relative_path", "check_listed_url"}
    callers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lm_trainer").rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and readers & {alias.name for alias in node.names}
    }
    assert callers == {
        *OUTSIDE,
        "lm_trainer/core/bucket.py",
        "lm_trainer/data/sources/hub.py",
        "lm_trainer/data/sources/urls.py",
        "lm_trainer/run/weights/open_model.py",
    }
