"""Distillation: training a model to predict the distributions of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lm_trainer.core.config import StorageLocation
from lm_trainer.objectives.base import FrozenModelLossConfig

if TYPE_CHECKING:
    import jax


class DistillationConfig(FrozenModelLossConfig):
    """Distillation (Hinton et al. 2015, arXiv 1503.02531, section 2): (1 - weight) * cross-entropy + weight * T^2 * D.

    The cross-entropy is -log p(target) in nats. D is the divergence of the distributions of the next token that
    teacher and student predict at temperature T, in nats. Both are averaged over all counted tokens of the batch.
    """

    type: Literal["distillation"] = "distillation"
    teacher: StorageLocation
    """The teacher: a run, a checkpoint, or a directory in Hugging Face format, with the tokenizer of `data.tokenizer`.
    It may be another kind of model than the student. It has to stay where it is during the run."""
    divergence: Literal["forward", "reverse"] = "forward"
    """`forward`: KL(teacher | student), with which the student covers everything the teacher considers likely.
    `reverse`: KL(student | teacher), with which it avoids what the teacher considers unlikely (Gu et al. 2023, arXiv
    2306.08543)."""
    temperature: PositiveFloat = 1.0
    """Divisor T of the logits of both models. A higher temperature gives unlikely tokens more influence."""
    weight: float = Field(default=1.0, ge=0, le=1)
    """Weight of the divergence. The cross-entropy has the remaining weight."""
    top_k: PositiveInt | None = None
    """Compare only the probabilities of the teacher's k most likely tokens, and of all other tokens together. null
    compares the full distributions."""
    teacher_model: dict[str, Any] | None = None
    """The model section of the teacher. It is filled in from the teacher, and need not be set."""

    def divergences(self, student_CV: jax.Array, teacher_CV: jax.Array) -> jax.Array:
        """Returns the divergence of each token, in nats, float32 [C].

        Args:
            student_CV: logits of the student, float32.
            teacher_CV: logits of the teacher, float32.
        """
        student_CV, teacher_CV = self._logps(student_CV), self._logps(teacher_CV)
        ids_CK = self._likely_ids(teacher_CV)
        if ids_CK is not None:
            student_CV, teacher_CV = (_merge_unlikely(logp_CV, ids_CK) for logp_CV in (student_CV, teacher_CV))
        return self._divergences(student_CV, teacher_CV)

    def teacher_predictions(self, teacher_CV: jax.Array) -> dict[str, jax.Array]:
        """Returns everything that `divergences_from` needs of the teacher, from its logits, float32.

        Returns:
            `logps`, float32 [C, V], the log probabilities at the temperature. With `top_k`, `logps` [C, K + 1] are the
            log probabilities of the tokens `ids`, int32 [C, K], and of all other tokens together.
        """
        teacher_CV = self._logps(teacher_CV)
        ids_CK = self._likely_ids(teacher_CV)
        return (
            {"logps": teacher_CV} if ids_CK is None else {"ids": ids_CK, "logps": _merge_unlikely(teacher_CV, ids_CK)}
        )

    def divergences_from(self, student_CV: jax.Array, teacher: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the same as `divergences`, from logits of the student and the `teacher_predictions`."""
        student_CV = self._logps(student_CV)
        if "ids" in teacher:
            student_CV = _merge_unlikely(student_CV, teacher["ids"])
        return self._divergences(student_CV, teacher["logps"])

    def num_compared(self, vocab_size: int) -> int | None:
        """Returns the number of tokens that are compared one by one; None if all tokens of the vocabulary are."""
        return self.top_k if self.top_k is not None and self.top_k < vocab_size else None

    def _logps(self, logits_CV: jax.Array) -> jax.Array:
        import jax

        return jax.nn.log_softmax(logits_CV / self.temperature)

    def _likely_ids(self, teacher_CV: jax.Array) -> jax.Array | None:
        import jax

        count = self.num_compared(teacher_CV.shape[-1])
        return None if count is None else jax.lax.top_k(teacher_CV, count)[1]

    def _divergences(self, student_CV: jax.Array, teacher_CV: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        difference_CV = teacher_CV - student_CV
        if self.divergence == "forward":
            return jnp.sum(jnp.exp(teacher_CV) * difference_CV, axis=-1)
        return -jnp.sum(jnp.exp(student_CV) * difference_CV, axis=-1)


def _merge_unlikely(logp_CV: jax.Array, ids_CK: jax.Array) -> jax.Array:
    """Returns the log probabilities of the tokens `ids_CK`, and of all other tokens together: [C, K + 1]."""
    import jax
    import jax.numpy as jnp

    selected_CV = jnp.zeros(logp_CV.shape, bool).at[jnp.arange(logp_CV.shape[0])[:, None], ids_CK].set(True)
    rest_C = jax.nn.logsumexp(jnp.where(selected_CV, -jnp.inf, logp_CV), axis=-1)
    return jnp.concatenate([jnp.take_along_axis(logp_CV, ids_CK, axis=-1), rest_C[:, None]], axis=-1)
