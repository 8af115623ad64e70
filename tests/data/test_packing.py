"""Packing: the plan against one made by trying every row, its rows against the documents, and against the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats import SupervisedFormat
from lm_trainer.data.inspect import cache_stats
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.packing import PackedRows, PackingPlan, open_packing_plan, pack_best_fit
from lm_trainer.data.rows.packing_stats import packing_stats
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.open_cache import OpenCache, open_cache
from lm_trainer.models.gpt2 import Gpt2Config
from tests.data.conftest import MakeBuild

EOS = 256


def random_lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(4, 1, count).astype(np.int64) + 2


def plan_by_trying_every_row(lengths: list[int], seq_len: int, group: int) -> list[list[tuple[int, int]]]:
    starts = np.cumsum([0, *lengths]).tolist()
    rows: list[list[tuple[int, int]]] = []
    for first in range(0, len(lengths), group):
        rests = []
        for start, length in list(zip(starts, lengths, strict=False))[first : first + group]:
            inputs = length - 1
            while inputs >= seq_len:
                rows.append([(start, seq_len)])
                start, inputs = start + seq_len, inputs - seq_len
            rests.append((start, inputs))
        placed: list[list[tuple[int, int]]] = []
        for start, inputs in sorted(rests, key=lambda remainder: -remainder[1]):
            rooms = [(seq_len - sum(n for _, n in row), index) for index, row in enumerate(placed)]
            fitting = [room for room in rooms if room[0] >= inputs]
            if not inputs:
                continue
            if fitting:
                placed[min(fitting)[1]].append((start, inputs))
            else:
                placed.append([(start, inputs)])
        rows += placed
    return rows


def rows_of(plan: PackingPlan) -> list[list[tuple[int, int]]]:
    pieces = list(zip(plan.starts_P.tolist(), plan.lengths_P.tolist(), strict=True))
    firsts = plan.firsts_R.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(firsts)]


@pytest.mark.parametrize("seq_len", [16, 100, 512])
def test_the_plan_is_that_of_trying_every_row(seq_len: int) -> None:
    lengths = random_lengths(300)
    assert rows_of(pack_best_fit(lengths, seq_len, group=64)) == plan_by_trying_every_row(lengths.tolist(), seq_len, 64)


def test_every_target_is_in_one_row_and_few_positions_are_wasted() -> None:
    lengths = random_lengths(5_000)
    plan = pack_best_fit(lengths, 256)
    targets = np.concatenate([np.arange(s + 1, s + 1 + n) for row in rows_of(plan) for s, n in row])
    first_tokens = np.cumsum(lengths) - lengths
    expected = np.setdiff1d(np.arange(lengths.sum()), first_tokens)
    np.testing.assert_array_equal(np.sort(targets), expected)
    stats = packing_stats(lengths, 256)
    assert stats["best_fit"].used == len(expected) / (plan.num_rows * 256)
    assert stats["best_fit"].used > 0.99
    assert stats["best_fit"].cut == (lengths > 257).mean()
    assert stats["concat"].cut > 2 * stats["best_fit"].cut


def test_concat_stats_are_those_of_counting() -> None:
    lengths = random_lengths(500)
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    packed = len(ends) // 64 * 64
    stats = packing_stats(lengths, 64)["concat"]
    assert stats.rows == packed // 64
    assert stats.used == (~ends[:packed]).mean()
    starts = np.cumsum(lengths) - lengths
    inputs = [np.arange(start, start + n - 1) // 64 for start, n in zip(starts, lengths, strict=True)]
    assert stats.cut == np.mean([len(set(rows)) > 1 for rows in inputs])


@pytest.fixture
def build(make_build: MakeBuild) -> Build:
    return make_build()


def stream_of(build: Build) -> TokenStream:
    return TokenStream(build.store, build.run(), token_dtype(257))


def test_lengths_of_documents_are_put_together_across_parts(build: Build, documents: list[str]) -> None:
    lengths = document_lengths(build.store, build.run())
    texts = [text for first in range(3) for text in documents[first::3]]
    assert lengths.tolist() == [len(text.encode()) + 1 for text in texts]


def test_rows_hold_the_documents(build: Build) -> None:
    stream, seq_len = stream_of(build), 4096
    plan = open_packing_plan(open_cache(build, build.run()), seq_len)
    rows = PackedRows(stream, plan, seq_len, EOS)
    everything = stream.read_from(0)
    numbers = np.random.default_rng(0).permutation(rows.num_rows)
    batch = rows.read(numbers)
    assert [str(array.dtype) for array in jax.tree.leaves(batch)] == ["int32", "int32", "float32", "int32", "int32"]
    for index, number in enumerate(numbers.tolist()):
        column = 0
        for segment, (start, length) in enumerate(rows_of(plan)[number]):
            columns = slice(column, column + length)
            np.testing.assert_array_equal(batch.tokens[index, columns], everything[start : start + length])
            np.testing.assert_array_equal(batch.targets[index, columns], everything[start + 1 : start + 1 + length])
            np.testing.assert_array_equal(batch.positions[index, columns], np.arange(length))
            assert (batch.segments[index, columns] == segment).all()
            assert (batch.weights[index, columns] == 1).all()
            column += length
        assert (batch.segments[index, column:] == -1).all()
        assert not batch.weights[index, column:].any()
    for field, alone in zip(batch[:5], rows.read(numbers[3:4])[:5], strict=True):
        np.testing.assert_array_equal(field[3], alone[0])


def test_the_plan_is_kept_and_read_again(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = build.run()
    plan = open_packing_plan(open_cache(build, ledger), 512)
    monkeypatch.setattr(OpenCache, "document_lengths", lambda _: pytest.fail("read, not made"))
    for array, reread in zip(plan, open_packing_plan(open_cache(build, ledger), 512), strict=True):
        np.testing.assert_array_equal(array, reread)
    (path,) = Path(build.store.url).glob("packing/*.bin")
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.undo()
    for array, reread in zip(plan, open_packing_plan(open_cache(build, ledger), 512), strict=True):
        np.testing.assert_array_equal(array, reread)


def test_a_remote_cache_has_the_same_plan(make_build: MakeBuild) -> None:
    local, remote = make_build(), make_build(store=KvStore("memory://packing/cache"))
    batches = []
    for build in (local, remote, remote):
        rows = PackedRows(stream_of(build), open_packing_plan(open_cache(build, build.run()), 700), 700, EOS)
        batches.append(rows.read(np.arange(rows.num_rows)))
    for one, *copies in zip(*map(jax.tree.leaves, batches), strict=True):
        for other in copies:
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_packed_documents_have_the_logits_they_have_alone(build: Build) -> None:
    """Attention and positions stay within a document, so that its row changes nothing."""
    stream = stream_of(build)
    rows = PackedRows(stream, pack_best_fit(random_lengths(40), 64), 64, EOS)
    row = max(range(rows.num_rows), key=lambda index: rows.plan.firsts_R[index + 1] - rows.plan.firsts_R[index])
    config = Gpt2Config(seq_len=64, hidden_dim=32, num_layers=2, num_heads=2)
    model = config.build(vocab_size=257, rngs=nnx.Rngs(0))
    packed = rows.read(np.array([row]))
    logits = np.asarray(jax.jit(model)(packed.tokens, packed.positions, packed.segments))[0]
    pieces = rows_of(rows.plan)[row]
    assert len(pieces) > 2
    column = 0
    for start, length in pieces:
        tokens = np.full((1, 64), EOS, np.int32)
        tokens[0, :length] = stream.read(np.array([start]), length)[0]
        segments = np.where(np.arange(64) < length, 0, -1)[None].astype(np.int32)
        alone = np.asarray(jax.jit(model)(tokens, np.arange(64, dtype=np.int32)[None], segments))[0]
        np.testing.assert_allclose(logits[column : column + length], alone[:length], atol=2e-5)
        column += length


def test_packing_is_chosen_by_the_configuration(make_config: Callable[..., DataConfig]) -> None:
    packed, concat = (open_data(make_config(packing=kind), seq_len=512, seed=0) for kind in ("best_fit", "concat"))
    assert packed.fingerprint() != concat.fingerprint()
    for data, has_padding in ((packed, True), (concat, False)):
        rows = data.train_sets[0].num_rows
        (batch,) = data.train(rows, rows=range(rows), num_steps=1)
        assert (batch.segments == -1).any() == has_padding
    held_out = open_data(make_config(packing="best_fit", num_validation_sequences=3), seq_len=512, seed=0)
    (evals,) = held_out.validation().values()
    assert isinstance(evals, EvalSet)
    (train,) = held_out.train_sets
    assert isinstance(train.rows, PackedRows)
    plan = train.rows.plan
    assert (plan.starts_P + plan.lengths_P).max() == evals.first_token - 1


@pytest.fixture
def make_config(corpus: Path, tmp_path: Path) -> Callable[..., DataConfig]:
    def make(**keys: Any) -> DataConfig:
        default = {"train_urls": str(corpus / "*.jsonl"), "tokenizer": "bytes", "cache_dir": str(tmp_path / "packed")}
        return DataConfig.model_validate({**default, **keys})

    return make


class TestAnswers:
    """Prompts with answers: an answer is learnt with its prompt in view, unless both are longer than a row."""

    START = "\x02"
    """Begins every prompt, and is nowhere else."""

    @pytest.fixture
    def records(self) -> list[dict[str, str]]:
        sizes = np.random.default_rng(0).integers((11, 22), (61, 122), (400, 2)).tolist()
        return [{"prompt": self.START + "p" * (a - 1), "response": "r" * b} for a, b in sizes]

    def open_data(self, directory: Path, records: list[dict[str, str]], seq_len: int, **keys: Any) -> Data:
        source = InMemory(train=[*records])
        section = {"tokenizer": "bytes", "cache_dir": str(directory / "cache"), "format": SupervisedFormat(), **keys}
        return open_data(DataConfig(source=source, **section), seq_len=seq_len, seed=0)

    def share_without_beginning(self, data: Data) -> tuple[float, int]:
        """The share of the tokens in the loss whose row does not have the beginning of their document before them, and
        the number of tokens in the loss."""
        rows = data.train_sets[0].rows
        batch = rows.read(np.arange(rows.num_rows))
        unseen = counted = 0
        for tokens, weights, segments in zip(batch.tokens, batch.weights, batch.segments, strict=True):
            for segment in range(int(segments.max()) + 1):
                in_loss = int((weights[segments == segment] > 0).sum())
                counted += in_loss
                unseen += in_loss * (ord(self.START) not in tokens[segments == segment])
        return unseen / counted, counted

    @pytest.mark.parametrize(("seq_len", "concat", "split"), [(128, 0.591, None), (256, 0.312, 0)])
    def test_have_their_prompt_in_view(
        self, records: list[dict[str, str]], tmp_path: Path, seq_len: int, concat: float, split: float | None
    ) -> None:
        total = sum(len(record["response"]) + 1 for record in records)
        for keys, expected in (
            ({"packing": "concat"}, concat),
            ({"format": SupervisedFormat(on_too_long="split")}, split),
            ({}, 0),
            ({"format": SupervisedFormat(on_too_long="right")}, 0),
            ({"format": SupervisedFormat(on_too_long="left")}, None),
        ):
            data = self.open_data(tmp_path, records, seq_len, **keys)
            share, counted = self.share_without_beginning(data)
            assert share == (pytest.approx(expected, abs=0.001) if expected is not None else share)
            cache, (packing,) = data.caches["train/train"], {data.config.packing_of("train")}
            too_long = data.config.too_long_of("train")
            packed = cache_stats(cache.store, cache.ledger, seq_len, too_long=too_long).packing[packing]
            # Of the text, `concat` leaves out less than a row.
            assert packed.without_start == pytest.approx(share, abs=0.003)
            assert packed.left_out == pytest.approx(1 - counted / total, abs=0.006 if packing == "concat" else 1e-9)

    def test_longer_than_a_row_are_counted_and_refused_if_none_fits(self, tmp_path: Path) -> None:
        records = [{"prompt": "p" * size, "response": "r" * 3} for size in (4, 9, 30)]
        data = self.open_data(tmp_path, records, 12)
        assert data.long_examples() == {"train/train": (3, 1, 33, "skip", "documents")}
        for treatment in ("split", "left", "right"):
            other = self.open_data(tmp_path, records, 12, format=SupervisedFormat(on_too_long=treatment))
            assert other.fingerprint() != data.fingerprint()
            assert other.cache_dir == data.cache_dir
            assert [long.treatment for long in other.long_examples().values()] == [treatment]
        with pytest.raises(UserError, match=r"1 of 3 documents are longer than a row of model\.seq_len=12; .* skip"):
            self.open_data(tmp_path, records, 12, format=SupervisedFormat(on_too_long="raise"))
        with pytest.raises(UserError, match=r"1 of 1 documents .* raise it to 33, or set .*on_too_long: right"):
            self.open_data(tmp_path / "one", records[2:], 12)
        with pytest.raises(ValidationError, match="on_too_long: left has no effect with packing: concat"):
            self.open_data(tmp_path, records, 12, packing="concat", format=SupervisedFormat(on_too_long="left"))

    HELD_OUT = (("ab", "cde"), ("f", "g" * 9), ("hij", "k"), ("l" * 5, "m" * 12), ("n", "o"))
    """Prompts and answers: documents of 6, 11, 5, 18 and 3 tokens with their ends, the fourth too long for 12."""

    def open_held_out_set(self, directory: Path, **keys: Any) -> EvalSet:
        source = InMemory(
            train=[{"prompt": "p", "response": "r" * size} for size in (1, 20)],
            validation=[{"prompt": prompt, "response": response} for prompt, response in self.HELD_OUT],
        )
        format = SupervisedFormat(on_too_long=keys.pop("on_too_long", "split"))
        section = {"tokenizer": "bytes", "cache_dir": str(directory / "cache"), "format": format, **keys}
        (evals,) = open_data(DataConfig(source=source, **section), seq_len=12, seed=0).validation().values()
        assert isinstance(evals, EvalSet)
        return evals

    def decode_rows(self, held_out: EvalSet, batch_size: int = 2) -> list[tuple[str, str]]:
        """Inputs and targets of each row that is not padding; ends are `.`, targets that do not count are `_`."""

        def text(tokens: np.ndarray, counted: np.ndarray, other: str) -> str:
            return "".join(np.where(counted, [chr(x) if x < 256 else "." for x in tokens], other))

        rows = [
            (text(tokens, segments >= 0, ""), text(targets[segments >= 0], weights[segments >= 0] > 0, "_"))
            for batch in held_out.batches(batch_size, rows=range(batch_size))
            for tokens, targets, weights, _, segments in zip(*batch[:5], strict=True)
        ]
        return [row for row in rows if row[0]]

    def test_that_are_held_out_have_their_prompt_in_view(self, tmp_path: Path) -> None:
        """By hand: each document is in one row, the rest of the long one too; rows are in the order of their first."""
        full = self.open_held_out_set(tmp_path)
        # The answers and their ends: 4 + 10 + 2 + 13 + 2 tokens.
        assert self.decode_rows(full) == [
            ("abcdemmmmm", "_cde.mmmm."),
            ("fgggggggggno", "ggggggggg.o."),
            ("hijk", "__k."),
            ("lllllmmmmmmm", "____mmmmmmmm"),
        ]
        split = self.open_held_out_set(tmp_path, packing="concat")
        assert self.decode_rows(split) == [
            ("abcde.fggggg", "_cde._gggggg"),
            ("gggg.hijk.ll", "ggg.___k.___"),
            ("lllmmmmmmmmm", "__mmmmmmmmmm"),
            ("mmm.no.", "mm._o._"),
        ]
        for held_out, count in ((full, 1), (split, 2)):
            assert held_out.count_split_documents(np.cumsum([6, 11, 5, 18, 3])) == count
            self.check_places(held_out)
        assert self.decode_rows(full.with_stride(6)) == self.decode_rows(split.with_stride(6))

    @pytest.mark.parametrize(
        ("treatment", "last"),
        [
            ("skip", []),
            # The last 13 tokens of the document, and the first 13.
            ("left", [("mmmmmmmmmmmm", "mmmmmmmmmmm.")]),
            ("right", [("lllllmmmmmmm", "____mmmmmmmm")]),
        ],
    )
    def test_longer_than_a_row_are_cut_or_left_out(
        self, tmp_path: Path, treatment: str, last: list[tuple[str, str]]
    ) -> None:
        held_out = self.open_held_out_set(tmp_path, on_too_long=treatment)
        short = [("abcdehijk", "_cde.__k."), ("fgggggggggno", "ggggggggg.o.")]
        assert self.decode_rows(held_out) == [*short, *last]
        assert held_out.count_split_documents(np.cumsum([6, 11, 5, 18, 3])) == 0
        self.check_places(held_out)

    def check_places(self, held_out: EvalSet) -> None:
        """The places of a set's rows are those of its targets, each of which is predicted once."""
        used = []
        for index, batch in enumerate(held_out.batches(3, rows=range(3))):
            places = held_out.stream_positions(index * 3 + np.arange(3))[batch.weights > 0] + 1
            used += places.tolist()
            for position, target in zip(places.tolist(), batch.targets[batch.weights > 0].tolist(), strict=True):
                assert held_out.stream.read(np.array([position]), 1)[0, 0] == target
        assert len({*used}) == len(used)

    def test_hosts_and_first_batches_of_a_held_out_set_read_its_rows(self, tmp_path: Path) -> None:
        held_out = self.open_held_out_set(tmp_path)
        (full,) = held_out.batches(6, rows=range(6))
        parts = [next(held_out.batches(6, rows=rows)) for rows in ([0, 1], [2, 3, 4], [5])]
        for array, *of_hosts in zip(full[:5], *(part[:5] for part in parts), strict=True):
            assert np.array_equal(array, np.concatenate(of_hosts))
        assert (full.weights[4:] == 0).all()
        assert (full.segments[4:] == -1).all()
        (first,) = held_out.batches(2, rows=[0, 1], max_batches=1)
        assert np.array_equal(first.tokens, full.tokens[:2])

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            # From token 36 on: the long document begins at 22, and is cut at 34, as for training.
            (1, [("mmmmmno", "_mmm.o.")]),
            # From token 12 on: the second document begins at 6, and its answer at 7.
            (3, [("fgggggggggno", "_____gggg.o."), ("lllllmmmmmmm", "____mmmmmmmm"), ("mmmmmhijk", "mmmm.__k.")]),
        ],
    )
    def test_the_end_of_a_training_text_begins_with_the_document_that_is_cut(
        self, tmp_path: Path, rows: int, expected: list[tuple[str, str]]
    ) -> None:
        source = InMemory(train=[{"prompt": prompt, "response": response} for prompt, response in self.HELD_OUT])
        format = SupervisedFormat(on_too_long="split")
        section = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache"), "format": format}
        config = DataConfig(source=source, num_validation_sequences=rows, **section)
        (held_out,) = open_data(config, seq_len=12, seed=0).validation().values()
        assert isinstance(held_out, EvalSet)
        assert self.decode_rows(held_out) == expected
        self.check_places(held_out)

    def test_packing_is_chosen_by_the_format(self) -> None:
        chat, text = {"format": {"type": "chat"}}, {"train_urls": ["a.txt"]}
        assert DataConfig.model_validate(text).packing == "concat"
        assert DataConfig.model_validate({**text, **chat}).packing == "best_fit"
        assert DataConfig.model_validate({**text, **chat, "packing": "concat"}).packing == "concat"
        section = {"configs": {"web": text, "chats": {**text, **chat}}, "train_weights": {"web": 3, "chats": 1}}
        mixed = DataConfig.model_validate(section)
        assert mixed.packing == {"web": "concat", "chats": "best_fit"}
        assert [mixed.packing_of(name) for name in mixed.sets] == ["concat", "best_fit"]
        assert DataConfig.model_validate(mixed.model_dump()) == mixed
        with pytest.raises(ValidationError, match="packing: there is no set caht; did you mean chats"):
            DataConfig.model_validate({**section, "packing": {"caht": "best_fit"}})
