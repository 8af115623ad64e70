"""Constant tensors of a family's files: transformers saves them with the weights, and here they are no parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.models.hf_table import HfFamily

_TOLERANCE = 2e-2
"""Relative difference between a constant and its rounding to 16 bits, with a margin."""


def constant_tensors(family: HfFamily, num_layers: int, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the constants of a file by name, float32 without dimensions.

    Args:
        family: the table.
        num_layers: number of layers of the model.
        names: names of the other tensors of the file. A module without any of them has no constants either.
    """
    modules = {_module(name) for name in names}
    constants = ((family.prefix + name, value) for name, value in _all_constants(family, num_layers))
    return {name: np.asarray(value, np.float32) for name, value in constants if _module(name) in modules}


def check_constants(family: HfFamily, num_layers: int, tensors: Mapping[str, np.ndarray]) -> None:
    """Checks the constants that a file contains; a file may lack them.

    Raises:
        UserError: for the first one with another value.
    """
    for name, expected in _all_constants(family, num_layers):
        for name_in_file in {name, family.prefix + name} & tensors.keys():
            value = np.asarray(tensors[name_in_file]).astype(np.float32)
            if value.shape or not np.isclose(value, expected, rtol=_TOLERANCE, atol=0.0):
                raise UserError(f"{name_in_file} is {value}; only {expected} is supported")


def _all_constants(family: HfFamily, num_layers: int) -> Iterator[tuple[str, float]]:
    for layer in range(num_layers):
        for name, value in family.constants.items():
            yield name.format(layer), value


def _module(name: str) -> str:
    return name.rpartition(".")[0]
