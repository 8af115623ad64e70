"""Any block of any parameter, read from the tensors of a file, is that block of the parameters written to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.models import hf
from lm_trainer.models.hf_stream import Slices, read_block
from lm_trainer.models.hf_table import HfFamily, tensors_from_params
from tests.models.common import TINY, VOCAB
from tests.models.speech import TINY as SPEECH

MODELS = {**TINY, "whisper": SPEECH}
FAMILIES = sorted(name for name, config in MODELS.items() if isinstance(config.hf, HfFamily))


def random_blocks(shape: tuple[int, ...], rng: np.random.Generator) -> list[Slices]:
    """All of it, and some of it."""
    some = []
    for _ in range(3):
        ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in shape]
        some.append(tuple(slice(int(a), int(b)) for a, b in ends))
    return [tuple(slice(0, size) for size in shape), *some]


def assembled(pieces: list[Any], block: Slices, tensors: dict[str, np.ndarray], max_elements: int) -> np.ndarray:
    out = np.full([extent.stop - extent.start for extent in block], np.nan, np.float32)
    for start, part in read_block(pieces, block, lambda name, region: tensors[name][region], max_elements=max_elements):
        region_of_part = tuple(slice(offset, offset + size) for offset, size in zip(start, part.shape, strict=True))
        assert np.isnan(out[region_of_part]).all(), "written twice"
        out[region_of_part] = part
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_parameter(family: str) -> None:
    config = MODELS[family]
    rng = np.random.default_rng(0)
    leaves = hf.param_infos(config, VOCAB)
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in leaves.items()}
    tensors = tensors_from_params(config.hf_family(), leaves, params)
    stored = hf.plan_reading(config, VOCAB, {name: x.shape for name, x in tensors.items()}, {})
    assert stored.pieces.keys() == params.keys()
    for name, x in params.items():
        for block in random_blocks(x.shape, rng):
            for max_elements in (1, 50, 10**6):
                actual = assembled(stored.pieces[name], block, tensors, max_elements)
                np.testing.assert_array_equal(actual, x[block], err_msg=f"{name} {block}")


def test_no_more_is_read_than_the_rows_and_columns_of_the_block() -> None:
    config = TINY["llama"]
    leaves = hf.param_infos(config, VOCAB)
    tensors = tensors_from_params(config.hf_family(), leaves, {n: np.zeros(x.shape) for n, x in leaves.items()})
    stored = hf.plan_reading(config, VOCAB, {name: x.shape for name, x in tensors.items()}, {})
    read: dict[str, Slices] = {}

    def note(name: str, region: Slices) -> np.ndarray:
        read[name] = region
        return tensors[name][region]

    block = (slice(1, 2), slice(8, 16), slice(2, 3), slice(0, 8))
    list(read_block(stored.pieces["blocks.0.attention.q.weight"], block, note, max_elements=10**6))
    assert read == {"model.layers.1.self_attn.q_proj.weight": (slice(16, 24), slice(8, 16))}
