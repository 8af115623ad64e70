"""Positions inside attention: rotations of queries and keys, and biases that grow with distance.

Shape letters: B rows, S queries, T keys, N heads, H head size, F rotated pairs of a head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.rope_spec import LinearScaling, LongRopeScaling, RopeSpec, WavelengthScaling, YarnScaling
from lm_trainer.nn.spec import AlibiSpec
from lm_trainer.parallel.target_platform import target_platform


def rope_frequencies(spec: RopeSpec, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns the frequencies in radians per position, float32 [F], and the factor that multiplies cosine and sine."""
    # In NumPy's float64, rounded once at the end, so that the constants are identical on every device.
    dims = head_dim if spec.over_head else int(head_dim * spec.fraction)
    pairs_F = np.arange(0, dims, 2) / dims
    plain_F = spec.theta**-pairs_F
    scaling = spec.scaling
    match scaling:
        case None:
            scaled_F, magnitude = plain_F, 1.0
        case LinearScaling():
            scaled_F, magnitude = plain_F / scaling.factor, 1.0
        case WavelengthScaling():
            scaled_F, magnitude = _scale_by_wavelength(scaling, plain_F), 1.0
        case YarnScaling():
            scaled_F, magnitude = _scale_by_yarn(scaling, plain_F, spec.theta, dims), scaling.magnitude
        case LongRopeScaling():
            scaled_F, magnitude = plain_F / np.array(scaling.factors), scaling.magnitude
    if spec.over_head:
        # Pairs that are not rotated have the angle 0.
        scaled_F = np.where(np.arange(dims // 2) < int(head_dim * spec.fraction) // 2, scaled_F, 0.0)
    return (-scaled_F if spec.backward else scaled_F).astype(np.float32), magnitude


def _scale_by_wavelength(scaling: WavelengthScaling, plain_F: np.ndarray) -> np.ndarray:
    # Number of rotations over the original positions: their number divided by the wavelength, which is 2 pi /
    # frequency.
    rotations_F = scaling.original_positions * plain_F / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled_F = np.clip((rotations_F - low) / (high - low), 0.0, 1.0)
    return plain_F * (unscaled_F + (1.0 - unscaled_F) / scaling.factor)


def _scale_by_yarn(scaling: YarnScaling, plain_F: np.ndarray, theta: float, dims: int) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        """Returns the unrounded dimension that makes this many rotations (Peng et al. 2023, section 3.2)."""
        return dims * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.whole_dims:
        low, high = math.floor(low), math.ceil(high)
    # Same bounds as the reference implementation, although only dims / 2 pairs exist.
    low, high = max(low, 0), min(high, dims - 1)
    # A ramp of length 0 would divide by 0; transformers uses 0.001 as well.
    ramp_F = np.clip((np.arange(dims // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return plain_F * (1.0 - ramp_F + ramp_F / scaling.factor)


def sinusoids(length: int, dims: int) -> np.ndarray:
    """Returns sinusoidal positions, float32 [length, dims]: sines, then cosines, of wavelengths from 2 pi to 10000 * 2
    pi.

    The formula of Vaswani et al. 2017, section 3.5, with the wavelengths of Radford et al. 2022, which include the
    longest. `dims` must be even and at least 4.
    """
    # In float64, so that machines whose exponentials differ in the last bit still agree after rounding.
    frequencies_F = np.exp(-math.log(10_000) / (dims // 2 - 1) * np.arange(dims // 2))
    angles_LF = np.arange(length)[:, None] * frequencies_F[None]
    return np.concatenate([np.sin(angles_LF), np.cos(angles_LF)], axis=1).astype(np.float32)


def apply_rope(spec: RopeSpec, x_BSNH: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Rotates each head by angles that grow with the position, in float32; returns the dtype of its input."""
    frequencies_F, magnitude = rope_frequencies(spec, x_BSNH.shape[-1])
    # bfloat16 represents integers exactly only up to 256, so distant positions would get the same angles.
    angles_BS1F = positions_BS.astype(jnp.float32)[:, :, None, None] * frequencies_F[None, None, None, :]
    cos_BS1F, sin_BS1F = magnitude * jnp.cos(angles_BS1F), magnitude * jnp.sin(angles_BS1F)
    pairs = len(frequencies_F)
    if target_platform() == "tpu":
        return _rotate_by_product(spec, x_BSNH, cos_BS1F, sin_BS1F)
    if spec.interleaved:
        x_BSNF2 = x_BSNH[..., : 2 * pairs].reshape(*x_BSNH.shape[:-1], pairs, 2)
        first, second, unrotated = x_BSNF2[..., 0], x_BSNF2[..., 1], x_BSNH[..., 2 * pairs :]
    else:
        first, second, unrotated = jnp.split(x_BSNH, (pairs, 2 * pairs), axis=-1)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [part.astype(x_BSNH.dtype) for part in (a * cos_BS1F - b * sin_BS1F, b * cos_BS1F + a * sin_BS1F)]
    if spec.interleaved:
        rotated = [jnp.stack(rotated, axis=-1).reshape(*x_BSNH.shape[:-1], 2 * pairs)]
    return jnp.concatenate([*rotated, unrotated], axis=-1)


def _rotate_by_product(spec: RopeSpec, x_BSNH: jax.Array, cos_BS1F: jax.Array, sin_BS1F: jax.Array) -> jax.Array:
    """Computes x cos + (x R) sin, where R swaps the coordinates of each rotation. Results equal those computed from
    separate coordinates.

    On a TPU the head dimension is laid out along the lanes, where splitting and joining halves cost more than a
    product.
    """
    size, pairs = x_BSNH.shape[-1], cos_BS1F.shape[-1]
    dims_F = np.arange(pairs)
    first_F, second_F = (2 * dims_F, 2 * dims_F + 1) if spec.interleaved else (dims_F, pairs + dims_F)
    swap_HH = np.zeros((size, size), np.float32)
    swap_HH[second_F, first_F] = -1.0
    swap_HH[first_F, second_F] = 1.0

    def tile_over_head(x_BS1F: jax.Array, fill: float) -> jax.Array:
        unrotated = jnp.full((*x_BS1F.shape[:-1], size - 2 * pairs), fill, x_BS1F.dtype)
        if spec.interleaved:
            return jnp.concatenate([jnp.repeat(x_BS1F, 2, axis=-1), unrotated], axis=-1)
        return jnp.concatenate([x_BS1F, x_BS1F, unrotated], axis=-1)

    # Only one term of each sum is non-zero, so the product is exact in every dtype; float32 needs the highest precision
    # for it.
    swapped_BSNH = jnp.matmul(x_BSNH, jnp.asarray(swap_HH, x_BSNH.dtype), precision="highest")
    x, rotated = x_BSNH.astype(jnp.float32), swapped_BSNH.astype(jnp.float32)
    return (x * tile_over_head(cos_BS1F, 1.0) + rotated * tile_over_head(sin_BS1F, 0.0)).astype(x_BSNH.dtype)


def alibi_slopes(spec: AlibiSpec, num_heads: int) -> np.ndarray:
    """Returns the amount subtracted from the scores of each head per position of distance, float32 [N]."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-spec.max_bias * np.arange(1, power + 1) / power)
    if power != num_heads:
        # Every second slope first, as in the published models.
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes.astype(np.float32)


def alibi_bias(spec: AlibiSpec, num_heads: int, distances_BST: jax.Array) -> jax.Array:
    """Computes the bias, float32 [B, N, S, T], from the distance of each key before each query."""
    slopes_1N11 = jnp.asarray(alibi_slopes(spec, num_heads))[None, :, None, None]
    return -slopes_1N11 * distances_BST.astype(jnp.float32)[:, None]
