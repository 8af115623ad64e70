"""Batches: their tokens, their order, and any split of their rows."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.loader import TrainIterator
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.chunks import Chunks, make_batch
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.shuffle import FullShuffle, NoShuffle, ShuffleConfig
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.conftest import lmt_environment
from tests.data.conftest import MakeBuild
from tests.hangs import HANG_SECONDS

SEQ_LEN, BATCH, EOS = 48, 8, 256


def stream_of(build: Build) -> TokenStream:
    ledger = build.run()
    return TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))


@pytest.fixture
def stream(make_build: MakeBuild) -> TokenStream:
    return stream_of(make_build())


@pytest.fixture
def tokens(stream: TokenStream, documents: list[str]) -> np.ndarray:
    """All tokens, from the documents themselves."""
    texts = [text for first in range(3) for text in documents[first::3]]
    return np.concatenate([np.array([*text.encode(), EOS]) for text in texts])


def order_of(
    stream: TokenStream, shuffle: ShuffleConfig | None = None, *, seq_len: int = SEQ_LEN, seed: int = 0
) -> TrainOrder:
    chunks = Chunks(stream, seq_len, EOS)
    train = TrainSet("train", chunks, chunks.num_rows, shuffle or FullShuffle(), seed)
    return TrainOrder([train], Mixture([(0, (1,))]))


def batch_of(order: TrainOrder, step: int, size: int = BATCH) -> Batch:
    return order.read(np.arange(step * size, (step + 1) * size))


CONSTANT = BatchSchedule.constant(BATCH)


def assert_equal(one: Batch, other: Batch) -> None:
    for name in Batch._fields:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def documents_row_by_row(row: np.ndarray) -> tuple[list[float], list[int], list[int]]:
    """Weights, positions and segments of S + 1 tokens, one token at a time."""
    weights, positions, segments, position, segment = [], [], [], 0, 0
    for token in row[:-1].tolist():
        weights.append(0.0 if token == EOS else 1.0)
        positions.append(position)
        segments.append(segment)
        position, segment = (0, segment + 1) if token == EOS else (position + 1, segment)
    return weights, positions, segments


def test_stream_reads_across_parts(stream: TokenStream, tokens: np.ndarray) -> None:
    assert len(stream) == len(tokens)
    starts = np.array([0, 5, 20_000, len(tokens) - 70_000, 19_990])
    read = stream.read(starts, 70_000)
    assert read.dtype == np.int32
    for start, row in zip(starts, read, strict=True):
        np.testing.assert_array_equal(row, tokens[start : start + 70_000])


def test_stream_fills_beyond_its_end(stream: TokenStream, tokens: np.ndarray) -> None:
    (row,) = stream.read(np.array([len(tokens) - 3]), 10, fill=77)
    assert row.tolist() == [*tokens[-3:].tolist(), *[77] * 7]


def test_stream_of_a_remote_store_is_the_same(make_build: MakeBuild, tokens: np.ndarray) -> None:
    build = make_build(store=KvStore("memory://data/cache"))
    stream = stream_of(build)
    starts = np.array([0, 19_990, len(tokens) - 60_000])
    for start, row in zip(starts, stream.read(starts, 60_000), strict=True):
        np.testing.assert_array_equal(row, tokens[start : start + 60_000])
    assert Ledger.read(build.store).finished


def test_stream_names_lost_and_cut_parts(make_build: MakeBuild) -> None:
    build = make_build()
    ledger = build.run()
    path = Path(build.store.url) / f"parts/{ledger.parts[0]}.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(MachineError, match=r"\.bin has \d+ bytes, but \d+ were written"):
        stream_of(build).read(np.array([0]), 4)
    path.unlink()
    with pytest.raises(MachineError, match="lost a part"):
        stream_of(build).read(np.array([0]), 4)


def in_one_piece(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    padded = np.append(tokens, np.full(length, EOS))
    return np.stack([padded[start : start + length] for start in starts])


def test_stream_keeps_few_files_open(
    make_build: MakeBuild, monkeypatch: pytest.MonkeyPatch, tokens: np.ndarray
) -> None:
    import lm_trainer.data.cache.token_stream as module

    monkeypatch.setattr(module, "MAX_OPEN_PARTS", 2)
    build = make_build()
    stream = stream_of(build)
    starts = np.arange(0, len(tokens) - 10, 5000)
    for start, row in zip(starts, stream.read(starts, 10), strict=True):
        np.testing.assert_array_equal(row, tokens[start : start + 10])
    assert len(stream._maps) == 2
    everywhere = np.tile(starts, 3)
    np.testing.assert_array_equal(stream.read(everywhere, 1000, fill=EOS), in_one_piece(tokens, everywhere, 1000))
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        opened = (path.resolve() for path in descriptors.iterdir())
        cache_files = [path for path in opened if path.suffix == ".bin" and path.is_relative_to(build.store.url)]
        assert len(cache_files) == 2


def test_windows_are_the_stream_cut_into_rows(stream: TokenStream, tokens: np.ndarray) -> None:
    order = order_of(stream, NoShuffle())
    assert order.sets[0].num_rows == len(tokens) // SEQ_LEN
    batch = batch_of(order, 3)
    for row in range(BATCH):
        start = (3 * BATCH + row) * SEQ_LEN
        expected = tokens[start : start + SEQ_LEN + 1]
        np.testing.assert_array_equal(batch.tokens[row], expected[:-1])
        np.testing.assert_array_equal(batch.targets[row], expected[1:])
        weights, positions, segments = documents_row_by_row(expected)
        assert batch.weights[row].tolist() == weights
        assert batch.positions[row].tolist() == positions
        assert batch.segments[row].tolist() == segments


def test_documents_are_told_apart() -> None:
    tokens_BT = np.array([[5, EOS, 6, 7, EOS, EOS, 8], [1, 2, 3, 4, 5, 6, 7]], np.int32)
    batch = make_batch(tokens_BT, np.array([7, 7]), EOS)
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.weights.tolist() == [[1, 0, 1, 1, 0, 0], [1] * 6]
    assert [str(array.dtype) for array in jax.tree.leaves(batch)] == ["int32", "int32", "float32", "int32", "int32"]


def test_padding_has_no_weight_and_no_segment() -> None:
    tokens_BT = np.array([[1, 2, 3, 4, EOS], [1, 2, 3, EOS, EOS], [EOS] * 5], np.int32)
    batch = make_batch(tokens_BT, np.array([5, 3, 0]), EOS)
    assert batch.weights.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0] * 4]
    assert batch.segments.tolist() == [[0, 0, 0, 0], [0, 0, 0, -1], [-1] * 4]


def test_random_rows_agree_with_a_loop() -> None:
    rng = np.random.default_rng(0)
    tokens_BT = np.where(rng.random((64, 33)) < 0.1, EOS, rng.integers(0, 200, (64, 33))).astype(np.int32)
    batch = make_batch(tokens_BT, np.full(64, 33), EOS)
    for row in range(64):
        weights, positions, segments = documents_row_by_row(tokens_BT[row])
        assert batch.weights[row].tolist() == weights
        assert batch.positions[row].tolist() == positions
        assert batch.segments[row].tolist() == segments


def test_the_last_target_of_the_stream_has_no_weight_where_nothing_follows(
    make_build: MakeBuild, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x" * 31)
    stream = stream_of(make_build(urls=[str(tmp_path / "a.txt")]))
    assert len(stream) == 32
    batch = batch_of(order_of(stream, NoShuffle(), seq_len=16), 0, 2)
    assert batch.weights.sum(axis=1).tolist() == [16, 15]
    assert batch.segments.min() == 0


def test_each_window_comes_once_per_epoch(stream: TokenStream, tokens: np.ndarray) -> None:
    order = order_of(stream)
    steps = -(-order.sets[0].num_rows // BATCH)
    rows = np.concatenate([batch_of(order, step).tokens for step in range(steps)])[: order.sets[0].num_rows]
    expected = tokens[: order.sets[0].num_rows * SEQ_LEN].reshape(-1, SEQ_LEN)
    assert sorted(map(bytes, rows.astype("<i4"))) == sorted(map(bytes, expected.astype("<i4")))
    assert not np.array_equal(rows, expected)


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_hosts(stream: TokenStream, hosts: int) -> None:
    order = order_of(stream)
    local = BATCH // hosts
    iterators = [TrainIterator(order, CONSTANT, range(h * local, (h + 1) * local), range(5, 9)) for h in range(hosts)]
    for step in range(5, 9):
        parts = [next(iterator) for iterator in iterators]
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        assert_equal(joined, batch_of(order, step))
    for iterator in iterators:
        iterator.close()


def test_the_batch_size_may_change(stream: TokenStream) -> None:
    """The rows of all steps follow one another, whatever the sizes, on one host as on two."""
    order, schedule = order_of(stream), BatchSchedule(Piecewise.from_phases([(0, 4), (3, 8), (5, 2)]))
    halves = [TrainIterator(order, schedule, half, range(1, 7)) for half in (_lower, _upper)]
    full = list(TrainIterator(order, schedule, range, range(1, 7)))
    assert [len(batch.tokens) for batch in full] == [4, 4, 8, 8, 2, 2]
    rows = np.concatenate([batch.tokens for batch in full])
    np.testing.assert_array_equal(rows, order.read(np.arange(4, 4 + 28)).tokens)
    for batch, lower, upper in zip(full, *halves, strict=True):
        assert_equal(batch, jax.tree.map(lambda a, b: np.concatenate([a, b]), lower, upper))
    with pytest.raises(UserError, match="as a function of it"):
        TrainIterator(order, schedule, range(2), range(3))


def _lower(size: int) -> range:
    return range(size // 2)


def _upper(size: int) -> range:
    return range(size // 2, size)


def test_an_iterator_begins_anywhere_and_ends(stream: TokenStream) -> None:
    order = order_of(stream)
    full = list(TrainIterator(order, CONSTANT, range(BATCH), range(10)))
    assert len(full) == 10
    later = list(TrainIterator(order, CONSTANT, range(BATCH), range(7, 10)))
    for one, other in zip(full[7:], later, strict=True):
        assert_equal(one, other)
    assert list(TrainIterator(order, CONSTANT, range(BATCH), range(10, 10))) == []


def test_a_far_step_costs_no_more_than_the_first(stream: TokenStream) -> None:
    order = order_of(stream)
    batch_of(order, 0)

    def cost(step: int) -> float:
        started = time.process_time()
        for _ in range(20):
            batch_of(order, step)
        return time.process_time() - started

    near, far = min(cost(0) for _ in range(5)), min(cost(10**9) for _ in range(5))
    assert far < 3 * near


def test_seeds_differ(stream: TokenStream) -> None:
    one, other = (batch_of(order_of(stream, seed=seed), 0).tokens for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_rows_outside_the_batch_are_refused(stream: TokenStream) -> None:
    for rows in (range(4, 12), range(0), [-1, 0], [0, 2, 1], [3, 3]):
        with pytest.raises(UserError, match="are no part of a batch of 8"):
            TrainIterator(order_of(stream), CONSTANT, rows, range(3))


def test_rows_need_not_be_neighbours(stream: TokenStream) -> None:
    full = next(TrainIterator(order_of(stream), CONSTANT, range(BATCH), range(3)))
    some = next(TrainIterator(order_of(stream), CONSTANT, [0, 1, 5], range(3)))
    np.testing.assert_array_equal(some.tokens, full.tokens[[0, 1, 5]])


def test_a_closed_iterator_gives_nothing_more(stream: TokenStream) -> None:
    iterator = TrainIterator(order_of(stream), CONSTANT, range(BATCH), range(1000))
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)


class TestEvalSet:
    @pytest.fixture
    def evals(self, stream: TokenStream) -> EvalSet:
        return EvalSet("validation", stream, SEQ_LEN, ByteTokenizer(), 10)

    def test_every_token_is_predicted_once(self, evals: EvalSet, tokens: np.ndarray) -> None:
        batches = list(evals.batches(BATCH, rows=range(BATCH)))
        assert len(batches) == evals.num_batches(BATCH)
        targets = np.concatenate([batch.targets[batch.weights > 0] for batch in batches])
        expected = tokens[1:][tokens[:-1] != EOS]
        np.testing.assert_array_equal(targets, expected)

    def test_padding_is_marked(self, evals: EvalSet, tokens: np.ndarray) -> None:
        *_, last = evals.batches(BATCH, rows=range(BATCH))
        assert last.tokens.shape == (BATCH, SEQ_LEN)
        left = len(tokens) - (evals.num_batches(BATCH) - 1) * BATCH * SEQ_LEN
        real = np.arange(BATCH * SEQ_LEN).reshape(BATCH, SEQ_LEN) < left
        np.testing.assert_array_equal(last.segments >= 0, real)
        assert (last.segments[~real] == -1).all()
        assert not last.weights[~real].any()
        assert not real.all(), "the test needs padding"

    def test_hosts_share_a_batch(self, evals: EvalSet) -> None:
        full = list(evals.batches(BATCH, rows=range(BATCH), max_batches=3))
        halves = [list(evals.batches(BATCH, rows=rows, max_batches=3)) for rows in (range(4), range(4, 8))]
        assert len(full) == 3
        for batch, first, second in zip(full, *halves, strict=True):
            assert_equal(batch, jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second))


@pytest.fixture
def program(make_build: MakeBuild, tmp_path: Path) -> list[str]:
    make_build().run()
    return [
        sys.executable,
        "-c",
        "import sys\n"
        "from lm_trainer.data.cache.format import token_dtype\n"
        "from lm_trainer.data.cache.ledger import Ledger\n"
        "from lm_trainer.data.loader import TrainIterator\n"
        "from lm_trainer.data.cache.kvstore import KvStore\n"
        "from lm_trainer.core.piecewise import BatchSchedule\n"
        "from lm_trainer.data.cache.token_stream import TokenStream\n"
        "from lm_trainer.data.mixture import Mixture\n"
        "from lm_trainer.data.rows.chunks import Chunks\n"
        "from lm_trainer.data.rows.order import TrainOrder, TrainSet\n"
        "from lm_trainer.data.shuffle import FullShuffle\n"
        f"store = KvStore({str(tmp_path / 'cache')!r})\n"
        f"rows = Chunks(TokenStream(store, Ledger.read(store), token_dtype(257)), {SEQ_LEN}, {EOS})\n"
        "order = TrainOrder([TrainSet('train', rows, rows.num_rows, FullShuffle(), 0)], Mixture([(0, (1,))]))\n"
        "iterator = TrainIterator(order, BatchSchedule.constant(8), range(8), range(10**9))\n"
        "next(iterator)\n"
        "print('ready', flush=True)\n",
    ]


def test_a_process_ends_though_its_iterator_was_never_closed(program: list[str]) -> None:
    started = time.monotonic()
    done = subprocess.run(
        program, env=lmt_environment(), capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert done.stdout == "ready\n"
    assert time.monotonic() - started < 30
