"""Agreement among the processes of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from lm_trainer.parallel.processes import gather


@pytest.mark.parametrize(
    "values",
    [
        np.asarray(80 * 2**30, np.int64),
        np.asarray([[-1, 79 * 2**30 + 5], [3, 4]], np.int64),
        np.asarray([0.1, 1e300], np.float64),
        np.asarray([7, 8], np.int32),
        np.asarray([True, False]),
    ],
    ids=str,
)
def test_numbers_of_64_bits_come_through(monkeypatch: pytest.MonkeyPatch, values: np.ndarray) -> None:
    def as_on_devices(sent: np.ndarray) -> Any:
        # The exchange goes through arrays of JAX, whose numbers have 32 bits at most.
        return np.stack([np.asarray(jax.device_put(sent))] * 2)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", as_on_devices)
    gathered = gather(values)
    assert gathered.dtype == values.dtype
    np.testing.assert_array_equal(gathered, [values, values])
