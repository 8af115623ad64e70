"""Rungs of a ladder: number of parameters, batch, name, directory and run configuration of each size."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from lm_trainer.core.files import local_path
from lm_trainer.data.tokenizer import tokenizer_config
from lm_trainer.data.tokenizer.hf import Pretrained, load_pretrained
from lm_trainer.ladder.batch import BatchShape, elastic_batch, olmo_batch
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.models.base import DecoderConfig
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.profile.flops import active_parameter_count, embedding_parameter_count
from lm_trainer.run.config.parametrization import StandardConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers.wandb import WandbConfig


def vocab_size_of(ladder: LadderConfig) -> int:
    """Returns the number of rows of the token embedding.

    Raises:
        UserError: if the tokenizer cannot be loaded.
    """
    config: Any = tokenizer_config(ladder.tokenizer)
    return _vocab_size(config)


@functools.cache
def _vocab_size(tokenizer: Any) -> int:
    # Cached, because every figure of every size needs it, and loading a tokenizer takes seconds.
    if isinstance(tokenizer, Pretrained):
        return load_pretrained(tokenizer).vocab_size
    return tokenizer.vocab_size


def model_config(ladder: LadderConfig, size_spec: str) -> DecoderConfig:
    """Returns the model configuration of a size."""
    return ladder.model_configurator.configure_model(
        size_spec=size_spec,
        sequence_length=ladder.sequence_length,
        tokenizer=ladder.tokenizer,
        device_type=ladder.device_type,
    )


def count_params(ladder: LadderConfig, size_spec: str, vocab_size: int | None = None) -> int:
    """Counts the parameters that a token uses, without the token embedding.

    As in OLMo-core, an untied output layer counts. Experts that the token did not choose do not.
    """
    return count_model_params(model_config(ladder, size_spec), vocab_size or vocab_size_of(ladder))


def count_model_params(model: DecoderConfig, vocab_size: int) -> int:
    """Counts the parameters of a model like `count_params`."""
    spec = model.spec(vocab_size)
    return active_parameter_count(spec) - embedding_parameter_count(spec)


def batch_shape(
    ladder: LadderConfig, size_spec: str, *, vocab_size: int | None = None, compat: Literal["olmo"] | None = None
) -> BatchShape:
    """Returns the batch of a size. With `compat="olmo"`, as in OLMo-core, and raises the errors of `olmo_batch`."""
    num_params = count_params(ladder, size_spec, vocab_size)
    return olmo_batch(ladder, size_spec, num_params) if compat == "olmo" else elastic_batch(ladder, num_params)


def run_name(ladder: LadderConfig, size_spec: str, seed: int | None = None) -> str:
    """Returns the name of a run: the size, followed by the seed unless it is the first seed."""
    ladder.model_configurator.check(size_spec)
    return size_spec if seed in (None, ladder.seed) else f"{size_spec}-seed{seed}"


def run_folder(ladder: LadderConfig, size_spec: str, seed: int | None = None) -> Path:
    """Returns the directory of a run."""
    return local_path(ladder.dir) / run_name(ladder, size_spec, seed)


def run_config(
    ladder: LadderConfig, size_spec: str, seed: int | None = None, vocab_size: int | None = None
) -> RunConfig:
    """Returns the configuration of a run, which `lmt train` could run as well."""
    num_params = count_params(ladder, size_spec, vocab_size)
    batch, _, shards, devices = elastic_batch(ladder, num_params)
    recipe, folder = ladder.run_configurator, run_folder(ladder, size_spec, seed)
    steps = [tokens // batch for tokens, _ in recipe.configure_checkpoint_intervals(num_params, batch)]
    rank = ladder.model_configurator.rank_microbatch_size
    checkpointer = {
        **ladder.trainer.checkpointer.model_dump(mode="json", include=ladder.trainer.checkpointer.changed_fields),
        "base_path": str(folder / "checkpoints"),
        "append_run_id_to_base_path": False,
        # Rounding may put two checkpoints of a short run on the same step.
        "keep": [{"every": step, "until": step} for step in dict.fromkeys(steps)],
    }
    trainer = {
        **ladder.trainer.model_dump(mode="json", include=ladder.trainer.changed_fields),
        "id": folder.name,
        "log_dir": str(folder.parent),
        "seed": ladder.seed if seed is None else seed,
        "num_train_steps": steps[-1],
        "train_batch_size": batch // ladder.sequence_length,
        "elastic_shards": shards,
        "max_devices": devices,
        "per_device_parallelism": -1 if rank is None else rank // ladder.sequence_length,
        "steps_per_eval": list(dict.fromkeys(steps)),
        "checkpointer": checkpointer,
        "tracker": [_with_ladder_group(ladder, tracker).model_dump(mode="json") for tracker in ladder.trainer.trackers],
    }
    tasks: dict[str, Any] = {}
    if ladder.eval_harness is not None:
        tasks = {"eval_harness": ladder.eval_harness.model_dump(mode="json")}
        tasks["eval_harness_steps"] = trainer["steps_per_eval"]
    return RunConfig.model_validate(
        {
            **tasks,
            "model": model_config(ladder, size_spec).model_dump(mode="json"),
            "data": ladder.data_config().model_dump(mode="json"),
            "trainer": trainer,
            "optimizer": rung_optimizer(ladder, size_spec, batch, vocab_size).model_dump(mode="json"),
            "parametrization": ladder.parametrization.model_dump(mode="json"),
        }
    )


def rung_optimizer(ladder: LadderConfig, size_spec: str, batch: int, vocab_size: int | None = None) -> OptimizerConfig:
    """Returns the optimizer of a size with a batch in tokens. If hyperparameters are transferred, its peak learning
    rate is the rate of the base, or the rate of a law of tokens.
    """
    recipe = ladder.run_configurator
    optimizer = recipe.configure_optimizer(count_params(ladder, size_spec, vocab_size), batch)
    if isinstance(ladder.parametrization, StandardConfig) or not recipe.rate_follows_from_size:
        return optimizer
    base = ladder.parametrization.base_model(model_config(ladder, size_spec))
    base_params = count_model_params(base, vocab_size or vocab_size_of(ladder))
    base_optimizer = recipe.configure_optimizer(base_params, elastic_batch(ladder, base_params).batch_size)
    return optimizer.model_copy(update={"learning_rate": base_optimizer.learning_rate})


def _with_ladder_group(ladder: LadderConfig, tracker: Any) -> Any:
    """Puts all runs of a ladder into one project and group, unless the user set them."""
    if not isinstance(tracker, WandbConfig):
        return tracker
    user_keys = tracker.changed_fields
    project = {} if "project" in user_keys else {"project": ladder.project or ladder.name}
    return tracker.model_copy(update={**project, **({} if "group" in user_keys else {"group": ladder.name})})
