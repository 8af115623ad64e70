"""Times lm-evaluation-harness with the model of this package and with its transformers model, on the same weights.

Needs the extras `eval` and `test`. Prints a table, or writes it to a file with `--out FILE`.

    python -m benchmarks.harness --out benchmarks/results/2-core-epyc/harness.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

NAMES = ("choice", "written", "text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        lines = measure(Path(scratch), options.repeats)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def measure(scratch: Path, repeats: int) -> list[str]:
    from lm_eval import evaluator
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager

    from benchmarks.setting import describe_load, describe_setting
    from lm_trainer.export.huggingface import read_hf
    from lm_trainer.harness.config import HarnessConfig
    from lm_trainer.harness.model import HarnessModel
    from lm_trainer.harness.run import Tasks

    model, tasks = _write_model(scratch / "model"), _write_tasks(scratch)
    read = read_hf(model)
    lmt_model = HarnessModel(read.build(), read.tokenizer)  # pyright: ignore[reportArgumentType]
    peer: Any = huggingface.HFLM
    simple_evaluate: Any = evaluator.simple_evaluate
    hf_model = peer(pretrained=str(model), batch_size=8, dtype="float32", device="cpu")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    rows = []
    for name in NAMES:
        harness_tasks = Tasks(HarnessConfig(task_spec=(name,), include_path=str(tasks), bootstrap_iters=0))
        runs: dict[str, Callable[[], Any]] = {
            "lmt": lambda harness_tasks=harness_tasks: harness_tasks.evaluate_model(lmt_model),
            "transformers": lambda name=name: simple_evaluate(
                hf_model, tasks=[name], task_manager=manager, bootstrap_iters=0
            ),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in runs}
        # The first turn is not timed, because the first call compiles.
        for turn in range(repeats + 1):
            for kind, run in runs.items():
                start = time.perf_counter()
                run()
                if turn:
                    seconds[kind].append(time.perf_counter() - start)
        a, b = statistics.median(seconds["lmt"]), statistics.median(seconds["transformers"])
        ratios = [y / x for x, y in zip(seconds["lmt"], seconds["transformers"], strict=True)]
        rows.append(f"| {name} | {a:.2f} | {b:.2f} | {statistics.median(ratios):.2f} |")
    return [
        "# lm-evaluation-harness: the model of this package beside the harness's own",
        "",
        f"{describe_setting('jax', 'torch', 'transformers', 'lm_eval')} {describe_load()}",
        "",
        f"Llama of 6 layers, 384 wide, float32, random weights, on the CPU; medians of {repeats} interleaved pairs, "
        "after a run of each that is not timed.",
        "",
        "- choice: 60 questions of 4 answers, with 5 examples in front of each",
        "- written: 24 answers of up to 48 tokens",
        "- text: 12 texts of about 3,000 bytes",
        "",
        "| task | lmt, s | transformers, s | transformers / lmt |",
        "|---|---|---|---|",
        *rows,
    ]


def _write_model(directory: Path) -> Path:
    import torch
    import transformers

    from lm_trainer.data.tokenizer.bytes import ByteTokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).float().save_pretrained(directory)
    ByteTokenizer().save(directory)
    return directory


def _make_answers(n: int) -> list[str]:
    return [f" {n * n + n}", " None, since it returns nothing", f" an error: f{n} is not defined", " a list of numbers"]


def _write_tasks(directory: Path) -> Path:
    choice = [
        {"q": f"def f{n}(x):\n    return x + {n * n}\n\nf{n}({n}) ==", "choices": _make_answers(n)} for n in range(60)
    ]
    written = [{"q": f"import module{n}\n\ndef main():\n", "a": "x"} for n in range(24)]
    text = [{"text": f"class Foo{n}:\n    def __init__(self):\n        self.x = {n}\n" * 50} for n in range(12)]
    kinds: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "choice": (
            [{**record, "label": n % 4} for n, record in enumerate(choice)],
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{q}}",
                "doc_to_target": "label",
                "doc_to_choice": "choices",
                "target_delimiter": "",
                "fewshot_split": "test",
                "num_fewshot": 5,
                "metric_list": [{"metric": "acc"}],
            },
        ),
        "written": (
            written,
            {
                "output_type": "generate_until",
                "doc_to_text": "{{q}}",
                "doc_to_target": "a",
                "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 48, "do_sample": False},
                "metric_list": [{"metric": "exact_match"}],
            },
        ),
        "text": (
            text,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "bits_per_byte"}],
            },
        ),
    }
    for name, (records, settings) in kinds.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        task = {"task": name, "metadata": {"version": 1}, **source, **settings}
        (directory / f"{name}.yaml").write_text(json.dumps(task))
    return directory


if __name__ == "__main__":
    main()
