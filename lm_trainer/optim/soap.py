"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Shape letters: K blocks of one parameter, I inputs of a block, O its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.blocks import Blocks, cut, matrix_sizes
from lm_trainer.optim.params import Param, Params

_WHOLE_WEIGHTS = "heads and their size count as one dimension, layers and experts as weights of their own"


class Basis(NamedTuple):
    """The preconditioner of one side of a parameter's blocks: for the inputs [K, I, I], for the outputs [K, O, O]."""

    gram: jax.Array
    """The average of G G^T or of G^T G."""
    vectors: jax.Array
    """Its eigenvectors, in columns, by falling eigenvalue."""


class SoapState(NamedTuple):
    """What SOAP remembers; bases by parameter name, where there are any."""

    count: jax.Array
    """int32, steps so far."""
    mu: Any
    """The average of gradients."""
    nu: Any
    """The average of squared gradients in the basis, block by block in the parameter's shape."""
    inputs: dict[str, Basis]
    outputs: dict[str, Basis]


class SoapConfig(OptimizerConfig):
    """SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3). The first step makes the bases and moves nothing.

    Biases and scales of norms are moved as by Adam.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        "merge_small_dims": _WHOLE_WEIGHTS,
        "target_merged_dim_size": _WHOLE_WEIGHTS,
        "mu_dtype": "moments have the dtype of the parameters; see `trainer.mp`",
        "precond_dtype": "eigenvectors need float32",
        "schedule_list": "use `lr_schedule` with `cycles`",
    }

    type: Literal["soap"] = "soap"
    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate; the paper's is 3e-3."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    shampoo_beta: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of G G^T and G^T G."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    precondition_frequency: PositiveInt = 10
    """Steps from one renewal of the eigenvectors to the next."""
    max_precond_dim: PositiveInt = 10000
    """A larger dimension, such as a vocabulary, is left as it is."""
    one_diag: bool = False
    """Leaves the larger dimension of every matrix as it is: half the memory and less work."""
    partition_grads_into_blocks: bool = True
    """Cuts matrices into blocks with bases of their own."""
    block_size: PositiveInt = 256
    """The largest size of a block; blocks have the largest size up to it that divides the dimension."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Adam's direction in the bases, turned back."""
        sides = {name: self._sides(param) for name, param in params.items()}
        blocks = {name: self._blocks(param, *sides[name]) for name, param in params.items()}

        def bases(side: int) -> dict[str, Basis]:
            sizes = {n: (b.count, (b.inputs, b.outputs)[side][1]) for n, b in blocks.items() if sides[n][side]}
            return {n: Basis(jnp.zeros((k, d, d)), jnp.tile(jnp.eye(d), (k, 1, 1))) for n, (k, d) in sizes.items()}

        def init(like: Any) -> SoapState:
            zeros = optax.tree.zeros_like(like)
            return SoapState(jnp.zeros((), jnp.int32), zeros, zeros, bases(0), bases(1))

        def first(grads: Any, state: SoapState) -> tuple[Any, SoapState]:
            state = self._observe(grads, state, blocks)
            spectral = lambda basis: basis._replace(vectors=jnp.linalg.eigh(basis.gram)[1][..., ::-1])  # noqa: E731
            fresh = [{name: spectral(basis) for name, basis in side.items()} for side in (state.inputs, state.outputs)]
            return optax.tree.zeros_like(grads), SoapState(state.count + 1, state.mu, state.nu, *fresh)

        def later(grads: Any, state: SoapState) -> tuple[Any, SoapState]:
            updates, state = self._adam(grads, state, blocks)
            state = self._observe(grads, state, blocks)
            due = state.count % self.precondition_frequency == 0
            state = jax.lax.cond(due, lambda s: _renew(s, blocks), lambda s: s, state)
            return updates, state._replace(count=state.count + 1)

        def update(grads: Any, state: SoapState, _: Any = None) -> tuple[Any, SoapState]:
            return jax.lax.cond(state.count == 0, first, later, grads, state)

        return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]

    def _sides(self, param: Param) -> tuple[bool, bool]:
        """Whether the inputs and the outputs have a basis."""
        if param.role == "vector":
            return False, False
        _, inputs, outputs = param.matrix_shape
        fits = (inputs <= self.max_precond_dim, outputs <= self.max_precond_dim)
        if self.one_diag:
            return fits[0] and inputs < outputs, fits[1] and inputs >= outputs
        return fits

    def _blocks(self, param: Param, inputs: bool, outputs: bool) -> Blocks:
        most = self.block_size if self.partition_grads_into_blocks else None
        stacked, i, o = matrix_sizes(param)
        return Blocks(param.shape, stacked, cut(i, most) if inputs else (1, i), cut(o, most) if outputs else (1, o))

    def _observe(self, grads: Any, state: SoapState, blocks: Mapping[str, Blocks]) -> SoapState:
        """Moves the averages of G G^T and G^T G."""

        def moved(name: str, basis: Basis, product: str) -> Basis:
            g_KIO = blocks[name].split(grads[name]).astype(basis.gram.dtype)
            gram = jnp.einsum(product, g_KIO, g_KIO, precision="highest")
            return basis._replace(gram=self.shampoo_beta * basis.gram + (1 - self.shampoo_beta) * gram)

        return state._replace(
            inputs={name: moved(name, basis, "kio,kjo->kij") for name, basis in state.inputs.items()},
            outputs={name: moved(name, basis, "kio,kip->kop") for name, basis in state.outputs.items()},
        )

    def _adam(self, grads: Any, state: SoapState, blocks: Mapping[str, Blocks]) -> tuple[Any, SoapState]:
        mu = optax.tree.update_moment(grads, state.mu, self.beta1, 1)
        turned = {name: _turn(name, g, state, blocks) for name, g in grads.items()}
        nu = optax.tree.update_moment(turned, state.nu, self.beta2, 2)
        m_hat = optax.tree.bias_correction(mu, self.beta1, state.count)
        v_hat = optax.tree.bias_correction(nu, self.beta2, state.count)
        updates = {}
        for name, m in m_hat.items():
            step = _turn(name, m, state, blocks) / (jnp.sqrt(v_hat[name]) + self.epsilon)
            updates[name] = _turn(name, step, state, blocks, back=True)
        return updates, state._replace(mu=mu, nu=nu)


def _turn(name: str, x: jax.Array, state: SoapState, blocks: Mapping[str, Blocks], *, back: bool = False) -> jax.Array:
    """Into the bases of a parameter's blocks, or back out of them; shape and dtype stay."""
    x_KIO = blocks[name].split(x)
    if name in state.inputs:
        q_KII = state.inputs[name].vectors
        x_KIO = jnp.einsum("kij,kjo->kio" if back else "kji,kjo->kio", q_KII, x_KIO, precision="highest")
    if name in state.outputs:
        q_KOO = state.outputs[name].vectors
        x_KIO = jnp.einsum("kip,kop->kio" if back else "kip,kpo->kio", x_KIO, q_KOO, precision="highest")
    return blocks[name].join(x_KIO.astype(x.dtype))


def _renew(state: SoapState, blocks: Mapping[str, Blocks]) -> SoapState:
    """One step of orthogonal iteration on every basis (algorithm 4), the second moments following its order."""
    nu, inputs, outputs = dict(state.nu), {}, {}
    for name, basis in state.inputs.items():
        inputs[name], order_KI = _iterate(basis)
        v_KIO = jnp.take_along_axis(blocks[name].split(nu[name]), order_KI[:, :, None], axis=1)
        nu[name] = blocks[name].join(v_KIO)
    for name, basis in state.outputs.items():
        outputs[name], order_KO = _iterate(basis)
        v_KIO = jnp.take_along_axis(blocks[name].split(nu[name]), order_KO[:, None, :], axis=2)
        nu[name] = blocks[name].join(v_KIO)
    return state._replace(nu=nu, inputs=inputs, outputs=outputs)


def _iterate(basis: Basis) -> tuple[Basis, jax.Array]:
    product = jnp.matmul(basis.gram, basis.vectors, precision="highest")
    order = jnp.argsort(-jnp.sum(basis.vectors * product, axis=-2), axis=-1)
    sorted_product = jnp.take_along_axis(product, order[:, None, :], axis=-1)
    return basis._replace(vectors=jnp.linalg.qr(sorted_product)[0]), order
