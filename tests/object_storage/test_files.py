"""Files in a bucket that are larger than one request takes, and what is done with an export there."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.core import bucket_files
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.bucket_files import download_objects, local_copy, staging_directory, upload_directory
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.sources.urls import match_files
from lm_trainer.export import hub
from lm_trainer.export.huggingface import FILES
from lm_trainer.export.output import atomic_directory, check_output, list_exported_files
from lm_trainer.export.settings import HfSettings
from lm_trainer.health.signals import SAVE_NOW, STOP_AFTER_SAVE
from lm_trainer.run.files.bucket_mirror import BucketMirror
from lm_trainer.run.files.find_run import find_run
from lm_trainer.run.weights.saved_model import SETTINGS, read_published_settings
from tests.object_storage.proxy import PASSING, Proxy, inject_randomly, limit_to, refuse

SMALLEST_PART = 5 << 20
"""Bytes, of S3."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a file that one request does not take, and which is read in pieces."""
    monkeypatch.setattr(bucket_files, "_MAX_PUT", {"s3": 2 * SMALLEST_PART})
    monkeypatch.setattr(bucket_files, "_PART_BYTES", SMALLEST_PART)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "large").write_bytes(os.urandom(2 * SMALLEST_PART + 7))
    (tmp_path / "files" / "empty").touch()
    (tmp_path / "files" / "small").write_text("small")
    return tmp_path / "files"


def test_a_large_file_is_written_in_parts_and_read_in_pieces(behind: Bucket, proxy: Proxy, files: Path) -> None:
    pytest.importorskip("s3fs")
    upload_directory(files, behind)
    assert sum(method == "PUT" and "partNumber=" in path for method, path in proxy.requests) == 3
    read, sizes = files.parent / "read", {file.name: file.stat().st_size for file in files.iterdir()}
    proxy.requests.clear()
    download_objects(behind, sizes, read, sizes)
    assert sum(method == "GET" and path.endswith("/large") for method, path in proxy.requests) == 3
    assert {file.name: file.read_bytes() for file in read.iterdir()} == {
        file.name: file.read_bytes() for file in files.iterdir()
    }


def test_a_server_that_refuses_a_part_is_told_in_one_line(behind: Bucket, proxy: Proxy, files: Path) -> None:
    pytest.importorskip("s3fs")
    proxy.fault = limit_to(refuse(403), "PUT", path="partNumber=")
    with pytest.raises(MachineError, match=r"cannot write large: .*permit \(write, list") as raised:
        upload_directory(files, behind)
    assert len(str(raised.value).splitlines()) == 1
    proxy.fault = None
    assert "large" not in behind.list()


def test_without_the_extra_a_large_file_is_named_before_anything_is_copied(
    behind: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * 2**30 + 1)  # takes no room on the disk
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"model\.safetensors has 5,368,709,121 bytes.*lm_trainer\[s3\]"):
        upload_directory(tmp_path, behind)
    assert behind.list() == []


def test_text_at_urls_of_a_bucket_is_listed_and_read(behind: Bucket, proxy: Proxy) -> None:
    pytest.importorskip("s3fs")
    for name in ("b.txt", "a.txt"):
        behind.write(name, b"text of " + name.encode())
    proxy.fault = inject_randomly(PASSING, share=0.1, seed=1)
    ((_, files),) = match_files([f"{behind}/*.txt"], "data.train_urls")
    assert [file.name for file in files] == [f"{behind}/a.txt", f"{behind}/b.txt"]
    assert [file.size for file in files] == [13, 13]


def test_requests_to_save_and_to_stop_stay_on_their_machine(behind: Bucket, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", SAVE_NOW, STOP_AFTER_SAVE):
        (tmp_path / "a" / name).write_text("{}\n")
    with BucketMirror(tmp_path / "a", behind):
        pass
    assert BucketMirror(tmp_path / "b", behind).fetch()
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["metrics.jsonl"]


def test_an_export_in_a_bucket_is_uploaded_to_the_hub(behind: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded = dict[str, bytes]()

    class Hub:
        endpoint = "https://hub"

        def __init__(self, token: str):
            del token

        def create_repo(self, name: str, **_: Any) -> None:
            assert name == "me/run"

        def repo_info(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(private=name == "me/run")

        def upload_folder(self, folder_path: Path, allow_patterns: list[str], **_: Any) -> None:
            for file in folder_path.iterdir():
                if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                    uploaded[file.name] = file.read_bytes()

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(hub, "check_push", lambda _: None)
    with atomic_directory(behind, overwrite=False, replaceable=FILES) as draft:
        (draft / "config.json").write_text("{}")
        (draft / "model.safetensors").write_bytes(b"weights")
    pushed = hub.push(behind, "me/run", public=False, patterns=FILES)
    assert pushed.url == "https://hub/me/run"
    # The object that makes the export complete in the bucket stays there.
    assert uploaded == {"config.json": b"{}", "model.safetensors": b"weights"}
    behind.delete("config.json")
    with pytest.raises(UserError, match=r"config\.json is gone; export the model again"):
        hub.push(behind, "me/run", public=False, patterns=FILES)


@pytest.mark.parametrize("key", ["/elsewhere/.bashrc", "a//x", "..\\x"])
def test_a_key_that_leads_out_is_refused_wherever_a_listing_is_copied(
    behind: Bucket, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home" / "of" / "run"
    behind.write("run/.copy", b'{"origin": "theirs"}')
    for name in ("run.json", "metrics.jsonl", key):
        behind.write(f"run/{name}", b"{}\n")
    for copy in (BucketMirror(home, behind).fetch, lambda: local_copy(behind, "run"), lambda: find_run(str(behind))):
        with pytest.raises(UserError, match=r"the name .* there$"):
            copy()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_settings_of_a_published_model_lie_beside_checkpoints_and_in_exports(behind: Bucket, tmp_path: Path) -> None:
    assert read_published_settings(behind) is None
    settings = HfSettings({"eos_token_id": [1, 2]}, {"top_k": 5}, None, {"processor_config.json": b"\xff"})
    with staging_directory(behind) as directory:
        settings.write(directory / SETTINGS)
    assert read_published_settings(behind) == settings
    with atomic_directory(behind / "out", overwrite=False, replaceable=FILES) as draft:
        settings.write(draft)
        (draft / "additional_chat_templates").mkdir()
        (draft / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    check_output(behind / "out", overwrite=True, replaceable=FILES)
    copy = local_copy(behind / "out", sizes=list_exported_files(behind / "out"))
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert HfSettings.read(copy) == settings
