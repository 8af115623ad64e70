"""Checkpoints: when they are written, how they are proved intact, and models read out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_trainer.checkpoint.model import LoadedModel, load_model, write_model

__all__ = ["LoadedModel", "load_model", "write_model"]


def __getattr__(name: str) -> Any:
    # The configuration imports this package for its policies and is itself needed to read a model.
    if name in __all__:
        from lm_trainer.checkpoint import model

        return getattr(model, name)
    raise AttributeError(name)
