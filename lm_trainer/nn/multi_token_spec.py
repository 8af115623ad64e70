"""Description of modules that predict later tokens as plain values; a part of `lm_trainer.nn.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from lm_trainer.nn.spec import BlockSpec, NormSpec


@dataclass(frozen=True)
class MultiTokenSpec:
    """Modules that predict tokens after the next one, as additional losses (arXiv 2412.19437, section 2.2).

    Module k reads the input of the head before it and the embedding of the token k positions later, and predicts the
    token after that one, with the embedding and the head of the model. Only losses use the modules. They have no
    dropout.
    """

    block: BlockSpec
    """The layer of each module."""
    norm: NormSpec
    """Norm of both inputs of a module, and of the input of its head."""
    depth: int = 1
    """Number of modules."""
    loss_weight: float = 0.3
    """Factor of the mean loss of the modules in the gradient."""
