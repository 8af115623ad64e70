"""Fine-tuning of a checkpoint of `transformers` on a few clips, up to what `transformers` hears in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.data.tokenizer.bytes import EOS_ID, ByteTokenizer
from lm_trainer.export.huggingface import ExportOptions, write_hf
from lm_trainer.generate.transcribe import Transcriber, TranscribeSettings, read_recording
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.train import train
from lm_trainer.run.weights.open_model import open_model
from lm_trainer.trackers import Progress
from tests.models.test_whisper import make

CLIPS, STEPS = 8, 80
MODEL: dict[str, Any] = {
    "vocab_size": EOS_ID + 1,
    "d_model": 48,
    "encoder_attention_heads": 4,
    "num_mel_bins": 16,
    "max_source_positions": 50,  # 1 s
    "max_target_positions": 6,
    "init_std": 0.1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), EOS_ID),
}


def record_clips(directory: Path) -> dict[Path, str]:
    """Chords with as many words, of letters that tell nothing of the chord."""
    soundfile = pytest.importorskip("soundfile")
    directory.mkdir()
    rng, times, texts = np.random.default_rng(0), np.arange(12_000) / 16_000, dict[Path, str]()
    for number in range(CLIPS):
        tones = rng.uniform(200, 6000, size=3)
        samples = np.sin(2 * np.pi * tones[:, None] * times).mean(axis=0) + 0.01 * rng.standard_normal(len(times))
        path = directory / f"{number:02}.wav"
        soundfile.write(path, samples, 16_000)
        texts[path] = "".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 5)))
        path.with_suffix(".txt").write_text(texts[path])
    return texts


@pytest.mark.slow
def test_clips_are_learnt_by_heart_and_heard_by_transformers(in_tmp_path: Path) -> None:
    import torch

    transformers = pytest.importorskip("transformers")
    make(Path("base"), **MODEL)
    ByteTokenizer().save(Path("base"))
    texts = record_clips(Path("clips"))
    config = RunConfig.model_validate(
        {
            "initialize_from_hf": "base",
            "use_hf_model_config": True,
            "data": {
                "train_urls": "clips/*.wav",
                "tokenizer": "bytes",
                "num_workers": 0,
                "format": {"type": "audio", "seconds": 1, "num_mels": 16},
            },
            "trainer": {
                "id": "tuned",
                "train_batch_size": CLIPS,
                "num_train_steps": STEPS,
                "max_devices": 1,
                "elastic_shards": 1,
            },
            "optimizer": {"type": "adam", "learning_rate": 5e-3, "weight_decay": 0.0, "warmup": 0.1},
        }
    )
    done = train(config, name="run", progress=Progress(STEPS))
    assert done.train_loss < 0.01
    write_hf(Path("out"), open_model("tuned"), ExportOptions())

    reference_model = transformers.WhisperForConditionalGeneration.from_pretrained("out").eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained("out")
    features = [
        extractor(read_recording(path), sampling_rate=16_000, return_tensors="pt").input_features for path in texts
    ]
    for beams in (1, 3):
        transcriber = Transcriber(open_model("tuned"), TranscribeSettings(beams=beams))
        assert [transcriber.transcribe(path).text for path in texts] == list(texts.values())
        rows = reference_model.generate(torch.cat(features), num_beams=beams, do_sample=False).tolist()
        assert ["".join(chr(token) for token in row if token != EOS_ID) for row in rows] == list(texts.values())
