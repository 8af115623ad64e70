"""Prints the digest of computed eigenvectors; with the argument `loaded`, SciPy has loaded its BLAS before."""

from __future__ import annotations

import hashlib
import sys

import numpy as np


def digest() -> str:
    """The SHA-256 of the eigenvectors of a matrix that is large enough for several threads of OpenBLAS."""
    import jax.numpy as jnp

    from lm_trainer.optim.factorizations import eigenvectors

    x_NN = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    return hashlib.sha256(np.asarray(eigenvectors(jnp.asarray(x_NN + x_NN.T)[None])).tobytes()).hexdigest()


if __name__ == "__main__":
    if sys.argv[1:] == ["loaded"]:
        import scipy.linalg

        scipy.linalg.eigh([[1.0]])
    from lm_trainer.core.runtime import configure_jax

    configure_jax({}, None)
    print(digest())
