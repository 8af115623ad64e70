"""Compares the speed of greedy decoding with transformers, on the same weights and in the same process.

Needs the extra `test`. Prints a table, or writes it to a file with `--out FILE`.

    python -m benchmarks.decode --out benchmarks/results/2-core-epyc/decode.md
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.setting import describe_load, describe_setting, markdown_table

PROMPT, NEW = 64, 64
SIZES = {"30M": (384, 8, 1024, 8192), "124M": (768, 12, 2048, 32000)}
"""Width, number of layers, MLP width and vocabulary size of each model by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for name in SIZES for batch in (1, 8) for row in [measure(name, batch, options.repeats)]]
    text = "\n".join(
        [
            "# Decoding beside transformers",
            "",
            f"{describe_setting('jax', 'torch', 'transformers')} {describe_load()}",
            "",
            f"Llama, float32, random weights, on the CPU: {PROMPT} tokens are read and {NEW} written to each row, "
            f"always the likeliest; medians of {options.repeats} interleaved pairs. Beside other work, the ratio of "
            "processor time tells more than that of time on the clock.",
            "",
            markdown_table(
                ["model", "rows", "lmt, tokens/s", "transformers, tokens/s", "lmt / transformers", "by processor time"],
                rows,
            ),
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text)


def measure(name: str, batch: int, repeats: int) -> list[str]:
    import torch
    import transformers

    from lm_trainer.data.tokenizer.bytes import ByteTokenizer
    from lm_trainer.export.huggingface import read_hf
    from lm_trainer.generate.engine import generate
    from lm_trainer.generate.layout import to_decoding_layout
    from lm_trainer.generate.sampling import GenerateSettings

    width, layers, mlp, vocabulary = SIZES[name]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
    )
    peer: Any = transformers.LlamaForCausalLM(config).float().eval()
    with tempfile.TemporaryDirectory() as scratch:
        peer.save_pretrained(scratch)
        ByteTokenizer().save(scratch)
        model = to_decoding_layout(read_hf(Path(scratch)).build())
    prompts = np.random.default_rng(0).integers(0, 256, (batch, PROMPT)).tolist()
    settings, ids = GenerateSettings(max_new_tokens=NEW, temperature=0), torch.tensor(prompts)
    mask = torch.ones_like(ids)

    def run_peer() -> list[list[int]]:
        with torch.no_grad():
            out = peer.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0
            )
        return out[:, PROMPT:].tolist()

    runs: dict[str, Callable[[], list[list[int]]]] = {
        "lmt": lambda: generate(model, prompts, settings),
        "peer": run_peer,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    processor: dict[str, list[float]] = {kind: [] for kind in runs}
    written = {kind: run() for kind, run in runs.items()}
    equal_rows = sum(a == b for a, b in zip(written["lmt"], written["peer"], strict=True))
    assert equal_rows >= batch - 1, f"only {equal_rows} of {batch} rows are written alike"
    for _ in range(repeats):
        for kind, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            seconds[kind].append(time.perf_counter() - start)
            processor[kind].append(time.process_time() - used)
    ratios = [
        statistics.median(b / a for a, b in zip(of["lmt"], of["peer"], strict=True)) for of in (seconds, processor)
    ]
    rates = [f"{batch * NEW / statistics.median(seconds[kind]):.0f}" for kind in runs]
    return [name, str(batch), *rates, *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    main()
