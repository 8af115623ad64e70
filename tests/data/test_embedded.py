"""The embedded source: the text of Python's standard library."""

from __future__ import annotations

from pathlib import Path

from lm_trainer.data.sources import Row
from lm_trainer.data.sources.embedded import Embedded


class TestEmbedded:
    def names(self, split, **options) -> list[str]:
        return [row.where for shard in Embedded(**options).shards(split) for row in shard.rows()]

    def test_is_the_standard_library_without_its_tests(self) -> None:
        names = self.names("train") + self.names("validation")
        assert {"argparse.py", "asyncio/base_events.py", "pydoc_data/topics/for"} <= set(names)
        assert not [
            name for name in names if "/tests/" in f"/{name}" or "site-packages" in name or "__pycache__" in name
        ]
        assert len(names) == len(set(names)) > 400

    def test_is_read_exactly(self) -> None:
        import argparse

        (text,) = (
            row.text
            for split in ("train", "validation")
            for shard in Embedded().shards(split)
            for row in shard.rows()
            if row.where == "argparse.py" and isinstance(row, Row)
        )
        assert text.encode() == Path(argparse.__file__).read_bytes()

    def test_splits_do_not_overlap_and_do_not_depend_on_each_other(self) -> None:
        train, validation = self.names("train"), self.names("validation")
        assert not set(train) & set(validation)
        assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.08
        assert train == sorted(train), "shards in the order of the names"

    def test_has_several_shards_of_similar_size(self) -> None:
        sizes = [shard.size for shard in Embedded().shards("train")]
        assert 4 <= len(sizes) <= 8
        assert max(sizes) < 2 * min(sizes)

    def test_max_bytes_takes_a_part_of_it(self) -> None:
        small = Embedded(max_bytes=1 << 20)
        assert (
            800_000 < sum(shard.size for split in ("train", "validation") for shard in small.shards(split)) <= 1 << 20
        )
        assert set(self.names("train", max_bytes=1 << 20)) < set(self.names("train"))
        assert 1 <= len(self.names("validation", max_bytes=1 << 20)) < 0.2 * len(self.names("train", max_bytes=1 << 20))

    def test_rows_resume(self) -> None:
        shard = Embedded().shards("validation")[0]
        assert list(shard.rows(2)) == list(shard.rows())[2:]
