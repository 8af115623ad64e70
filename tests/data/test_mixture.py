"""Mixtures: proportions at every prefix, draws in order, stages, seeks, stop rules, caches of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.dataset import Data
from lm_trainer.data.mixture import RESOLUTION, Mixture, cycle_counts
from lm_trainer.data.rows.eval_set import EvalSet

WEIGHTS = [(1,), (0.7, 0.3), (1, 1, 1), (0.5, 0.25, 0.125, 0.125), (0.9, 0.05, 0.03, 0.02), (7, 0, 5, 11, 1.5)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_holds_the_proportions_to_one_row(weights: tuple[float, ...]) -> None:
    sets, draws = Mixture([(0, cycle_counts(weights))]).locate_draws(np.arange(5000))
    counts = np.cumsum(sets[:, None] == np.arange(len(weights)), axis=0)
    exact = np.arange(1, 5001)[:, None] * np.asarray(weights) / sum(weights)
    assert np.abs(counts - exact).max() < 1
    for index in range(len(weights)):
        assert draws[sets == index].tolist() == list(range((sets == index).sum()))


def test_weights_no_short_cycle_can_express_are_rounded_to_its_parts() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(12).tolist()
    counts = cycle_counts(weights)
    assert sum(counts) <= RESOLUTION
    exact = np.asarray(weights) / sum(weights)
    np.testing.assert_allclose(np.asarray(counts) / sum(counts), exact, atol=1 / RESOLUTION)
    sets, _ = Mixture([(0, counts)]).locate_draws(np.arange(RESOLUTION))
    drawn = np.cumsum(sets[:, None] == np.arange(12), axis=0)
    exact = np.arange(1, RESOLUTION + 1)[:, None] * np.asarray(counts) / sum(counts)
    assert np.abs(drawn - exact).max() < 1


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -1.0), (1.0, 1e-9)])
def test_weights_that_mean_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weight"):
        cycle_counts(weights)


STAGES = [
    (0, cycle_counts((0.7, 0.3, 0))),
    (13, cycle_counts((0, 0.5, 0.5))),
    (14, cycle_counts((0.2, 0.2, 0.6))),
    (1000, cycle_counts((1, 0, 0))),
]


def brute_force(mixture: Mixture, stop: int) -> list[tuple[int, int]]:
    """One position at a time, counting."""
    drawn, rows = [0, 0, 0], []
    for position in range(stop):
        (index,), _ = mixture.locate_draws(np.array([position]))
        rows.append((int(index), drawn[index]))
        drawn[index] += 1
    return rows


def test_stages_neither_skip_nor_repeat_draws() -> None:
    mixture = Mixture(STAGES)
    expected = brute_force(mixture, 1100)
    sets, draws = mixture.locate_draws(np.arange(1100))
    assert list(zip(sets.tolist(), draws.tolist(), strict=True)) == expected
    assert set(sets[:13].tolist()) == {0, 1}
    assert sets[13] in (1, 2)
    assert set(sets[1000:].tolist()) == {0}
    for position, (index, draw) in enumerate(expected):
        assert mixture.position_of_draw(index, draw) == position
    for position in (0, 1, 13, 14, 500, 1000, 1100):
        counted = [sum(index == k for index, _ in expected[:position]) for k in range(3)]
        assert mixture.count_draws(position).tolist() == counted
    assert mixture.position_of_draw(2, 10**6) is None


def test_a_far_position_is_found_without_counting() -> None:
    mixture = Mixture(STAGES[:3])
    sets, draws = mixture.locate_draws(np.arange(10**12, 10**12 + 10))
    drawn = mixture.count_draws(10**12)
    for index, draw in zip(sets.tolist(), draws.tolist(), strict=True):
        assert draw == drawn[index]
        drawn[index] += 1
    assert drawn.sum() == 10**12 + 10


SEQ_LEN = 32


@pytest.fixture
def make_config(tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataConfig]:
    """Three sets of different text, of which `c` has validation text."""
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate("abc"):
        lines = [json.dumps({"text": text[:3000]}) + "\n" for text in documents[index::3]]
        Path(f"{name}.jsonl").write_text("".join(lines[: 2 + 2 * index]))
        Path(f"{name}-held-out.jsonl").write_text(lines[9])
    sets = {name: {"train_urls": f"{name}.jsonl"} for name in "abc"}
    sets["c"]["validation_urls"] = "c-held-out.jsonl"

    def make(**keys: Any) -> DataConfig:
        default = {"configs": sets, "train_weights": {"a": 0.5, "b": 0.3, "c": 0.2}, "tokenizer": "bytes"}
        return DataConfig.model_validate({**default, "cache_dir": "caches", **keys})

    return make


def open_config(config: DataConfig) -> Data:
    return open_data(config, seq_len=SEQ_LEN, seed=0)


def origins(data: Data, stop: int, schedule: int | BatchSchedule = 4) -> list[tuple[str, int, int]]:
    rows = data.train_order(schedule).row_origins(np.arange(stop))
    return [(origin.set.name, origin.row, origin.epoch) for origin in rows]


class TestData:
    def test_each_set_has_its_cache_and_its_validation_set(self, make_config: Callable[..., DataConfig]) -> None:
        data = open_config(make_config())
        assert sorted(path.name for path in Path("caches").iterdir()) == ["a", "b", "c"]
        assert sorted(path.name for path in Path("caches/c").iterdir()) == ["tokenizer", "train", "validation"]
        assert list(data.validation()) == ["c"]
        (iterator, order) = data.train(10, rows=range(10), first_step=3, num_steps=2), data.train_order(10)
        for step, batch in zip((3, 4), iterator, strict=True):
            expected = order.row_origins(np.arange(step * 10, step * 10 + 10))
            assert [sum(origin.set.name == name for origin in expected) for name in "abc"] == [5, 3, 2]
            for row, origin in enumerate(expected):
                alone = origin.set.rows.read(np.array([origin.row]))
                for field, one in zip(batch[:5], alone[:5], strict=True):
                    np.testing.assert_array_equal(field[row], one[0])
        data.close()

    def test_weights_change_neither_caches_nor_the_order_within_a_set(
        self, make_config: Callable[..., DataConfig]
    ) -> None:
        old_order = origins(open_config(make_config()), 400)
        files = {path: path.stat().st_mtime_ns for path in Path("caches").rglob("*") if path.is_file()}
        new_order = origins(open_config(make_config(train_weights={"a": 0.1, "b": 0.1, "c": 0.8})), 400)
        assert {path: path.stat().st_mtime_ns for path in Path("caches").rglob("*") if path.is_file()} == files
        for name in "abc":
            one, other = ([row for set_, row, _ in order if set_ == name] for order in (old_order, new_order))
            assert one[: len(other)] == other[: len(one)]
        other_sets = make_config(
            configs={name: {"train_urls": f"{name}.jsonl"} for name in "ab"}, train_weights={"a": 1, "b": 1}
        )
        assert [row for name, row, _ in old_order if name == "a"][:100] == [
            row for name, row, _ in origins(open_config(other_sets), 200) if name == "a"
        ]

    def test_epochs_of_each_set_hold_its_rows_once_in_another_order(
        self, make_config: Callable[..., DataConfig]
    ) -> None:
        data = open_config(make_config())
        rows = data.train_sets[0].num_rows
        draws = [(row, epoch) for name, row, epoch in origins(data, 4 * rows) if name == "a"]
        first, second = ([row for row, epoch in draws if epoch == number] for number in (0, 1))
        assert sorted(first) == sorted(second) == list(range(rows))
        assert first != second

    def test_weights_change_at_the_step_that_is_named(self, make_config: Callable[..., DataConfig]) -> None:
        schedule = BatchSchedule(Piecewise.from_phases([(0, 2), (5, 8)]))
        staged = make_config(train_weights=[[0, {"a": 1}], [7, {"b": 0.5, "c": 0.5}]])
        draws = origins(open_config(staged), 100, schedule)
        assert {name for name, _, _ in draws[: 5 * 2 + 2 * 8]} == {"a"}
        assert {name for name, _, _ in draws[5 * 2 + 2 * 8 :]} == {"b", "c"}

    def test_a_stage_to_come_may_be_added_to_a_run(self, make_config: Callable[..., DataConfig]) -> None:
        one = open_config(make_config(train_weights={"a": 1, "b": 1, "c": 1}))
        other = open_config(make_config(train_weights=[[0, {"a": 1, "b": 1, "c": 1}], [7, {"a": 1, "c": 1}]]))
        assert one.fingerprint(7) == other.fingerprint(7)
        assert one.fingerprint(8) != other.fingerprint(8)
        assert one.fingerprint() != other.fingerprint()

    def test_first_exhausted_ends_before_any_row_comes_again(self, make_config: Callable[..., DataConfig]) -> None:
        data = open_config(make_config(stop_strategy="first_exhausted"))
        length = data.train_order(4).length
        assert length is not None
        draws = origins(data, length + 1)
        assert len(set(draws[:-1])) == length
        assert {epoch for _, _, epoch in draws[:-1]} == {0}
        assert draws[-1][2] == 1
        steps = data.max_steps(4)
        assert steps is not None
        assert steps == length // 4
        assert len(list(data.train(4, rows=range(4), num_steps=steps))) == steps
        with pytest.raises(UserError, match=rf"the data end after {steps} steps.* set trainer.num_train_steps to"):
            data.train(4, rows=range(4), num_steps=steps + 1)

    def test_all_exhausted_ends_when_the_last_set_has_come_once(self, make_config: Callable[..., DataConfig]) -> None:
        data = open_config(make_config(stop_strategy="all_exhausted"))
        length = data.train_order(4).length
        assert length is not None
        draws = origins(data, length)
        distinct = {(name, row) for name, row, _ in draws}
        assert len(distinct) == sum(train.num_rows for train in data.train_sets)
        assert len({(name, row) for name, row, _ in draws[:-1]}) == sum(train.num_rows for train in data.train_sets) - 1

    def test_epochs_say_when_a_set_is_exhausted(self, make_config: Callable[..., DataConfig]) -> None:
        one_epoch, thrice = (
            open_config(make_config(stop_strategy="first_exhausted", epochs=epochs)).train_order(4).length
            for epochs in (None, {"a": 3, "b": 3, "c": 3})
        )
        assert one_epoch is not None
        assert thrice is not None
        assert 3 * one_epoch - 12 <= thrice <= 3 * one_epoch + 12
        for_one = open_config(make_config(stop_strategy="first_exhausted", epochs={"a": 2})).train_order(4).length
        assert for_one not in (one_epoch, thrice)

    def test_limits_keep_to_the_first_rows(self, make_config: Callable[..., DataConfig]) -> None:
        draws = origins(open_config(make_config(max_train_batches={"a": 2})), 600)
        assert {row for name, row, _ in draws if name == "a"} == set(range(8))
        assert max(row for name, row, _ in draws if name == "b") > 8

    def test_held_out_rows_are_evaluated_and_never_trained_on(self, make_config: Callable[..., DataConfig]) -> None:
        data = open_config(make_config(num_validation_sequences={"a": 5}))
        evals = data.validation()["a"]
        assert isinstance(evals, EvalSet)
        assert evals.num_rows == 5
        stream = data.caches["a/train"].stream
        assert evals.num_tokens == len(stream) - evals.first_token
        (batch,) = evals.batches(5, rows=range(5))
        tail = stream.read_from(evals.first_token)
        np.testing.assert_array_equal(batch.tokens[batch.segments >= 0], tail)
        assert evals.num_documents == (tail == 256).sum()
        assert evals.token_bytes is not None
        assert evals.token_bytes[tail].sum() == (tail != 256).sum(), "the end of a document has no bytes"
        rows = data.train_sets[0].num_rows
        assert rows * SEQ_LEN == evals.first_token
        assert {row for name, row, _ in origins(data, 5 * rows) if name == "a"} == set(range(rows))
        with pytest.raises(UserError, match="num_validation_sequences holds 10000 rows out"):
            open_config(make_config(num_validation_sequences={"a": 10_000}))
        with pytest.raises(UserError, match="c has validation text of its own"):
            open_config(make_config(num_validation_sequences=3))

    def test_a_set_of_weight_zero_is_only_evaluated(self, make_config: Callable[..., DataConfig]) -> None:
        sets = {"a": {"train_urls": "a.jsonl"}, "b": {"validation_urls": "b-held-out.jsonl"}}
        data = open_config(make_config(configs=sets, train_weights={"a": 1}))
        assert [train.name for train in data.train_sets] == ["a"]
        assert list(data.validation()) == ["b"]
        assert not Path("caches/b/train").exists()

    def test_without_a_directory_a_set_keeps_its_cache_in_any_mixture(
        self, make_config: Callable[..., DataConfig]
    ) -> None:
        open_config(make_config(cache_dir=None))
        caches = set(Path("cache").iterdir())
        open_config(make_config(cache_dir=None, configs={"x": {"train_urls": "a.jsonl"}}, train_weights={"x": 1}))
        assert set(Path("cache").iterdir()) == caches

    def test_a_set_without_a_row_is_named(self, make_config: Callable[..., DataConfig]) -> None:
        Path("b.jsonl").write_text('{"text": "short"}\n')
        with pytest.raises(UserError, match="the set b holds 6 tokens"):
            open_config(make_config())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_weights": None}, "configs needs train_weights"),
        ({"train_weights": {"a": 1, "b": 1}}, "says nothing about c; give it 0"),
        ({"train_weights": {"a": 1, "b": 1, "cc": 1}}, "there is no set cc; did you mean c?"),
        ({"train_weights": {"a": 0, "b": 0, "c": 0}}, "one at least must be above 0"),
        ({"train_weights": [[1, {"a": 1, "b": 1, "c": 1}]]}, "must begin at 0 and rise"),
        ({"train_weights": [[0, {"a": 1, "b": 1, "c": 1}], [0, {"a": 1}]]}, "must begin at 0 and rise"),
        ({"train_weights": {"a": 1, "b": -1, "c": 1}}, "greater than or equal to 0"),
        ({"train_urls": "x.jsonl"}, "with configs, write it below configs.NAME"),
        ({"epochs": 2}, "epochs only means something with stop_strategy"),
        ({"max_train_batches": {"d": 2}}, "there is no set d"),
        ({"configs": {}, "train_urls": "a.jsonl"}, "train_weights needs configs"),
        ({"configs": {"../a": {"train_urls": "a.jsonl"}}}, r"cannot be called '\.\./a'"),
        ({"configs": {"a": {"validation_urls": "a.jsonl"}}, "train_weights": {"a": 1}}, "has no train_urls"),
    ],
)
def test_mistakes_are_refused(make_config: Callable[..., DataConfig], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(**keys)
