"""Every key says whether it decides the numbers of a run, and that is what two attempts at a run are compared by."""

from __future__ import annotations

from typing import Any

import pytest

from lm_trainer.core.config import Config
from lm_trainer.core.result_keys import find_result_effect
from lm_trainer.data import DataConfig
from lm_trainer.run.config.run_config import RunConfig, config_hash, numeric_identity
from lm_trainer.run.config.trainer_config import TrainerConfig

MARKED: list[type[Config]] = [RunConfig, TrainerConfig, DataConfig]


@pytest.mark.parametrize(("config", "key"), [(config, key) for config in MARKED for key in config.model_fields])
def test_every_key_says_whether_it_decides_numbers(config: type[Config], key: str) -> None:
    assert find_result_effect(config, key) is not None, (
        f"{config.__name__}.{key} must be Numeric[...] or Operational[...]: may it change when a run is resumed?"
    )


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ({"trainer": {"seed": 1}}, True),
        ({"trainer": {"num_train_steps": 7}}, True),
        ({"trainer": {"steps_per_eval": 7}}, False),
        ({"trainer": {"log_dir": "elsewhere"}}, False),
        ({"trainer": {"jax_config": {"jax_default_matmul_precision": "highest"}}}, True),
        ({"trainer": {"jax_config": {"jax_num_cpu_devices": 4}}}, False),
        ({"trainer": {"axis_resources": {"mlp": "model"}}}, True),
        ({"trainer": {"axis_resources": {"mlp": "data"}}}, False),
        ({"data": {"cache_dir": "elsewhere"}}, False),
        ({"data": {"shuffle": False}}, True),
        ({"optimizer": {"type": "adam", "learning_rate": 0.5}}, True),
        ({"model": {"type": "gpt2", "num_layers": 3}}, True),
        ({"z_loss_weight": 1e-4}, True),
        ({"log_entropy": True}, False),
        ({"hf_save_path": "out"}, False),
    ],
)
def test_what_decides_numbers_makes_another_run(change: dict[str, Any], decides: bool) -> None:
    plain, changed = RunConfig(), RunConfig.model_validate(change)
    assert (numeric_identity(plain) != numeric_identity(changed)) == decides
    assert (config_hash(plain) != config_hash(changed)) == decides
