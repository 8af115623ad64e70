"""Settings of families in which some layers have no positions (Yang et al. 2025, arXiv 2501.18795)."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from lm_trainer.models.rotary import RotaryConfig

INTERVAL = 4


def every_nth_layer(interval: int, num_layers: int) -> tuple[int, ...]:
    """Returns the indices, counted from 0, of every n-th layer."""
    return tuple(range(interval - 1, num_layers, interval))


def listed_or_every_nth(listed: tuple[int, ...] | None, interval: int, num_layers: int) -> tuple[int, ...]:
    """Returns the listed layers; without a list, every n-th layer."""
    return every_nth_layer(interval, num_layers) if listed is None else listed


class LayersWithoutRopeConfig(RotaryConfig):
    """Settings of a decoder in which every n-th layer, or each layer of a list, has no positions."""

    no_rope_layer_interval: int = Field(default=INTERVAL, gt=0)
    """Every n-th layer has no positions, unless `layers_without_rope` lists these layers."""
    layers_without_rope: tuple[int, ...] | None = None
    """Indices, counted from 0, of the layers without positions. Unset: every n-th layer (`no_rope_layer_interval`)."""

    @model_validator(mode="after")
    def _check_layers_without_rope_exist(self) -> Self:
        listed = self.layers_without_rope or ()
        if missing := [layer for layer in listed if not 0 <= layer < self.num_layers]:
            raise ValueError(f"layers_without_rope lists {missing}, but layers have indices 0 to {self.num_layers - 1}")
        return self

    @property
    def indices_without_rope(self) -> tuple[int, ...]:
        """`layers_without_rope` with its default resolved."""
        return listed_or_every_nth(self.layers_without_rope, self.no_rope_layer_interval, self.num_layers)


def no_rope_from_hf(hf: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Reads the settings of `LayersWithoutRopeConfig`."""
    interval = hf.get("no_rope_layer_interval") or INTERVAL
    # In the file, 1 means rotary positions. The list may be longer than the model; an empty one means the default.
    flags = hf.get("no_rope_layers") or None
    listed = flags and tuple(layer for layer, has_rope in enumerate(flags[:num_layers]) if not has_rope)
    return {
        "no_rope_layer_interval": interval,
        "layers_without_rope": None if listed == every_nth_layer(interval, num_layers) else listed,
    }


def no_rope_to_hf(config: LayersWithoutRopeConfig) -> dict[str, Any]:
    """Returns the fields of config.json that `no_rope_from_hf` reads."""
    indices = config.indices_without_rope
    return {
        "no_rope_layers": [int(layer not in indices) for layer in range(config.num_layers)],
        "no_rope_layer_interval": config.no_rope_layer_interval,
    }
