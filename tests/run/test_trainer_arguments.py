"""Wrong arguments of a `Trainer`, refused when they are given, and a loss of one's own over a decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.sources.in_memory import InMemory
from lm_trainer.models import Gpt2Config
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import next_token_loss
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.step.loss.gradient import loss_and_gradient
from lm_trainer.step.state.model_def import ModelDef
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, batch, loss, settings


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(settings(), OPTIMIZER, loss)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((RunConfig(), OPTIMIZER, loss), "must be a TrainerConfig, not RunConfig, whose field `trainer` it is"),
        ((settings(), optax.adam(0.1), loss), "from_optax"),
        ((settings(), OPTIMIZER, 3), "the loss must be a function, called as loss.model, batch, key., not int"),
        (
            (settings(), OPTIMIZER, lambda model: model),
            "is called as loss.model, batch, key., and cannot be: too many",
        ),
    ],
    ids=["section", "optimizer", "no function", "other arguments"],
)
def test_what_a_trainer_is_made_of(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Trainer(*arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda t: t.add_eval_hook({"a": Numbered()}),
            r"takes a held-out set.*not dict; .*data.validation\(\).items\(\)",
        ),
        (lambda t: t.add_eval_hook([batch(0)]), "takes a held-out set, which has a method `batches`, not list$"),
        (lambda t: t.add_eval_hook(Numbered(), 3), "the name must be a text, not int"),
        (lambda t: (t.add_eval_hook(Numbered()), t.add_eval_hook(Numbered())), "a held-out set without a name already"),
        (lambda t: (t.add_eval_hook(Numbered(), "a"), t.add_eval_hook(Numbered(), "a")), "held-out set 'a' already"),
        (lambda t: t.add_hook(3), "the hook must be a function, called as hook.info., not int"),
        (lambda t: t.add_hook(lambda: None), "the hook is called as hook.info., and cannot be"),
        (lambda t: t.add_hook(every=2)("name"), "the hook must be a function"),
        (lambda t: t.data_loader(3), "takes a dataset with a method `train`"),
        (lambda t: t.data_loader(nnx.BatchNorm(2, rngs=nnx.Rngs(0))), "method `train` is called as train.schedule"),
        (lambda t: t.initial_state(model=Bigrams), "not the class Bigrams; a class or function .* is model_init="),
        (lambda t: t.initial_state(model_init=Bigrams()), "give one that is there already as model="),
        (lambda t: t.initial_state(model_init=3), "model_init must be a function"),
        (lambda t: t.train(3, []), "must be a TrainState, as initial_state returns it, not int"),
        (lambda t: t.train_step(3, batch(0)), "must be a TrainState"),
    ],
)
def test_what_it_is_given_later(trainer: Trainer, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call(trainer)


@pytest.mark.parametrize("every", [0, -1, "10", [3, 0], [1.5]], ids=repr)
def test_when_a_hook_is_called(trainer: Trainer, every: Any) -> None:
    with pytest.raises(ValueError, match="expected a positive number of steps, or a list of steps"):
        trainer.add_hook(print, every=every)


def test_data_are_no_held_out_set_but_have_them(trainer: Trainer) -> None:
    texts = InMemory(train=["one two three " * 20], validation=["four five six " * 9])
    data = open_data(DataConfig(source=texts, tokenizer="bytes"), seq_len=8, seed=0)
    with pytest.raises(UserError, match=r"not Data; .*for name, held_out in data.validation\(\).items\(\)"):
        trainer.add_eval_hook(data)  # pyright: ignore[reportArgumentType]
    for name, held_out in data.validation().items():
        trainer.add_eval_hook(held_out, name)
    data.close()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: x.sum(), "it returned one value; a mean becomes two sums"),
        (lambda x: (x.sum(), x.sum()), "it returned 2 values, as tuple"),
        (lambda x: (x, x.sum(), {}), r"the first two have the shapes \(7,\) and \(\), and are to be scalars"),
        (lambda x: (x.sum(), x.sum(), x.sum()), "it returned 3 values"),
    ],
)
def test_what_a_loss_returns(result: Callable[[jax.Array], Any], words: str) -> None:
    model = ModelDef.trace(Bigrams, lambda _: True)
    step = loss_and_gradient(model, lambda model, *_: result(model.bias[...]), model.trainable)
    with pytest.raises(UserError, match=f"the loss must return .*{words}"):
        jax.eval_shape(step, model.shapes, batch(0), jax.random.key(0))


@pytest.mark.slow
def test_a_loss_over_a_decoder_as_the_page_calls_it() -> None:
    """The calls of the page agree with one another and with the usual loss."""
    config = Gpt2Config(hidden_dim=16, num_heads=2, num_layers=1, seq_len=16)
    model: Any = config.build(32, rngs=nnx.Rngs(0))
    rows = random_batch(2, 16, 32)
    h, routers = model.batch_hidden_and_stats(rows, dtype=jnp.float32, key=None)
    logits = model.logits(h)
    assert routers is None
    assert (h.shape, logits.shape) == ((2, 16, 16), (2, 16, 32))
    np.testing.assert_array_equal(logits, model(rows.tokens, rows.positions, rows.segments))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    total, weight, _ = next_token_loss(jnp.float32)(model, rows, None)
    np.testing.assert_allclose(jnp.sum(nll * rows.weights), total, rtol=1e-5)
    assert float(weight) == rows.weights.sum()
