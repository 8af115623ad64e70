"""Checks the arguments of `Trainer` and its methods, to report mistakes immediately and not after the first steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.optim import Optimizer
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.training.batches import BatchLoader
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.train_state import TrainState


def check_trainer(config: object, optimizer: object, loss_fn: object) -> None:
    """Checks the first three arguments of `Trainer`."""
    if not isinstance(config, TrainerConfig):
        inside = ", whose field `trainer` it is" if isinstance(getattr(config, "trainer", None), TrainerConfig) else ""
        raise UserError(f"Trainer: the configuration must be a TrainerConfig, not {_describe_type(config)}{inside}")
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"Trainer: the optimizer must be one of lm_trainer.optim, such as AdamConfig(learning_rate=1e-3), not "
            f"{_describe_type(optimizer)}; a transformation of optax becomes one by "
            f"lm_trainer.optim.from_optax(NAME, TRANSFORMATION)"
        )
    _check_call("Trainer: the loss", loss_fn, "loss(model, batch, key)", None, None, None)


def check_hook(fn: object) -> None:
    """Checks the function that is passed to `add_hook`."""
    _check_call("trainer.add_hook: the hook", fn, "hook(info)", None)


def check_eval_set(held_out: object, name: object, names: Iterable[str | None]) -> None:
    """Checks the arguments of `add_eval_hook`.

    Args:
        held_out: the held-out set.
        name: name of the set, or None.
        names: names of the sets that were added before.
    """
    batches = getattr(held_out, "batches", None)
    if batches is None:
        several = callable(getattr(held_out, "validation", None)) or isinstance(held_out, Mapping)
        raise UserError(
            f"trainer.add_eval_hook takes a held-out set, which has a method `batches`, not {_describe_type(held_out)}"
            + ("; the sets of open_data are those of data.validation(), a dict by name" * several)
            + ": for name, held_out in data.validation().items(): trainer.add_eval_hook(held_out, name)" * several
        )
    call = "batches(batch_size, *, rows, max_batches=None)"
    _check_call("trainer.add_eval_hook: the method `batches`", batches, call, 1, rows=range(1), max_batches=None)
    if name is not None and not isinstance(name, str):
        raise UserError(f"trainer.add_eval_hook: the name must be a text, not {_describe_type(name)}")
    if name in [*names]:
        label = "without a name" if name is None else repr(name)
        raise UserError(f"trainer.add_eval_hook: there is a held-out set {label} already; give each a name of its own")


def check_model(model: object, model_init: object) -> None:
    """Checks the arguments `model` and `model_init` of `initial_state`, of which exactly one is given."""
    if model is not None and not isinstance(model, nnx.Module):
        call = "; a class or function that makes one is model_init=" if callable(model) else ""
        raise UserError(f"trainer.initial_state: model must be a module of flax.nnx, not {_describe_type(model)}{call}")
    if isinstance(model_init, nnx.Module):
        raise UserError("trainer.initial_state: model_init makes a model; give one that is there already as model=")
    if model_init is not None and not isinstance(model_init, ModelDef):
        _check_call("trainer.initial_state: model_init", model_init, "model_init()")


def check_dataset(dataset: object) -> None:
    """Checks the argument of `data_loader`."""
    train = getattr(dataset, "train", None)
    if train is not None:
        call = "train(schedule, *, rows, first_step, num_steps)"
        _check_call("trainer.data_loader: the method `train`", train, call, None, rows=None, first_step=0, num_steps=1)
    elif not isinstance(dataset, Iterable):
        raise UserError(
            f"trainer.data_loader takes a dataset with a method `train`, such as open_data returns, or a pipeline of "
            f"Grain, not {_describe_type(dataset)}"
        )


def check_loader(state: object, loader: object) -> None:
    """Checks the arguments of `train` and `training_steps`."""
    check_state(state)
    if not isinstance(loader, BatchLoader | Iterable):
        instead = "; write trainer.data_loader(data)" if hasattr(loader, "train") else ""
        raise UserError(
            f"the batches must be those of trainer.data_loader or an iterable, not {_describe_type(loader)}{instead}"
        )


def check_state(state: object) -> None:
    """Checks the state to continue from."""
    if not isinstance(state, TrainState):
        inside = "; it is its field `state`" if isinstance(getattr(state, "state", None), TrainState) else ""
        raise UserError(
            f"the state must be a TrainState, as initial_state returns it, not {_describe_type(state)}{inside}"
        )


def check_batch(batch: object) -> None:
    """Checks the batch that is passed to `train_step`."""
    if not isinstance(batch, Batch):
        raise UserError(f"the batch must be a Batch of lm_trainer.core.batch, not {_describe_type(batch)}")


def _check_call(subject: str, function: object, call: str, /, *args: object, **kwargs: object) -> None:
    """Raises `UserError` unless `function` can be called with these arguments."""
    if not callable(function):
        raise UserError(f"{subject} must be a function, called as {call}, not {_describe_type(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions without a signature, such as some written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{subject} is called as {call}, and cannot be: {error}") from None


def _describe_type(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
