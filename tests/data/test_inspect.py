"""Reports on caches: `lmt data status`, `verify`, `inspect` and `stats`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data import inspect as report
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.provenance import documents_of_step
from lm_trainer.data.tokenize.build import BuildOptions

PIECE_BYTES = 1 << 15
"""Bytes of a file that are read as one row, fewer than in a run."""


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DataConfig, list[str]]:
    """Small texts around one that spans several parts, built; and all of them."""
    monkeypatch.setattr("lm_trainer.data.sources.text.PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr("lm_trainer.data.tokenize.plan.BuildOptions", partial(BuildOptions, part_bytes=(1000, 1000)))
    large = "".join(f"line {i} of the large one\n" for i in range(5 * PIECE_BYTES // 24))
    texts = ["before " * 20, "next to it", large, "right after it", "the end " * 200]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    keys = {"train_urls": str(tmp_path / "*.txt"), "tokenizer": "bytes", "num_workers": 0}
    config = DataConfig.model_validate({**keys, "cache_dir": str(tmp_path / "cache")})
    open_data(config, seq_len=64, seed=0)
    return config, texts


class TestInspect:
    def test_a_document_over_several_parts_is_one(self, long: tuple[DataConfig, list[str]], tmp_path: Path) -> None:
        config, texts = long
        ledger = Ledger.read(KvStore(str(tmp_path / "cache/train")))
        assert 0 in ledger.documents, "a part in which no document ends"
        expected = [(i, str(tmp_path / f"{i}.txt"), len(text) + 1, text) for i, text in enumerate(texts)]
        for first in range(len(texts)):
            for count in (1, 2, 9):
                shown = report.inspect_documents(config, "train", first, count)
                documents = [(document.number, document.where, document.tokens, document.text) for document in shown]
                assert documents == expected[first : first + count]

    def test_of_a_long_document_only_the_beginning_is_read(self, long: tuple[DataConfig, list[str]]) -> None:
        config, texts = long
        for chars in (1, 100, 5000):
            (shown,) = report.inspect_documents(config, "train", 2, 1, chars)
            assert chars < len(shown.text) < 100 * chars
            assert texts[2].startswith(shown.text)
            assert shown.tokens == shown.in_loss == len(texts[2]) + 1


SCHEDULE = BatchSchedule.constant(2)


class TestDamage:
    @pytest.fixture
    def config(self, tmp_path: Path) -> DataConfig:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(20)))
        keys = {"train_urls": str(tmp_path / "a.jsonl"), "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
        config = DataConfig.model_validate({**keys, "shuffle": False})
        open_data(config, seq_len=64, seed=0)
        return config

    @staticmethod
    def look(config: DataConfig, command: str) -> None:
        if command == "inspect":
            list(report.inspect_documents(config, "train", 3, 2))
        else:
            list(documents_of_step(open_data(config, seq_len=64, seed=0), SCHEDULE, 3))

    @pytest.mark.parametrize("command", ["inspect", "at"])
    @pytest.mark.parametrize("kind", ["bin", "len", "row", "json"])
    @pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\0" * 8])
    def test_is_named_with_the_way_out(
        self, config: DataConfig, tmp_path: Path, command: str, kind: str, content: bytes | None
    ) -> None:
        part = tmp_path / f"cache/train/parts/00000-00000.{kind}"
        part.unlink() if content is None else part.write_bytes(content)
        with pytest.raises(UserError, match=rf"(?i)00000-00000\.{kind}.* remove .*/cache/train to build it again"):
            self.look(config, command)
        wrong = report.verify_cache(
            KvStore(str(tmp_path / "cache/train")), Ledger.read(KvStore(str(tmp_path / "cache/train")))
        )
        assert f"00000-00000.{kind}" in wrong[0]

    @pytest.mark.parametrize("content", ["{}", "[]", '{"format": 1, "what": 2}', '{"format": 1, "parts": ["a"]}'])
    def test_of_the_ledger_too(self, config: DataConfig, tmp_path: Path, content: str) -> None:
        (tmp_path / "cache/train/ledger.json").write_text(content)
        with pytest.raises(MachineError, match=r"ledger\.json is damaged; remove .*/cache/train to build it again"):
            open_data(config, seq_len=64, seed=0)

    def test_of_a_part_that_no_ledger_lists_yet(self, config: DataConfig, tmp_path: Path) -> None:
        (tmp_path / "cache/train/ledger.json").unlink()
        (tmp_path / "cache/train/parts/00000-00000.json").write_text("{}")
        with pytest.raises(MachineError, match=r"00000-00000\.json is damaged; remove .*/cache/train"):
            open_data(config, seq_len=64, seed=0)


class TestMasks:
    @pytest.fixture
    def config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
        monkeypatch.setattr("lm_trainer.data.tokenize.plan.BuildOptions", partial(BuildOptions, part_bytes=(300, 300)))
        rows = [{"prompt": f"how much is {i} and {i}?", "response": f"it is {2 * i}" * (1 + i % 5)} for i in range(40)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {"train_urls": str(tmp_path / "a.jsonl"), "tokenizer": "bytes", "num_workers": 0, "shuffle": False}
        format = {"type": "supervised", "on_too_long": "split"}
        return DataConfig.model_validate({**keys, "format": format, "cache_dir": str(tmp_path / "c")})

    def test_are_shown(self, config: DataConfig) -> None:
        open_data(config, seq_len=32, seed=0)
        (shown,) = report.inspect_documents(config, "train", 3, 1)
        assert shown.text == "how much is 3 and 3?⟦it is 6it is 6it is 6it is 6⟧"
        assert shown.in_loss == 4 * len("it is 6") + 1, "the end counts"
        (beginning,) = report.inspect_documents(config, "train", 3, 1, 1)
        assert shown.text.startswith(beginning.text)

    @pytest.mark.parametrize("packing", ["concat", "best_fit"])
    @pytest.mark.parametrize("seq_len", [16, 32, 100])
    def test_decide_which_positions_are_used(self, config: DataConfig, packing: str, seq_len: int) -> None:
        config = config.model_copy(update={"packing": packing})
        data = open_data(config, seq_len=seq_len, seed=0)
        (train,) = data.train_sets
        batch = train.rows.read(np.arange(train.num_rows))
        cache = data.caches["train/train"]
        assert len(cache.ledger.parts) > 3
        statistics = report.cache_stats(cache.store, cache.ledger, seq_len).packing[packing]
        last = np.asarray(batch.weights)
        assert 0 < statistics.used < 0.9
        assert statistics.rows in (train.num_rows, train.num_rows - 1)
        assert statistics.used == pytest.approx(last[: statistics.rows].mean(), abs=1e-9)
