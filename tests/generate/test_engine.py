"""Against a twin that runs the full forward pass for every token and knows no cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.generate.engine import generate, generate_stream
from lm_trainer.generate.sampling import GenerateSettings, filter_logits, sample_tokens
from lm_trainer.models import Gpt2Config
from lm_trainer.nn.decoder import Decoder

VOCAB, SEQ = 29, 24
CONFIG = Gpt2Config(seq_len=SEQ, hidden_dim=16, num_layers=2, num_heads=2, initializer_range=1.5)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    build = lambda: CONFIG.build(VOCAB, rngs=nnx.Rngs(0))  # noqa: E731
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param)))()
    params["embed"]["tokens"] *= 0.1  # with large ones a tied model repeats its last token
    return nnx.merge(nnx.split(nnx.eval_shape(build), nnx.Param)[0], params)


@pytest.fixture(scope="module")
def forward(model):
    """Logits after the last token of a text, without a cache; rows are padded to one shape."""
    run = jax.jit(lambda tokens: model(tokens, jnp.arange(SEQ)[None], jnp.zeros((1, SEQ), jnp.int32)))

    def last(text: Sequence[int]) -> np.ndarray:
        tokens = np.zeros((1, SEQ), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(run(tokens))[0, len(text) - 1]

    return last


def twin(forward, prompt: Sequence[int], count: int, choose, eos_id: int | None = None) -> list[int]:
    new: list[int] = []
    while len(new) < count and len(prompt) + len(new) < SEQ:
        new.append(int(choose(forward([*prompt, *new]), len(new))))
        if new[-1] == eos_id:
            break
    return new


def test_greedy(model, forward):
    rows = generate(model, PROMPTS, GenerateSettings(max_new_tokens=8, temperature=0))
    assert rows == [twin(forward, prompt, 8, lambda logits, _: logits.argmax()) for prompt in PROMPTS]
    assert len({token for row in rows for token in row}) > 4


@pytest.mark.slow
def test_sampling(model, forward):
    @jax.jit
    def draw_one(logits: jax.Array, row: int, step: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), row), step)
        filtered = filter_logits(logits[None], temperature=1.3, top_k=12, top_p=0.9)
        return sample_tokens(key[None], filtered)[0]

    def choose(row: int):
        return lambda logits, step: draw_one(logits, row, step)

    settings = {"max_new_tokens": 8, "temperature": 1.3, "top_k": 12, "top_p": 0.9}
    rows = generate(model, PROMPTS, GenerateSettings(seed=7, **settings))
    assert rows == [twin(forward, prompt, 8, choose(row)) for row, prompt in enumerate(PROMPTS)]
    assert generate(model, PROMPTS, GenerateSettings(seed=7, **settings)) == rows
    assert generate(model, PROMPTS, GenerateSettings(seed=8, **settings)) != rows


def test_rows_do_not_influence_one_another(model):
    together = generate(model, PROMPTS, GenerateSettings(max_new_tokens=6, temperature=1.0, seed=3))
    assert generate(model, PROMPTS[:1], GenerateSettings(max_new_tokens=6, temperature=1.0, seed=3)) == together[:1]


def test_a_text_ends_with_its_end_token(model, forward):
    free = generate(model, PROMPTS, GenerateSettings(max_new_tokens=8, temperature=0))
    eos = free[0][2]
    rows = generate(model, PROMPTS, GenerateSettings(max_new_tokens=8, temperature=0, eos_id=eos))
    assert rows == [twin(forward, prompt, 8, lambda logits, _: logits.argmax(), eos) for prompt in PROMPTS]
    assert rows[0] == free[0][: free[0].index(eos) + 1]
    assert eos not in [token for row in rows for token in row[:-1]]


@pytest.mark.slow
def test_a_text_ends_where_the_context_is_full(model, forward):
    rows = generate(model, PROMPTS, GenerateSettings(max_new_tokens=1000, temperature=0))
    assert [len(row) for row in rows] == [SEQ - len(prompt) for prompt in PROMPTS]
    assert rows[2] == twin(forward, PROMPTS[2], 1000, lambda logits, _: logits.argmax())
    assert generate(model, [[1] * SEQ, [2]], GenerateSettings(max_new_tokens=2, temperature=0))[0] == []
    assert generate(model, PROMPTS, GenerateSettings(max_new_tokens=0)) == [[], [], []]
    assert generate(model, [], GenerateSettings(max_new_tokens=3)) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([1] * (SEQ + 1), "has 25 tokens, but the model reads at most 24"), ([], "is empty"), ([VOCAB], "knows 0 to 28")],
)
def test_prompts_that_cannot_be_continued(model, prompt, message):
    with pytest.raises(UserError, match=f"prompt 1 .*{message}"):
        generate(model, [[1], prompt], GenerateSettings(max_new_tokens=1))


def test_a_stream_has_the_tokens_of_the_whole(model: Decoder) -> None:
    prompts, settings = [[5, 6, 7], [9], [3, 2, 1]], GenerateSettings(max_new_tokens=13, temperature=0.9, seed=4)
    full = generate(model, prompts, settings)
    parts = [[row.tokens for row in part] for part in generate_stream(model, prompts, settings, chunk=3)]
    assert parts[-1] == full
    assert len(parts) == 5
    for earlier, later in itertools.pairwise(parts):
        assert all(b[: len(a)] == a for a, b in zip(earlier, later, strict=True))
    # The row that is stopped has no more tokens, and the others those that they had.
    *_, stopped = generate_stream(model, prompts, settings, chunk=3, stop=lambda row, _: row == 1)
    assert [stopped[0].tokens, stopped[2].tokens] == [full[0], full[2]]
    assert stopped[1].tokens == full[1][:3]
    assert stopped[1].log_probs == []


def test_log_probs_are_those_of_the_forward_pass(model, forward) -> None:
    settings = GenerateSettings(max_new_tokens=6, temperature=0.7, top_k=5, seed=1, log_probs=True)
    *_, rows = generate_stream(model, PROMPTS, settings)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for index, (token, log_prob) in enumerate(zip(row.tokens, row.log_probs, strict=True)):
            logits = forward([*prompt, *row.tokens[:index]]).astype(np.float64)
            assert log_prob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)


def test_a_penalty_on_repetition_is_that_of_transformers(
    model: Decoder, forward: Callable[[Sequence[int]], np.ndarray]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    penalize = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    rows = generate(model, PROMPTS, GenerateSettings(max_new_tokens=8, temperature=0, repetition_penalty=1.7))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected: list[int] = []
        for _ in range(len(row)):
            ids = [*prompt, *expected]
            logits = torch.tensor(np.asarray(forward(ids), np.float32)[None])
            expected.append(int(penalize(torch.tensor([ids]), logits).argmax()))
        assert row == expected
    assert rows != generate(model, PROMPTS, GenerateSettings(max_new_tokens=8, temperature=0))
