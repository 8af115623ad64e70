"""Preference losses of a model on packed rows: values and gradients of each answer computed alone, with padding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.lora import attach_lora
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.reference import attach_reference, without_adapters
from lm_trainer.objectives import DpoConfig, IpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from lm_trainer.objectives.mismatch import with_mismatched_answers
from lm_trainer.objectives.preference import PreferenceLoss
from tests.compiling import quick_jit
from tests.nn.common import init, make_spec
from tests.objectives.formulas import Logps, loss_of_examples, loss_of_pairs

SPEC, LENGTH, ROWS = make_spec(), 24, 3


class Example(NamedTuple):
    """A prompt with an answer, as token ids."""

    prompt: list[int]
    answer: list[int]


def random_examples(count: int, seed: int) -> list[Example]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, (count, 2))
    return [Example(rng.integers(0, 37, n).tolist(), rng.integers(0, 37, m).tolist()) for n, m in sizes]


def pack(rows: list[dict[int, Example]], length: int = LENGTH) -> Batch:
    """Rows with each example in the segment that is its key, and padding after them."""
    shape = (len(rows), length)
    tokens, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    weights, segments = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
    for row, examples in enumerate(rows):
        start = 0
        for segment, (prompt, answer) in examples.items():
            ids = [*prompt, *answer]
            where = slice(start, start + len(ids) - 1)
            tokens[row, where], targets[row, where] = ids[:-1], ids[1:]
            weights[row, start + len(prompt) - 1 : start + len(ids) - 1] = 1
            positions[row, where], segments[row, where] = np.arange(len(ids) - 1), segment
            start += len(ids) - 1
    return Batch(tokens, targets, weights, positions, segments)


def rows_of_pairs() -> tuple[Batch, list[Example], list[Example]]:
    """Three rows of 2, 1 and 0 pairs; the last row is padding."""
    chosen, rejected = random_examples(3, 0), random_examples(3, 1)
    rejected = [other._replace(prompt=one.prompt) for one, other in zip(chosen, rejected, strict=True)]
    packed = [
        {0: chosen[0], 1: rejected[0], 2: chosen[1], 3: rejected[1]},
        {0: chosen[2], 1: rejected[2]},
        {},
    ]
    return pack(packed), chosen, rejected


def parameters(seed: int) -> Any:
    return init(SPEC, seed)[1]


@pytest.fixture(autouse=True, scope="module")
def _parameters_are_made_outside_of_traces() -> None:
    for seed in (0, 1):
        parameters(seed)


def model_with(params: Any, reference: Any) -> Decoder:
    graphdef = init(SPEC, 0)[0]
    model = nnx.merge(graphdef, params)
    if reference is not None:
        attach_reference(model, nnx.merge(graphdef, reference))
    return model


def answers_of(model: Decoder, examples: list[Example]) -> jax.Array:
    """Sums of the log probabilities of each answer, from the logits of a padded row of its own."""
    batch = pack([{0: example} for example in examples], 8)
    logps = jax.nn.log_softmax(model(*(jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))))
    return jnp.sum(batch.weights * jnp.take_along_axis(logps, batch.targets[..., None], axis=-1)[..., 0], axis=1)


def answers_alone(params: Any, examples: list[Example]) -> jax.Array:
    return answers_of(nnx.merge(init(SPEC, 0)[0], params), examples)


def tokens_of(examples: list[Example]) -> np.ndarray:
    return np.asarray([len(example.answer) for example in examples], np.float32)


def sums_of(model: Decoder, reference: Any, chosen: list[Example], rejected: list[Example]) -> Logps:
    return Logps(
        answers_of(model, chosen),
        answers_of(model, rejected),
        tokens_of(chosen),
        tokens_of(rejected),
        answers_alone(reference, chosen),
        answers_alone(reference, rejected),
    )


@pytest.mark.parametrize(
    "loss",
    [DpoConfig(beta=0.5, label_smoothing=0.1, rpo_alpha=0.3), IpoConfig(), SimpoConfig(), OrpoConfig()],
    ids=lambda loss: getattr(loss, "type", None),
)
def test_pairs_in_packed_rows_equal_pairs_alone(loss: Any) -> None:
    batch, chosen, rejected = rows_of_pairs()
    reference = parameters(1) if loss.has_reference else None

    def packed(params: Any, block_size: int | None) -> tuple[jax.Array, Any]:
        model = model_with(params, reference)
        total, weight, metrics = PreferenceLoss(loss, jnp.float32, block_size)(model, batch, None)
        return 0.37 * total, (weight, metrics)

    def alone(params: Any) -> jax.Array:
        x = sums_of(nnx.merge(init(SPEC, 0)[0], params), parameters(1), chosen, rejected)
        return 0.37 * jnp.sum(loss_of_pairs(loss, x, jnp))

    expected, expected_grads = quick_jit(jax.value_and_grad(alone))(parameters(0))
    logps = np.asarray(answers_alone(parameters(0), chosen))
    for block_size in (None, 5):
        value_and_grad = jax.value_and_grad(partial(packed, block_size=block_size), has_aux=True)
        (value, (weight, metrics)), grads = quick_jit(value_and_grad)(parameters(0))
        assert weight == 3
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected_grads)
        np.testing.assert_allclose(metrics["logps/chosen"], logps.sum(), rtol=1e-5)


def rows_of_examples() -> tuple[Batch, list[list[Example]], list[list[bool]]]:
    """Three rows of 3, 1 and 0 labelled examples. Desirable ones are even segments."""
    examples = random_examples(4, 2)
    labels = [True, False, False, True]
    packed = [{0: examples[0], 3: examples[1], 5: examples[2]}, {0: examples[3]}, {}]
    return pack(packed), [examples[:3], examples[3:]], [labels[:3], labels[3:]]


def mismatch(examples: list[Example]) -> list[Example]:
    return [
        example._replace(answer=other.answer)
        for example, other in zip(examples, examples[1:] + examples[:1], strict=True)
    ]


def test_mismatched_rows_have_the_answers_of_the_next_examples() -> None:
    batch, rows, _ = rows_of_examples()
    actual = jax.tree.map(np.asarray, quick_jit(with_mismatched_answers)(batch))
    expected = pack([{2 * i: example for i, example in enumerate(mismatch(examples))} for examples in rows] + [{}])
    inside = expected.segments >= 0
    for name, x, y in zip(Batch._fields, actual, expected[:5], strict=False):
        np.testing.assert_array_equal(x[inside], y[inside], err_msg=name)
        assert x.dtype == y.dtype, name
    np.testing.assert_array_equal(actual.segments, expected.segments)
    np.testing.assert_array_equal(actual.weights, expected.weights)


def test_labelled_examples_in_packed_rows_equal_examples_alone() -> None:
    loss = KtoConfig(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)
    batch, rows, labels = rows_of_examples()
    reference = parameters(1)

    def ratios(params: Any, examples: list[Example]) -> jax.Array:
        return answers_alone(params, examples) - answers_alone(reference, examples)

    def packed(params: Any) -> tuple[jax.Array, Any]:
        total, weight, metrics = PreferenceLoss(loss, jnp.float32)(model_with(params, reference), batch, None)
        return total, (weight, metrics)

    def alone(params: Any) -> tuple[jax.Array, jax.Array]:
        total, divergence = jnp.float32(0), jnp.float32(0)
        for examples, desirable in zip(rows, labels, strict=True):
            drift = jax.lax.stop_gradient(jnp.mean(ratios(params, mismatch(examples))))
            divergence += len(examples) * jnp.maximum(drift, 0)
            total += jnp.sum(loss_of_examples(loss, ratios(params, examples), np.array(desirable), drift, jnp))
        return total, divergence

    (value, (weight, metrics)), grads = quick_jit(jax.value_and_grad(packed, has_aux=True))(parameters(0))
    (expected, divergence), expected_grads = quick_jit(jax.value_and_grad(alone, has_aux=True))(parameters(0))
    assert (weight, metrics["desirable"]) == (4, 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], divergence, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected_grads)


def test_the_base_of_an_adapter_is_the_reference() -> None:
    batch, chosen, rejected = rows_of_pairs()
    base = parameters(1)

    def losses() -> tuple[jax.Array, jax.Array, jax.Array]:
        model = model_with(base, None)
        attach_lora(model, LoraConfig(rank=2), {}, rngs=nnx.Rngs(0))
        loss = PreferenceLoss(DpoConfig(beta=0.5), jnp.float32)
        before = loss(model, batch, None)
        # Away from the base: B of an adapter starts at zero.
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and path[-2:] == ("lora", "b"):
                node.set_value(node[...] + 0.3)
        after = loss(model, batch, None)
        assert without_adapters(model).blocks is not model.blocks
        x = sums_of(model, base, chosen, rejected)
        return before[0], after[0], jnp.sum(loss_of_pairs(DpoConfig(beta=0.5), x, jnp))

    before, after, expected = quick_jit(losses)()
    np.testing.assert_allclose(before, 3 * np.log(2), rtol=1e-6)
    assert abs(after - before) > 1e-3
    np.testing.assert_allclose(after, expected, rtol=1e-5)
