"""The coordinate check: with hyperparameters that are transferred, activations change equally at all sizes."""

from __future__ import annotations

from typing import Any

import pytest

from lm_trainer.bench.coordinates import Coordinates, Size, describe_coordinates, measure_coordinates
from lm_trainer.core.errors import UserError
from lm_trainer.run.config.run_config import RunConfig

WIDTHS, DEPTHS = (1, 2, 4, 8), (1, 2, 4)
SIZES = {"hidden_dim": 16, "num_heads": 1}
ROTARY = {**SIZES, "num_kv_heads": 1, "intermediate_dim": 32}


def make_config(family: str, kind: str, **optimizer: Any) -> RunConfig:
    sizes = SIZES if family == "gpt2" else ROTARY
    return RunConfig.model_validate(
        {
            "model": {"type": family, "seq_len": 16, "num_layers": 2, "initializer_range": 0.2, **sizes},
            "data": {"tokenizer": "bytes"},
            "optimizer": {"type": "adam", "learning_rate": 0.01, "weight_decay": 0, **optimizer},
            "trainer": {"train_batch_size": 2, "num_train_steps": 2, "elastic_shards": 1},
            "parametrization": {"type": kind, "base": {**sizes, **({"num_layers": 2} if kind == "completep" else {})}},
        }
    )


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.exhaustive)]
)
def test_changes_are_flat_only_if_hyperparameters_are_transferred(family: str) -> None:
    config = make_config(family, "completep")
    wide, deep = (measure_coordinates(config, widths=w, depths=d, steps=2) for w, d in ((WIDTHS, (1,)), ((1,), DEPTHS)))
    assert wide.is_flat, wide.exponents()
    assert deep.is_flat, deep.exponents()
    for name in ("embedding", "last layer"):
        assert wide.exponents()[name]["width"] == pytest.approx(0, abs=0.1)
    wide, deep = (
        measure_coordinates(config, widths=w, depths=d, steps=2, standard=True)
        for w, d in ((WIDTHS, (1,)), ((1,), DEPTHS))
    )
    assert not wide.is_flat
    # A step of Adam moves all elements by the learning rate, along the input: the change of a sum over the width is
    # proportional to the width. Changes of the layers add up.
    assert wide.exponents()["last layer"]["width"] > 0.5
    assert deep.exponents()["last layer"]["depth"] > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"type": "muon", "adam_lr": 0.01}, {"type": "lion", "learning_rate": 3e-3}])
def test_other_optimizers_are_flat_over_widths(optimizer: dict[str, Any]) -> None:
    config = make_config("llama", "mup", **optimizer)
    assert measure_coordinates(config, widths=WIDTHS, depths=(1,), steps=2).is_flat


def test_exponents_are_the_powers_of_width_and_depth() -> None:
    sizes = [Size(width, depth) for width in (1, 2, 4) for depth in (1, 3)]
    values = {"embedding": 0.0, "last layer": 1.0, "logits": 0.5}
    changes = {s: {name: 3.0 * s.width**power * s.depth**-0.5 for name, power in values.items()} for s in sizes}
    result = Coordinates("mup", changes)
    for name, power in values.items():
        assert result.exponents()[name] == pytest.approx({"width": power, "depth": -0.5})
    assert not result.is_flat
    assert describe_coordinates(result).rows[-1] == (
        "mup",
        "not flat over widths and depths: exponents of -0.6 to 0.25 are",
    )
    one_depth = Coordinates("mup", {size: dict.fromkeys(values, 1.0) for size in sizes if size.depth == 1})
    assert one_depth.exponents()["logits"] == pytest.approx({"width": 0.0}, abs=1e-9)
    assert describe_coordinates(one_depth).rows[-1] == ("mup", "flat over widths")


def test_a_check_without_a_base_or_with_curvature_is_refused() -> None:
    standard = RunConfig.model_validate({"model": {"type": "gpt2"}})
    with pytest.raises(UserError, match="standard has no base"):
        measure_coordinates(standard, widths=(1, 2), depths=(1,), steps=1)
    with pytest.raises(UserError, match="--depths needs the depth of a base"):
        measure_coordinates(make_config("gpt2", "mup"), widths=(1,), depths=(1, 2), steps=1)
    with pytest.raises(UserError, match="sophia-g needs estimates of the curvature"):
        measure_coordinates(make_config("gpt2", "mup", type="sophia-g"), widths=(1,), depths=(1,), steps=1)
