"""A run that hears, from its data to what it writes: equal bits on other devices, error rates, transcripts, export."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.checkpoint.store import list_steps
from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.morse import Morse
from lm_trainer.evaluate.model import open_eval_model
from lm_trainer.evaluate.report import as_json, text_lines
from lm_trainer.evaluate.text import TextOptions, choose_text, evaluate_text
from lm_trainer.export.huggingface import ExportOptions, write_hf
from lm_trainer.generate.transcribe import Transcriber, TranscribeSettings
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.summary import Summary
from lm_trainer.run.train import train
from lm_trainer.run.weights.open_model import open_model
from lm_trainer.trackers import Progress
from tests.conftest import lmt_environment
from tests.hangs import HANG_SECONDS

pytestmark = pytest.mark.optimised

CONFIG = Path(__file__).parents[2] / "configs" / "whisper_nano.yaml"
SMALL = (
    *("data.source.rows=24", "data.source.validation_rows=6", "data.num_workers=0"),
    *(
        "trainer.train_batch_size=8",
        "trainer.elastic_shards=8",
        "trainer.num_train_steps=3",
        "trainer.steps_per_eval=3",
    ),
    *("model.hidden_dim=32", "model.num_layers=1", "model.encoder_layers=1"),
    *("model.intermediate_dim=32", "model.encoder_intermediate_dim=32"),
)


def run(*overrides: str, progress: Progress | None = None) -> dict[str, float]:
    config: Any = load(CONFIG, [*SMALL, *overrides], RunConfig).config
    done = train(config, name="run", progress=progress or Progress(3))
    assert f"  lmt transcribe {done.name} FILE" in done.lines()
    return done.eval_losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    directory = tmp_path_factory.mktemp("heard")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return directory, run("trainer.id=one", "trainer.max_devices=1")


def weights(source: str) -> dict[str, np.ndarray]:
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(open_model(source).params)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


@pytest.mark.slow
def test_what_a_run_wrote_is_what_is_counted_and_exported(
    trained: tuple[Path, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile, jiwer = pytest.importorskip("soundfile"), pytest.importorskip("jiwer")
    directory, losses = trained
    monkeypatch.chdir(directory)
    model = open_eval_model("one")
    result = evaluate_text(model, choose_text("one", model, []), TextOptions())
    (loss,) = losses.values()
    assert result.sets[0].documents.loss.value == pytest.approx(loss, rel=1e-5)
    (rates,) = result.rates
    assert rates.rows == 6
    write_hf(directory / "out", open_model("one"), ExportOptions())
    references, written = [], []
    transcribers = [Transcriber(open_model(source), TranscribeSettings()) for source in ("one", "out")]
    for row in Morse.model_validate(model.config.data.source).shards("validation", fields=("audio", "text"))[0].rows():
        record: Any = row.record  # pyright: ignore[reportAttributeAccessIssue]
        soundfile.write("a.wav", record["audio"]["array"], 16_000, subtype="FLOAT")
        references.append(record["text"])
        written.append([transcriber.transcribe(Path("a.wav")) for transcriber in transcribers])
        assert written[-1][0] == written[-1][1]
    texts = [pair[0].text for pair in written]
    assert rates.characters == pytest.approx(jiwer.cer(references, texts))
    assert rates.words == pytest.approx(jiwer.wer(references, texts))
    assert rates.examples == list(zip(references, texts, strict=True))
    assert as_json(result)["error_rates"][0]["characters"] == rates.characters
    assert any("character errors" in line for line in text_lines(result))


@pytest.mark.slow
def test_features_of_an_export_are_those_of_the_run(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained[0])
        write_hf(tmp_path / "out", open_model("one"), ExportOptions())
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path / "out")
    samples = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    features = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features
    assert features.shape == (1, 16, 100)


class Killed(Progress):
    """Ends its process, as a machine that fails does, as soon as a checkpoint is there to go on from."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step < 2:
            return
        deadline = time.monotonic() + HANG_SECONDS
        while not list_steps(Path("checkpoints/killed")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_same_bits_after_a_kill_and_on_other_devices(
    trained: tuple[Path, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, losses = trained
    monkeypatch.chdir(directory)
    settings = ("trainer.id=killed", "trainer.checkpointer.keep=[{every: 1}]")
    program = f"from tests.run.test_heard_run import *; run('trainer.max_devices=2', *{settings}, progress=Killed(3))"
    killed = subprocess.run([sys.executable, "-c", program], env=lmt_environment(devices=2), timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    shown = io.StringIO()
    assert run("trainer.max_devices=4", *settings, progress=Progress(3, stream=shown)) == losses
    assert re.search("resumed at step [12]", shown.getvalue())
    resumed_weights = weights("killed")
    for name, x in weights("one").items():
        np.testing.assert_array_equal(x, resumed_weights[name], err_msg=name)


def test_text_alone_is_refused_before_anything_is_made(in_tmp_path: Path) -> None:
    config: Any = load(CONFIG, ["data.format={type: text}", "data.source={type: embedded}"], RunConfig).config
    with pytest.raises(UserError, match="the model hears audio, but the data are text alone"):
        train(config, name="run", progress=Progress(3))
    assert not list(in_tmp_path.iterdir())


def test_the_next_commands_suit_the_model() -> None:
    def next_of(sample: str, takes_audio: bool) -> str:
        lines = Summary(
            "m", Path("logs/m"), Path("checkpoints/m"), 3, 1.0, sample=sample, takes_audio=takes_audio
        ).lines()
        return lines[lines.index("next:") + 1]

    assert next_of("hello⟫hullo", takes_audio=True) == "  lmt transcribe m FILE"
    assert (
        next_of("\nAn apple fell from a tall tree⟫ and", takes_audio=False)
        == "  lmt generate m --prompt 'An apple fell from a'"
    )
    summary = Summary("m", Path("logs/m"), Path("checkpoints/m"), 3, 1.0, sample="a⟫b")
    assert summary.lines()[-1] == "  lmt export-hf m exports/m"
    assert replace(summary, exports=False).lines()[-1] == "  lmt runs"
    assert next_of(f"{'字' * 90}⟫", takes_audio=False) == f"  lmt generate m --prompt {'字' * 24!r}"
