"""The distillation loss against torch's divergences of the logits, and its gradient against the formula's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.reference import attach_reference
from lm_trainer.objectives import DistillationConfig
from lm_trainer.objectives.distillation_loss import DistillationLoss
from tests.compiling import quick_jit
from tests.nn.common import init, make_spec

VOCAB, ROWS, LENGTH = 37, 3, 12
STUDENT, TEACHER = make_spec(), make_spec()


def packed_batch() -> Batch:
    """Rows of two documents and some padding, with arbitrary weights."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.tile(np.array([0] * 5 + [1] * 5 + [-1] * 2, np.int32), (ROWS, 1))
    positions = np.tile(np.array([*range(5), *range(5), *range(2)], np.int32), (ROWS, 1))
    weights = rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32) * (segments >= 0)
    return Batch(ids[:, :-1], ids[:, 1:], weights, positions, segments)


def make_models() -> tuple[Decoder, Decoder]:
    student, teacher = (nnx.merge(*init(spec, seed)) for spec, seed in ((STUDENT, 0), (TEACHER, 1)))
    return student, teacher


def logits_of(model: Decoder, batch: Batch) -> jax.Array:
    h_BSD, _ = model.batch_hidden_and_stats(batch, dtype=jnp.float32)
    return h_BSD @ model.head_weight().T


def torch_loss(config: DistillationConfig, student: np.ndarray, teacher: np.ndarray, batch: Batch) -> tuple[float, Any]:
    """The mean loss and its gradient by the logits of the student, from torch's `kl_div` and `cross_entropy`."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    logits = torch.tensor(student, requires_grad=True)
    weights = torch.tensor(np.asarray(batch.weights)).reshape(-1)
    targets = torch.tensor(np.asarray(batch.targets, np.int64)).reshape(-1)
    flat, flat_teacher = logits.reshape(-1, VOCAB), torch.tensor(teacher).reshape(-1, VOCAB)
    nll = functional.cross_entropy(flat, targets, reduction="none")
    student_logp, teacher_logp = ((x / config.temperature).log_softmax(-1) for x in (flat, flat_teacher))
    if config.top_k is not None:
        ids = flat_teacher.topk(config.top_k).indices
        student_logp, teacher_logp = (
            torch.cat([x.gather(1, ids), torch.log(1 - x.exp().gather(1, ids).sum(1, keepdim=True))], 1)
            for x in (student_logp, teacher_logp)
        )
    first, second = (student_logp, teacher_logp) if config.divergence == "forward" else (teacher_logp, student_logp)
    # `kl_div(x, y)` is the divergence of exp(y) from exp(x).
    kl = functional.kl_div(first, second, reduction="none", log_target=True).sum(-1)
    mixed = (1 - config.weight) * nll + config.weight * config.temperature**2 * kl
    loss = (weights * mixed).sum()
    loss.backward()
    return loss.item(), logits.grad.numpy()


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.5, 0.3)])
def test_equals_the_divergence_of_torch(divergence: Any, temperature: float, weight: float, top_k: int | None) -> None:
    config = DistillationConfig(teacher="x", divergence=divergence, temperature=temperature, weight=weight, top_k=top_k)
    batch, (student, teacher) = packed_batch(), make_models()
    logits, teacher_logits = (quick_jit(logits_of)(model, batch) for model in (student, teacher))
    expected, slopes = torch_loss(config, np.asarray(logits), np.asarray(teacher_logits), batch)
    attach_reference(student, teacher)

    def total(model: Decoder, block_size: int | None) -> tuple[jax.Array, Any]:
        loss, tokens, metrics = DistillationLoss(config, jnp.float32, block_size)(model, batch, None)
        return loss, (tokens, metrics)

    def pulled_back(model: Decoder) -> tuple[jax.Array, jax.Array]:
        """The inner product of the gradient of the logits with the logits' derivative, by every parameter."""
        return jnp.sum(logits_of(model, batch) * slopes), jnp.zeros(())

    wanted = quick_jit(nnx.grad(pulled_back, has_aux=True))(make_models()[0])[0]
    for block_size in (None, 7):
        value_and_grad = nnx.value_and_grad(lambda m, size=block_size: total(m, size), has_aux=True)
        (loss, (tokens, metrics)), grad = quick_jit(value_and_grad)(student)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert float(tokens) == batch.weights.sum()
        mixed = (1 - weight) * metrics["nll"] + weight * temperature**2 * metrics["kl"]
        np.testing.assert_allclose(mixed, expected, rtol=1e-5)
        gradients = nnx.to_pure_dict(grad)
        of_teacher = gradients.pop("reference")
        assert all(not np.any(x) for x in jax.tree.leaves(of_teacher))
        for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(nnx.to_pure_dict(wanted)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_evaluation_gives_the_cross_entropy() -> None:
    batch, (student, teacher) = packed_batch(), make_models()
    attach_reference(student, teacher)
    loss, _, metrics = quick_jit(DistillationLoss(DistillationConfig(teacher="x"), jnp.float32, evaluates=True))(
        student, batch, None
    )
    assert float(loss) == float(metrics["nll"]) != float(metrics["kl"]) > 0


def test_a_model_that_equals_its_teacher_has_no_divergence() -> None:
    batch, (student, _) = packed_batch(), make_models()
    attach_reference(student, make_models()[0])
    for divergence in ("forward", "reverse"):
        config = DistillationConfig(teacher="x", divergence=divergence, top_k=3)
        loss, *_ = quick_jit(DistillationLoss(config, jnp.float32))(student, batch, None)
        np.testing.assert_allclose(loss, 0, atol=1e-5)


@pytest.mark.parametrize("keys", [{"temperature": 0}, {"weight": 1.5}, {"top_k": 0}, {"divergence": "both"}, {}])
def test_bad_values_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DistillationConfig.model_validate({**({"teacher": "x"} if keys else {}), **keys})
