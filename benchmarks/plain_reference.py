"""Trains a GPT-2 configuration with transformers and plain PyTorch, and compares the losses with a run.

The plain loop starts from the same initial weights as `lmt train`, with the same order of batches and the same
schedule. Model, autograd, clipping and AdamW are PyTorch's. Losses agree until rounding differences have grown over the
steps. The validation losses at the end show whether there are differences other than rounding.

    lmt train configs/gpt2_nano.yaml trainer.id=nano
    python benchmarks/plain_reference.py configs/gpt2_nano.yaml logs/nano
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.data import open_data
from lm_trainer.models import hf
from lm_trainer.optim import Param
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host


def attention_mask(segments: np.ndarray) -> torch.Tensor:
    """Makes a mask [B, 1, S, S] for transformers: 0 for visible positions, and the smallest number for all others."""
    positions = np.arange(segments.shape[1])
    allowed = (positions[:, None] >= positions[None, :]) & (segments[:, :, None] == segments[:, None, :])
    return torch.where(torch.tensor(allowed), 0.0, torch.finfo(torch.float32).min)[:, None]


def sum_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """Returns the sum of the weighted losses, and the sum of the weights."""
    tokens, targets = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (batch.tokens, batch.targets))
    positions = torch.tensor(np.asarray(batch.positions), dtype=torch.long)
    mask = attention_mask(np.asarray(batch.segments))
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weights = torch.tensor(np.asarray(batch.weights)).flatten()
    return (nll * weights).sum(), float(weights.sum())


def torch_model(config: RunConfig, setup: Any, eos_id: int) -> tuple[Any, torch.optim.Optimizer]:
    """Makes a transformers model with the same initial weights, and AdamW with the same two parameter groups."""
    params = to_host(setup.init().params)
    tensors = hf.params_to_hf(config.model, setup.model.nest(params))
    vocab_size = len(params["embed.tokens"])
    settings = hf.config_to_hf(config.model, vocab_size=vocab_size, eos_id=eos_id, bos_id=None)
    hf_config = transformers.GPT2Config(**{k: v for k, v in settings.items() if k != "architectures"})
    hf_config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(hf_config)
    missing = model.load_state_dict({k: torch.tensor(v) for k, v in tensors.items()}, strict=False).missing_keys
    assert missing == ["lm_head.weight"], missing
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "wte" not in n and "wpe" not in n]
    param_infos = {n: Param(n, x.shape, setup.model.axes[n]) for n, x in params.items()}
    decaying = sum(params[n].size for n, decays in config.optimizer.decay_mask(param_infos).items() if decays)
    assert sum(p.numel() for p in matrices) == decaying
    remaining = [p for p in model.parameters() if not any(p is m for m in matrices)]
    o: Any = config.optimizer
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": remaining, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.0, betas=(o.beta1, o.beta2), eps=o.epsilon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("run", type=Path, help="the run directory of `lmt train` with the same configuration")
    args = parser.parse_args()
    config = load(args.config, [], RunConfig).config
    trainer = config.trainer
    data = open_data(config.data, seq_len=config.model.seq_len, seed=trainer.seed)
    setup = build_setup(config, data.tokenizer.vocab_size)
    model, optimizer = torch_model(config, setup, data.tokenizer.eos_id)
    rows = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["train/loss"] for r in rows if "train/loss" in r}

    worst, started, batch_size = 0.0, time.perf_counter(), trainer.batch_schedule.at(0)
    batches = data.train(batch_size, rows=range(batch_size), num_steps=trainer.num_train_steps)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate()(step)
        total, weight = sum_losses(model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        if config.optimizer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        plain = float(total.detach()) / weight
        worst = max(worst, abs(plain - logged[step + 1]))
        if (step + 1) in (1, 2, 5, 10, 20, 50) or (step + 1) % 100 == 0 or step + 1 == trainer.num_train_steps:
            print(
                f"step {step + 1}: plain {plain:.6f}, lmt {logged[step + 1]:.6f}, largest difference so far {worst:.2e}"
            )
    seconds = time.perf_counter() - started

    sums = [0.0, 0.0]
    with torch.no_grad():
        for batch in data.validation()["validation"].batches(32, rows=range(32)):
            total, weight = sum_losses(model, batch)
            sums = [sums[0] + float(total), sums[1] + weight]
    held_out = [r["eval/loss"] for r in rows if "eval/loss" in r][-1]
    print(f"validation loss: plain {sums[0] / sums[1]:.4f}, lmt {held_out:.4f}; plain took {seconds:.0f} s")


if __name__ == "__main__":
    main()
