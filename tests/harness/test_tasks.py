"""Tasks of lm-evaluation-harness: our model beside its own for transformers, the command, and training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import read_hf
from lm_trainer.trackers import read_metrics
from tests.conftest import Lmt, refused, run_here
from tests.harness.tasks import write_tasks

pytest.importorskip("lm_eval")

NAMES = ("toy_choice", "toy_written", "toy_text")


@pytest.fixture
def lmt(in_tmp_path: Path) -> Lmt:
    return run_here


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets are copied by the harness into a cache, which is not to be the user's."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def directory(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("asked")
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((tiny_gpt2 / name).read_bytes())
    ByteTokenizer().save(out)
    return out


def _flatten(values: Any) -> list[Any]:
    return [x for value in values for x in (_flatten(value) if isinstance(value, list | tuple) else [value])]


def _answer_loss(samples: list[Any]) -> tuple[float, float]:
    """Bits per byte of the right answers by the harness's own model, with the standard error."""
    bits = [
        -sample["filtered_resps"][sample["target"]][0]
        / np.log(2)
        / len(sample["doc"]["choices"][sample["target"]].strip().encode())
        for sample in samples
    ]
    return float(np.mean(bits)), float(np.std(bits, ddof=1)) / len(bits) ** 0.5


@pytest.mark.slow
def test_answers_are_those_of_the_harness_with_transformers(directory: Path, tasks: Path) -> None:
    from lm_eval import evaluator
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager

    from lm_trainer.harness.config import HarnessConfig
    from lm_trainer.harness.model import HarnessModel
    from lm_trainer.harness.run import Tasks

    read = read_hf(directory)
    model = HarnessModel(read.build(), read.tokenizer)
    config = HarnessConfig(
        task_spec=tuple({"task": name, "num_fewshot": 1} for name in NAMES),  # pyright: ignore[reportArgumentType]
        include_path=str(tasks),
        log_samples=True,
    )
    harness_tasks = Tasks(config)
    results = harness_tasks.evaluate_model(model)
    peer: Any = huggingface.HFLM
    simple_evaluate: Any = evaluator.simple_evaluate
    reference = simple_evaluate(
        peer(pretrained=str(directory), batch_size=4, dtype="float32", device="cpu"),
        tasks=[*NAMES],
        num_fewshot=1,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=1000,
    )
    assert [result.name for result in results] == list(NAMES)
    for result in results:
        expected = reference["results"][result.name]
        if result.name == "toy_choice":
            mean, error = _answer_loss(reference["samples"][result.name])
            assert result.metrics["answer_bits_per_byte"] == pytest.approx(mean, rel=1e-4)
            assert result.errors["answer_bits_per_byte"] == pytest.approx(error, rel=1e-4)
            expected |= {"answer_bits_per_byte,none": mean, "answer_bits_per_byte_stderr,none": error}
        assert result.metrics == {name: pytest.approx(expected[f"{name},none"], rel=1e-4) for name in result.metrics}
        assert result.errors == {name: pytest.approx(expected[f"{name}_stderr,none"]) for name in result.errors}
        ours_said, theirs_said = (
            _flatten(sample["resps"] for sample in samples)
            for samples in (result.samples, reference["samples"][result.name])
        )
        assert len(ours_said) == len(theirs_said)
        for a, b in zip(ours_said, theirs_said, strict=True):
            assert a == (pytest.approx(b, abs=1e-3) if isinstance(b, float) else b)
    assert results[0].num_fewshot == 1
    assert 0 < results[0].metrics["acc"] < 1
    assert len({sample["resps"][0][0] for sample in results[1].samples}) > 1
    # A task that is asked again draws the same examples.
    assert [result.metrics for result in harness_tasks.evaluate_model(model)] == [result.metrics for result in results]


@pytest.mark.slow
def test_command_and_training_give_the_same_figures(lmt: Lmt, tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\nimport sys\n\ndef f(x):\n    return x\n" * 40)
    (tmp_path / "run.yaml").write_text(f"""
model: {{type: llama, hidden_dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_dim: 64, seq_len: 128}}
data: {{tokenizer: bytes, train_urls: [text.txt]}}
optimizer: {{learning_rate: 1e-2, warmup: 0}}
trainer: {{id: run, num_train_steps: 4, train_batch_size: 8, elastic_shards: 8, max_devices: 1, sample_tokens: 0,
          tracker: []}}
eval_harness:
  task_spec: [toy_choice, {{task: toy_text, task_alias: prose}}, toy_written]
  include_path: {tasks}
  max_examples: 5
  log_samples: true
eval_harness_steps: 2
""")
    assert lmt("train", "run.yaml").returncode == 0
    lines = [line for line in read_metrics(tmp_path / "logs" / "run") if "lm_eval/toy_choice/acc" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["lm_eval/prose/bits_per_byte"] > lines[1]["lm_eval/prose/bits_per_byte"] > 0
    assert 0 <= lines[0]["lm_eval/toy_written/exact_match"] <= 1
    assert (tmp_path / "logs/run/eval-harness/step-4/toy_choice.jsonl").read_text().count("\n") == 5
    options = ("--tasks", "toy_choice,toy_text", "--tasks-dir", tasks, "--limit", "5")
    result = lmt("eval", "run", *options, "--log-samples", "out", "--json")
    assert result.returncode == 0, result.stderr
    choice, text = json.loads(result.stdout)["tasks"]
    assert choice["metrics"]["acc"] == lines[1]["lm_eval/toy_choice/acc"]
    assert choice["questions"] == 5
    assert choice["errors"]["acc"] > 0
    assert text["metrics"]["bits_per_byte"] == pytest.approx(lines[1]["lm_eval/prose/bits_per_byte"], rel=1e-5)
    samples = [json.loads(line) for line in (tmp_path / "out/toy_choice.jsonl").read_text().splitlines()]
    likely = [max(range(4), key=lambda k, s=sample: float(s["resps"][k][0][0])) for sample in samples]
    assert sum(a == sample["target"] for a, sample in zip(likely, samples, strict=True)) / 5 == choice["metrics"]["acc"]
    assert f"{choice['metrics']['acc']:.4f} ± {choice['errors']['acc']:.4f}" in lmt("eval", "run", *options).stdout


def test_mistakes_are_told_in_a_line(lmt: Lmt, directory: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks_dir = ("--tasks-dir", tasks)
    refused(lmt("eval", directory, "--limit", "3"), "--tasks NAME")
    (tasks / "broken.yaml").write_text(
        json.dumps({"task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": "nowhere.jsonl"}})
    )
    refused(lmt("eval", directory, "--tasks", "broken", *tasks_dir), "the task broken cannot be read", "nowhere.jsonl")
    refused(lmt("eval", directory, "--tasks", "toy_choice", "--apply-chat-template", *tasks_dir), "no chat template")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused(lmt("eval", directory, "--tasks", "toy_choice", *tasks_dir), 'pip install "lm_trainer[eval]"')


@pytest.mark.slow
def test_a_name_that_there_is_not_is_corrected(lmt: Lmt, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks._index import TaskIndex

    # Of the harness's 14,000 files those of two folders, which are read as all are.
    files = TaskIndex._iter_yaml_files
    monkeypatch.setattr(
        TaskIndex, "_iter_yaml_files", lambda root: (file for name in ("arc", "mmlu") for file in files(root / name))
    )
    refused(lmt("eval", directory, "--tasks", "arc_eazy"), "no task arc_eazy; did you mean arc_easy")


def test_answers_longer_than_the_context_are_refused(directory: Path) -> None:
    from lm_eval.api.instance import Instance

    from lm_trainer.harness.model import HarnessModel

    read = read_hf(directory)
    model = HarnessModel(read.build(), read.tokenizer, max_length=16)
    request: Any = Instance("loglikelihood", {}, ("a", "b" * 40), 0)
    with pytest.raises(UserError, match="an answer of 40 tokens, but the model reads at most 16"):
        model.loglikelihood([request])
