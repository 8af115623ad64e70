"""A short run, and texts of several scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import run_here
from tests.hf_model import hf_model  # noqa: F401

TEXTS = {
    "greek": ["Ὅμηρος· ἄνδρα μοι ἔννεπε, Μοῦσα", "γνῶθι σεαυτόν"],
    "japanese": ["吾輩は猫である。名前はまだ無い。", "古池や蛙飛びこむ水の音"],
    "hindi": ["सत्यमेव जयते नानृतं", "वसुधैव कुटुम्बकम्"],
}

RUN = """
model: {{type: llama, hidden_dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_dim: 64, seq_len: 64}}
data:
  tokenizer: bytes
  shuffle: false
  configs:
    code: {{train_urls: [{root}/train.txt], validation_urls: [{root}/code.jsonl], tags: [web/code, odd]}}
    prose: {{train_urls: [{root}/train.txt], validation_urls: [{root}/prose.jsonl], tags: [web]}}
  train_weights: {{code: 1, prose: 1}}
optimizer: {{learning_rate: 3e-3, warmup: 0}}
trainer: {{id: run, num_train_steps: 6, steps_per_eval: 3, train_batch_size: 8, elastic_shards: 8, sample_tokens: 0,
          tracker: [], max_devices: 1, model_averaging: {{type: ema, beta: 0.9}}}}
"""


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of JSON lines for each script."""
    base = tmp_path_factory.mktemp("texts")
    for name, documents in TEXTS.items():
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
        (base / f"{name}.jsonl").write_text("".join(lines))
    return {name: base / f"{name}.jsonl" for name in TEXTS}


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run of two held-out sets, with documents that rows cut."""
    root = tmp_path_factory.mktemp("trained")
    documents = [f"def f{n}(x):\n    return x + {n * n}\n" * (n % 7 + 1) for n in range(24)]
    (root / "train.txt").write_text("".join(documents))
    for name, chosen in (("code", documents[3:9]), ("prose", [text.upper() for text in documents[10:13]])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    (root / "run.yaml").write_text(RUN.format(root=root))
    cwd = Path.cwd()
    os.chdir(root)
    try:
        result = run_here("train", "run.yaml")
    finally:
        os.chdir(cwd)
    assert result.returncode == 0, result.stderr
    return root
