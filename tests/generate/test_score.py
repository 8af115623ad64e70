"""Log probabilities of continuations beside transformers, with and without a shared context."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import read_hf
from lm_trainer.generate.score import Context, score


@pytest.fixture(scope="module")
def directory(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scored")
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((tiny_gpt2 / name).read_bytes())
    ByteTokenizer().save(out)
    return out


@pytest.mark.slow
def test_scores_are_those_of_transformers(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)

    def draw(low: int, high: int) -> list[int]:
        return rng.integers(0, 257, rng.integers(low, high)).tolist()

    contexts = [Context(draw(1, 100), [draw(1, 20) for _ in range(rng.integers(1, 5))]) for _ in range(17)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory)
    # The likeliest continuation, and one that fills the context to its end.
    greedy: list[int] = []
    for _ in range(3):
        with torch.no_grad():
            logits = reference(torch.tensor([[*contexts[0].tokens, *greedy]])).logits[0, -1]
        greedy.append(int(logits.argmax()))
    contexts += [
        Context(contexts[0].tokens, [greedy, draw(1, 9)]),
        Context(contexts[0].tokens, [greedy]),
        Context(draw(1, 2), [draw(127, 128)]),
        Context(draw(100, 101), [draw(29, 30), [5]]),
    ]
    model = read_hf(directory).build(jax.local_devices()[:1])
    scores = dict(score(model, contexts, tokens_at_once=256))
    assert sorted(scores) == list(range(len(contexts)))
    greedy_seen = set()
    for number, context in enumerate(contexts):
        assert len(scores[number]) == len(context.continuations)
        for actual, tokens in zip(scores[number], context.continuations, strict=True):
            row = torch.tensor([[*context.tokens, *tokens]])
            with torch.no_grad():
                logits = reference(row[:, :-1]).logits[0, len(context.tokens) - 1 :].double()
            chosen = torch.tensor(tokens)
            nats = float(torch.nn.functional.cross_entropy(logits, chosen, reduction="sum"))
            assert actual.log_prob == pytest.approx(-nats, abs=2e-4)
            assert actual.is_greedy == bool((logits.argmax(-1) == chosen).all())
            greedy_seen.add(actual.is_greedy)
    assert greedy_seen == {True, False}
