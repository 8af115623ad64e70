"""Training without some documents beside training on text that never held them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.exclusion import write_exclusions
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.find import Tracer, find_text
from lm_trainer.data.pipeline import open_data
from lm_trainer.data.provenance import documents_of_step
from lm_trainer.data.tokenizer.token_bytes import token_texts

LINES = {
    name: [f"Zeile {n} von {name}: " + "für Größe und Maß; " * (n % 7) + f"Nummer {n * n}." for n in range(80)]
    for name in ("a", "b")
}
LEFT_OUT = {"a": [0, 1, 5, 40, 41, 42, 79], "b": [3]}


def write(directory: Path, left_out: dict[str, list[int]]) -> None:
    directory.mkdir()
    for name, lines in LINES.items():
        lines_kept = [line for number, line in enumerate(lines) if number not in left_out.get(name, [])]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines_kept))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exclude")
    write(directory / "all", {})
    write(directory / "less", LEFT_OUT)
    data = open_data(config(directory / "all"), seq_len=16, seed=3)
    for name in LINES:
        ledgers = {name: data.caches[f"{name}/train"].ledger}
        entries = [{"set": name, "document": number} for number in LEFT_OUT[name]]
        write_exclusions(directory / f"{name}.list", ledgers, entries)
    data.close()
    return directory


def config(directory: Path, **settings: object) -> DataConfig:
    sets = {name: {"train_urls": [str(directory / f"{name}.jsonl")]} for name in LINES}
    weights = {"train_weights": {"a": 0.7, "b": 0.3}}
    return DataConfig.model_validate(
        {"configs": sets, "cache_dir": str(directory / "cache"), "tokenizer": "bytes", **weights, **settings}
    )


def lists(directory: Path) -> list[str]:
    return [str(directory / f"{name}.list") for name in LINES]


def batches(data: Data, rows: Sequence[int] = range(4)) -> list[np.ndarray]:
    with_end = data.train(4, rows=rows, num_steps=40)
    return [field for batch in with_end for field in jax.tree.leaves(batch)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": "best_fit"},
        {"shuffle": {"type": "era", "first": 8}, "num_validation_sequences": {"a": 5}},
        {"stop_strategy": "all_exhausted", "shuffle": False, "max_train_batches": {"b": 2}},
    ],
)
def test_the_batches_are_those_of_text_without_the_documents(directory: Path, settings: dict[str, object]) -> None:
    some = open_data(config(directory / "all", exclude=lists(directory), **settings), seq_len=16, seed=3)
    less = open_data(config(directory / "less", **settings), seq_len=16, seed=3)
    full = open_data(config(directory / "all", **settings), seq_len=16, seed=3)
    assert some.num_train_tokens == less.num_train_tokens < full.num_train_tokens
    assert some.max_steps(4) == less.max_steps(4)
    expected = batches(less)
    for one, other in zip(batches(some), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # One host of two reads its own rows of them.
    for one, other in zip(batches(some, rows=(2, 3)), expected, strict=True):
        np.testing.assert_array_equal(one, other[2:])
    for name, held_out in less.validation().items():
        pairs = zip(held_out.batches(2, rows=range(2)), some.validation()[name].batches(2, rows=range(2)), strict=True)
        assert all((a == b).all() for one, other in pairs for a, b in zip(one[:5], other[:5], strict=True))
    assert len({some.fingerprint(), full.fingerprint()}) == 2
    assert some.fingerprints()["sources"] != full.fingerprints()["sources"]


def test_a_loss_mask_is_that_of_the_documents_that_are_kept(tmp_path: Path) -> None:
    configs = {}
    for name, numbers in (("all", range(30)), ("less", [n for n in range(30) if n % 4])):
        lines = [{"q": "was " * (n % 5 + 1), "a": f"antwort {n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        configs[name] = DataConfig.model_validate(
            {"train_urls": [str(tmp_path / f"{name}.jsonl")], "cache_dir": str(tmp_path / name), "tokenizer": "bytes"}
            | {"format": {"type": "supervised", "input_field": "q", "output_field": "a"}}
        )
    full = open_data(configs["all"], seq_len=16, seed=3)
    entries = [{"set": "train", "document": number} for number in range(0, 30, 4)]
    write_exclusions(tmp_path / "list", {"train": full.caches["train/train"].ledger}, entries)
    some = open_data(configs["all"].model_copy(update={"exclude": [str(tmp_path / "list")]}), seq_len=16, seed=3)
    for one, other in zip(batches(some), batches(open_data(configs["less"], seq_len=16, seed=3)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_documents_are_shown_and_found_where_they_are(directory: Path) -> None:
    data = open_data(config(directory / "all", exclude=lists(directory), shuffle=False), seq_len=16, seed=3)
    schedule, texts = BatchSchedule.constant(4), token_texts(data.tokenizer)
    shown = [row for step in range(1, 30) for row in documents_of_step(data, schedule, step)]
    lines = {f"{directory}/all/{name}.jsonl:{n + 1}": line for name in LINES for n, line in enumerate(LINES[name])}
    for row in shown:
        for passage in row.passages:
            # A row may begin and end inside of a character.
            assert passage.text.strip("\ufffd") in lines[passage.where]
            name, number = passage.where.rpartition("/")[2].split(".jsonl:")
            assert int(number) - 1 not in LEFT_OUT[name]
    tracer = Tracer(data, schedule, 30, texts)
    for number in (5, 6):
        text = LINES["a"][number]
        (trace,) = [tracer.trace(name, match) for name, match in find_text(data, text, texts)]
        assert (trace.where, trace.excluded) == (f"{directory}/all/a.jsonl:{number + 1}", number in LEFT_OUT["a"])
        trained_rows = {(trained_row.step, trained_row.row) for trained_row in trace.trained_at}
        held = {
            (number // 4 + 1, row.row)
            for number, row in enumerate(shown)
            if any(passage.where == trace.where for passage in row.passages)
        }
        assert trained_rows == held
        assert bool(trained_rows) != trace.excluded


def test_text_in_the_background_is_waited_for(directory: Path, tmp_path: Path) -> None:
    settings = {"cache_dir": str(tmp_path / "cache"), "exclude": lists(directory)}
    growing = open_data(config(directory / "all", **settings), seq_len=16, seed=3, background=True)
    assert growing.waits_for_all == "data.exclude"
    for one, other in zip(
        batches(growing), batches(open_data(config(directory / "less"), seq_len=16, seed=3)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    growing.close()


def refusal(directory: Path, content: str, tmp_path: Path) -> str:
    (tmp_path / "bad.list").write_text(content)
    with pytest.raises(UserError) as error:
        open_data(config(directory / "all", exclude=str(tmp_path / "bad.list")), seq_len=16, seed=3)
    return str(error.value)


def test_lists_of_other_data_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.list was made for other data than a/train"):
        open_data(config(directory / "less", exclude=lists(directory)), seq_len=16, seed=3)
    good = (directory / "a.list").read_text().splitlines()
    entry = '{"set": "a", "document": 80}'
    assert "there is no document 80 in a/train, which has 80" in refusal(directory, f"{good[0]}\n{entry}\n", tmp_path)
    assert "bad.list:2 is no line of a list" in refusal(directory, f"{good[0]}\nnonsense\n", tmp_path)
    assert "bad.list:3 is no line" in refusal(directory, f'{good[0]}\n{good[1]}\n{{"set": "c"}}\n', tmp_path)
    assert "which is not trained on; there are a, b" in refusal(directory, good[0].replace('"a"', '"c"'), tmp_path)
    assert "bad.list:1 is no line" in refusal(directory, "", tmp_path)
