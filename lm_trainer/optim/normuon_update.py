"""The update of NorMuon after the orthogonalisation.

Shape letters: L stacked matrices of one parameter, I inputs, O outputs (neurons).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.matrices import ADAM_RMS, is_matrix
from lm_trainer.optim.params import Arrays, Params


class NeuronState(NamedTuple):
    """State of `normalise_neurons`."""

    neurons: dict[str, jax.Array]
    """float32 [L, O] by parameter: the average of the mean square of the updates of each neuron."""


def normalise_neurons(params: Params, *, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Divides the update of each neuron by its root mean square over past steps, and scales it to the size of AdamW's.

    Algorithm 1 of Li et al. 2025 (arXiv 2510.05491), with O the orthogonal update of a matrix:

        v <- beta2 v + (1 - beta2) mean over inputs of O^2
        update = 0.2 sqrt(inputs outputs) N / |N|, where N = O / (sqrt(v) + epsilon)

    A neuron is an output: a row of the paper's weights, and a column here, where x @ W is computed.
    """
    matrices = {name: param for name, param in params.items() if is_matrix(param)}

    def init(_: Arrays) -> NeuronState:
        shapes = {name: param.matrix_shape for name, param in matrices.items()}
        return NeuronState({name: jnp.zeros((count, outputs)) for name, (count, _, outputs) in shapes.items()})

    def update(updates: Arrays, state: NeuronState, _: Arrays | None = None) -> tuple[Arrays, NeuronState]:
        neurons, normalised = {}, dict(updates)
        for name, param in matrices.items():
            update_LIO = param.to_matrices(updates[name]).astype(jnp.float32)
            squares_LO = jnp.mean(jnp.square(update_LIO), axis=1)
            neurons[name] = beta2 * state.neurons[name] + (1 - beta2) * squares_LO
            scaled_LIO = update_LIO / (jnp.sqrt(neurons[name]) + epsilon)[:, None, :]
            rms_L11 = jnp.sqrt(jnp.mean(jnp.square(scaled_LIO), axis=(1, 2), keepdims=True))
            # A gradient of zero is no direction.
            sized_LIO = scaled_LIO * (ADAM_RMS / jnp.where(rms_L11 > 0, rms_L11, 1.0))
            normalised[name] = param.from_matrices(sized_LIO).astype(updates[name].dtype)
        return normalised, NeuronState(neurons)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
