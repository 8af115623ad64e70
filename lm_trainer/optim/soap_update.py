"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Shampoo averages L = G G^T and R = G^T G of each block G. SOAP rotates the gradient into the eigenvectors of L and R, G'
= Q_L^T G Q_R. The elements of G' are nearly uncorrelated, so Adam's second moment of each element is a good
preconditioner. The resulting update is rotated back.

Shape letters: K blocks of one parameter, I inputs of a block, O outputs of a block, N either of them. With the default
settings, linear maps from 768 to 3072 in 12 layers have

    gradient                (12, 768, 3072)
    g_KIO                   (432, 256, 256)   12 layers of 3 x 12 blocks
    gram, vectors           (432, 256, 256)   for the inputs, and the same for the outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.blocks import Blocks
from lm_trainer.optim.factorizations import eigenvectors, orthonormal_columns
from lm_trainer.optim.params import Arrays, Param, Params
from lm_trainer.optim.soap import SoapConfig


class Basis(NamedTuple):
    """The eigenbasis of one side of a parameter's blocks."""

    gram: jax.Array
    """float32; the average of G G^T [K, I, I] for the inputs, or of G^T G [K, O, O] for the outputs."""
    vectors: jax.Array
    """Eigenvectors of `gram` as columns, by decreasing eigenvalue; same shape."""


class SoapState(NamedTuple):
    """State of SOAP; the bases are dicts by parameter name."""

    count: jax.Array
    """int32 []; number of steps so far."""
    mu: Arrays
    """Average of gradients, in the shapes of the parameters."""
    nu: Arrays
    """Average of squared gradients in the basis, block by block. It has the shape of the parameter, so that it is
    sharded like the parameter."""
    inputs: dict[str, Basis]
    """Bases of the inputs by parameter name."""
    outputs: dict[str, Basis]
    """Bases of the outputs by parameter name."""


def scale_by_soap(config: SoapConfig, params: Params) -> optax.GradientTransformation:
    """Returns Adam's update in the eigenbases, rotated back."""
    sides = {name: _sides_with_basis(config, param) for name, param in params.items()}
    max_size = config.block_size if config.partition_grads_into_blocks else None
    # Blocks are useless for a side that has no basis.
    blocks = {n: Blocks.for_param(p, max_size, inputs=sides[n][0], outputs=sides[n][1]) for n, p in params.items()}

    def initial_bases(side: int) -> dict[str, Basis]:
        sizes = {n: (b.count, (b.inputs, b.outputs)[side][1]) for n, b in blocks.items() if sides[n][side]}
        return {n: Basis(jnp.zeros((k, d, d)), jnp.tile(jnp.eye(d), (k, 1, 1))) for n, (k, d) in sizes.items()}

    def init(like: Arrays) -> SoapState:
        zeros = optax.tree.zeros_like(like)
        return SoapState(jnp.zeros((), jnp.int32), zeros, zeros, initial_bases(0), initial_bases(1))

    def first(grads: Arrays, state: SoapState) -> tuple[Arrays, SoapState]:
        state = _update_averages(config, grads, state, blocks)
        # Without a basis the update cannot be preconditioned. As in the authors' code, the first gradient therefore
        # only initialises the bases. `eigenvectors` sorts by increasing eigenvalue, hence the reversal.
        spectral = lambda basis: basis._replace(vectors=eigenvectors(basis.gram)[..., ::-1])  # noqa: E731
        fresh = [{name: spectral(basis) for name, basis in side.items()} for side in (state.inputs, state.outputs)]
        return optax.tree.zeros_like(grads), SoapState(state.count + 1, state.mu, state.nu, *fresh)

    def later(grads: Arrays, state: SoapState) -> tuple[Arrays, SoapState]:
        # Adam comes first, because a gradient is rotated by bases that do not include it yet (algorithm 3).
        updates, state = _adam_update(config, grads, state, blocks)
        state = _update_averages(config, grads, state, blocks)
        due = state.count % config.precondition_frequency == 0
        state = jax.lax.cond(due, lambda s: _renew_bases(s, blocks), lambda s: s, state)
        return updates, state._replace(count=state.count + 1)

    def update(grads: Arrays, state: SoapState, _: Arrays | None = None) -> tuple[Arrays, SoapState]:
        return jax.lax.cond(state.count == 0, first, later, grads, state)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _sides_with_basis(config: SoapConfig, param: Param) -> tuple[bool, bool]:
    """Returns, for inputs and outputs, true if they have a basis."""
    if param.role == "vector":
        return False, False
    _, inputs, outputs = param.matrix_shape
    fits = (inputs <= config.max_precond_dim, outputs <= config.max_precond_dim)
    if config.one_diag:
        return fits[0] and inputs < outputs, fits[1] and inputs >= outputs
    return fits


def _update_averages(config: SoapConfig, grads: Arrays, state: SoapState, blocks: Mapping[str, Blocks]) -> SoapState:
    """Adds a gradient to the averages of G G^T and G^T G."""

    def average_product(name: str, basis: Basis, product: str) -> Basis:
        g_KIO = blocks[name].split(grads[name]).astype(basis.gram.dtype)
        gram = jnp.einsum(product, g_KIO, g_KIO, precision="highest")
        return basis._replace(gram=config.shampoo_beta * basis.gram + (1 - config.shampoo_beta) * gram)

    return state._replace(
        inputs={name: average_product(name, basis, "kio,kjo->kij") for name, basis in state.inputs.items()},
        outputs={name: average_product(name, basis, "kio,kip->kop") for name, basis in state.outputs.items()},
    )


def _adam_update(
    config: SoapConfig, grads: Arrays, state: SoapState, blocks: Mapping[str, Blocks]
) -> tuple[Arrays, SoapState]:
    # The average gradient is not rotated into the bases, so that it stays valid when they are updated.
    mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
    rotated = {name: _rotate(name, g, state, blocks) for name, g in grads.items()}
    nu = optax.tree.update_moment(rotated, state.nu, config.beta2, 2)
    m_hat = optax.tree.bias_correction(mu, config.beta1, state.count)
    v_hat = optax.tree.bias_correction(nu, config.beta2, state.count)
    updates = {}
    for name, m in m_hat.items():
        step = _rotate(name, m, state, blocks) / (jnp.sqrt(v_hat[name]) + config.epsilon)
        updates[name] = _rotate(name, step, state, blocks, back=True)
    return updates, state._replace(mu=mu, nu=nu)


# All products below have precision="highest": by default an accelerator rounds the operands to bfloat16 or TF32, and
# bases that are not orthogonal would not rotate a gradient back exactly.


def _rotate(
    name: str, x: jax.Array, state: SoapState, blocks: Mapping[str, Blocks], *, back: bool = False
) -> jax.Array:
    """Returns Q_in^T X Q_out of every block or, with `back`, Q_in X Q_out^T; keeps the parameter's shape and dtype."""
    x_KIO = blocks[name].split(x)
    if name in state.inputs:
        q_KII = state.inputs[name].vectors
        x_KIO = jnp.einsum("kij,kjo->kio" if back else "kji,kjo->kio", q_KII, x_KIO, precision="highest")
    if name in state.outputs:
        q_KOO = state.outputs[name].vectors
        x_KIO = jnp.einsum("kip,kop->kio" if back else "kip,kpo->kio", x_KIO, q_KOO, precision="highest")
    return blocks[name].join(x_KIO.astype(x.dtype))


def _renew_bases(state: SoapState, blocks: Mapping[str, Blocks]) -> SoapState:
    """Applies one step of orthogonal iteration to every basis (algorithm 4)."""
    nu, inputs, outputs = dict(state.nu), {}, {}
    # A second moment belongs to an eigenvector, so if the order of the eigenvectors changes, it must follow.
    for name, basis in state.inputs.items():
        inputs[name], order_KI = _orthogonal_iteration(basis)
        v_KIO = jnp.take_along_axis(blocks[name].split(nu[name]), order_KI[:, :, None], axis=1)
        nu[name] = blocks[name].join(v_KIO)
    for name, basis in state.outputs.items():
        outputs[name], order_KO = _orthogonal_iteration(basis)
        v_KIO = jnp.take_along_axis(blocks[name].split(nu[name]), order_KO[:, None, :], axis=2)
        nu[name] = blocks[name].join(v_KIO)
    return state._replace(nu=nu, inputs=inputs, outputs=outputs)


def _orthogonal_iteration(basis: Basis) -> tuple[Basis, jax.Array]:
    """Returns the basis after one orthogonal iteration, and the old index of each of its vectors, [K, N].

    A QR decomposition of the average times the old vectors costs far less than `eigh`, and the averages change so
    slowly that one iteration is enough.
    """
    product_KNN = jnp.matmul(basis.gram, basis.vectors, precision="highest")
    # The diagonal of V^T G V estimates the eigenvalues. QR preserves the space of the first n columns for every n, so
    # the columns must be sorted before it.
    order_KN = jnp.argsort(-jnp.sum(basis.vectors * product_KNN, axis=-2), axis=-1)
    sorted_KNN = jnp.take_along_axis(product_KNN, order_KN[:, None, :], axis=-1)
    return basis._replace(vectors=orthonormal_columns(sorted_KNN)), order_KN
