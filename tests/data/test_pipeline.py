"""`open_data`: from a configuration to batches, and every way in which that can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, load_tokenizer, open_data
from lm_trainer.data.dataset import Data
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenize.progress import BuildProgress
from lm_trainer.data.tokenizer import TrainedBpe

SMALL = DataConfig(source=Embedded(max_bytes=1 << 20), tokenizer=TrainedBpe(vocab_size=400, sample_bytes=100_000))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the caches of `SMALL`."""
    directory = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        open_data(SMALL, seq_len=64, seed=0).close()
    return directory


@pytest.fixture
def in_built(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(built)
    return built


def first_batch(data: Data, step: int = 0) -> np.ndarray:
    batch = next(data.train(4, rows=range(4), first_step=step, num_steps=1))
    return np.asarray(batch.tokens)


@pytest.mark.usefixtures("in_built")
class TestEmbedded:
    def test_trains_and_evaluates_on_python(self) -> None:
        data = open_data(SMALL, seq_len=64, seed=0)
        text = data.tokenizer.decode(
            np.concatenate([first_batch(data, step) for step in range(20)]).reshape(-1).tolist()
        )
        assert "self" in text
        assert "\n    " in text
        (evals,) = data.validation().values()
        assert isinstance(evals, EvalSet)
        assert evals.name == "validation"
        assert evals.text_bytes is not None
        assert evals.num_tokens < evals.text_bytes < 10 * evals.num_tokens
        batches = list(evals.batches(16, rows=range(16)))
        assert len(batches) == evals.num_batches(16)
        weighted = sum(float(batch.weights.sum()) for batch in batches)
        assert weighted == evals.num_tokens - evals.num_documents
        data.close()

    def test_a_second_start_opens_what_is_there(self) -> None:
        files = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*") if path.is_file()}
        progress: list[BuildProgress] = []
        one = open_data(SMALL, seq_len=64, seed=0, on_progress=progress.append)
        assert progress == []
        assert {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*") if path.is_file()} == files
        other = open_data(SMALL, seq_len=64, seed=0)
        assert one.fingerprint() == other.fingerprint()
        np.testing.assert_array_equal(first_batch(one, 7), first_batch(other, 7))

    def test_the_fingerprint_tells_orders_apart(self) -> None:
        config = SMALL.model_copy(update={"shuffle": False})
        prints = {
            open_data(SMALL, seq_len=64, seed=0).fingerprint(),
            open_data(SMALL, seq_len=64, seed=1).fingerprint(),
            open_data(SMALL, seq_len=32, seed=0).fingerprint(),
            open_data(config, seq_len=64, seed=0).fingerprint(),
        }
        assert len(prints) == 4

    def test_another_length_needs_no_new_cache(self) -> None:
        caches = sorted(Path("cache").iterdir())
        assert first_batch(open_data(SMALL, seq_len=17, seed=0)).shape == (4, 17)
        assert sorted(Path("cache").iterdir()) == caches

    def test_another_tokenizer_has_a_directory_of_its_own(self) -> None:
        data = open_data(SMALL.model_copy(update={"tokenizer": "bytes"}), seq_len=64, seed=0)
        assert data.tokenizer.vocab_size == 257
        assert len(list(Path("cache").iterdir())) == 2
        shutil.rmtree(data.cache_dir)

    def test_the_trained_tokenizer_can_be_named_as_a_directory(self) -> None:
        data = open_data(SMALL, seq_len=64, seed=0)
        saved = load_tokenizer(f"{data.cache_dir}/tokenizer")
        assert saved.identity() == data.tokenizer.identity()


class TestOwnText:
    @pytest.fixture
    def files(self, tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> DataConfig:
        monkeypatch.chdir(tmp_path)
        for name, texts in (("train.jsonl", documents[:10]), ("held-out.jsonl", documents[10:13])):
            Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return DataConfig(
            train_urls=["train.jsonl"], validation_urls=["held-out.jsonl"], tokenizer="bytes", cache_dir="mine"
        )

    def test_train_and_validation_stand_below_the_named_directory(
        self, files: DataConfig, documents: list[str]
    ) -> None:
        data = open_data(files, seq_len=32, seed=0)
        assert data.num_train_tokens == sum(len(text.encode()) + 1 for text in documents[:10])
        (evals,) = data.validation().values()
        assert isinstance(evals, EvalSet)
        assert evals.num_tokens == sum(len(text.encode()) + 1 for text in documents[10:13])
        assert evals.text_bytes == sum(len(text.encode()) for text in documents[10:13])
        assert sorted(path.name for path in Path("mine").iterdir()) == ["tokenizer", "train", "validation"]

    def test_nothing_is_held_out_unasked(self, files: DataConfig, documents: list[str]) -> None:
        data = open_data(files.model_copy(update={"validation_urls": []}), seq_len=32, seed=0)
        assert data.validation() == {}
        assert data.num_train_tokens == sum(len(text.encode()) + 1 for text in documents[:10])

    def test_a_tokenizer_is_trained_on_it(self, files: DataConfig) -> None:
        config = files.model_copy(update={"tokenizer": TrainedBpe(vocab_size=350)})
        data = open_data(config, seq_len=32, seed=0)
        assert data.tokenizer.vocab_size == 350
        reopened = open_data(config, seq_len=32, seed=0)
        assert reopened.tokenizer.fingerprint() == data.tokenizer.fingerprint()
        with pytest.raises(UserError, match=r"tokenizer was trained by another recipe .*what differs: vocab_size"):
            open_data(config.model_copy(update={"tokenizer": TrainedBpe(vocab_size=300)}), seq_len=32, seed=0)

    def test_another_tokenizer_over_the_same_directory_is_refused(self, files: DataConfig) -> None:
        open_data(files, seq_len=32, seed=0)
        with pytest.raises(UserError, match="was built from something else"):
            open_data(files.model_copy(update={"tokenizer": TrainedBpe(vocab_size=300)}), seq_len=32, seed=0)

    def test_the_same_text_elsewhere_has_the_same_fingerprint(self, files: DataConfig) -> None:
        one = open_data(files, seq_len=32, seed=0)
        shutil.copy("train.jsonl", "copy.jsonl")
        moved = files.model_copy(update={"train_urls": ["copy.jsonl"], "cache_dir": "other"})
        assert open_data(moved, seq_len=32, seed=0).fingerprint() == one.fingerprint()

    def test_fewer_tokens_than_a_row_are_refused(self, files: DataConfig) -> None:
        Path("train.jsonl").write_text('{"text": "short"}\n')
        with pytest.raises(UserError, match=r"holds 6 tokens, less than one row of 32"):
            open_data(files, seq_len=32, seed=0)

    def test_a_held_out_set_shorter_than_a_row_is_padded(self, files: DataConfig) -> None:
        Path("held-out.jsonl").write_text('{"text": "short"}\n')
        (evals,) = open_data(files, seq_len=32, seed=0).validation().values()
        (batch,) = evals.batches(4, rows=range(4))
        assert batch.weights.sum() == 5

    def test_a_missing_file_leaves_nothing_behind(self, files: DataConfig) -> None:
        with pytest.raises(UserError, match=r"data\.validation_urls: there is no file held-uot\.jsonl; did you mean"):
            open_data(files.model_copy(update={"validation_urls": ["held-uot.jsonl"]}), seq_len=32, seed=0)
        assert not Path("mine").exists()

    def test_progress_names_what_is_built(self, files: DataConfig) -> None:
        reports: list[BuildProgress] = []
        config = files.model_copy(update={"tokenizer": TrainedBpe(vocab_size=300)})
        open_data(config, seq_len=32, seed=0, on_progress=reports.append)
        assert list(dict.fromkeys(progress.name for progress in reports)) == ["tokenizer", "train", "validation"]
        last = [progress for progress in reports if progress.name == "train"][-1]
        assert last.total_bytes is not None
        assert last.done_bytes <= last.total_bytes
        assert last.tokens > 0
        assert str(reports[0]) == "training the tokenizer"
        assert str(last).startswith("tokenising the train text: 0.1 of 0.1 MB")
