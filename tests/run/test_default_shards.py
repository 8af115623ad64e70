"""The default number of microbatches: a function of the batch, not of the devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.run.build.startup_notes import configuration_warnings
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import RunConfig, config_hash, numeric_differences, numeric_identity
from lm_trainer.run.files.directory import RunDirectory

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def config_of(seq_len: int = 1024, model: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return RunConfig.model_validate({"model": model or {"type": "llama", "seq_len": seq_len}, "trainer": trainer})


def counts(config: RunConfig) -> list[int]:
    return [plan.count for plan in config.trainer.step_plan.microbatches.values]


@pytest.mark.parametrize(
    ("rows", "seq_len", "count"),
    [
        (4, 256, 1),  # 1,024 tokens are too few to share
        (7, 256, 1),
        (8, 256, 8),
        (64, 1024, 8),
        (90, 1024, 2),  # 11 in theory, and 2 is the largest power of two that divides 90
        (128, 1024, 16),
        (512, 1024, 64),  # half a million tokens
        (480, 1024, 32),
        (2048, 2048, 512),  # four million
        (4, 131_072, 4),  # at most one for each row
    ],
)
def test_a_microbatch_has_about_8192_tokens(rows: int, seq_len: int, count: int) -> None:
    config = config_of(seq_len, train_batch_size=rows)
    assert counts(config) == [count]
    assert config.trainer.elastic_shards == count
    assert config.trainer.step_plan.max_devices == count
    config.trainer.step_plan.check_device_count(count)
    plural = "" if count == 1 else "es"
    with pytest.raises(UserError, match=f"cannot share {count} microbatch{plural} of"):
        config.trainer.step_plan.check_device_count(2 * count)


def test_shipped_configurations_have_eight() -> None:
    nano = {
        path.name: load(path, [], RunConfig).config
        for path in sorted(CONFIGS.glob("*_nano.yaml"))
        if "ladder" not in path.name
    }
    assert len(nano) > 15
    assert {name: counts(config) for name, config in nano.items()} == {name: [8] for name in nano}


def test_frames_of_audio_count_as_tokens() -> None:
    whisper = {"type": "whisper", "seq_len": 448, "num_frames": 3000}
    data = {"source": {"type": "morse"}, "format": {"type": "audio"}}
    config = RunConfig.model_validate({"model": whisper, "data": data, "trainer": {"train_batch_size": 64}})
    assert counts(config) == [32]


def test_the_smallest_batch_of_a_schedule_decides() -> None:
    schedule = [{"start": 0, "value": 64}, {"start": 100, "value": 1024}]
    assert counts(config_of(train_batch_size=schedule)) == [8, 8]
    assert config_of(train_batch_size=schedule).trainer.step_plan.max_devices == 8


def test_keys_that_are_set_win() -> None:
    assert counts(config_of(train_batch_size=512, elastic_shards=8)) == [8]
    assert counts(config_of(256, train_batch_size=4, elastic_shards=4)) == [4]
    assert counts(config_of(train_batch_size=512, per_device_parallelism=2)) == [256]
    assert config_of(train_batch_size=512, context_axis_size=4, elastic_shards=8).trainer.step_plan.max_devices == 32


def test_a_batch_that_is_padded_has_no_more_microbatches_than_rows() -> None:
    config = config_of(131_072, train_batch_size=5, allow_nondivisible_batch_size=True)
    (plan,) = config.trainer.step_plan.microbatches.values
    assert (plan.count, plan.rows) == (4, 2)


def test_the_trainer_section_is_left_as_it_was() -> None:
    shared = config_of(train_batch_size=512).trainer
    before = shared.elastic_shards
    longer = RunConfig(model=config_of(4096).model, trainer=shared)
    assert (before, shared.elastic_shards, longer.trainer.elastic_shards) == (64, 64, 256)
    assert "elastic_shards" not in longer.trainer.model_fields_set


def test_only_a_batch_that_does_not_divide_is_a_warning() -> None:
    import jax

    def warnings(config: RunConfig) -> list[str]:
        mesh = config.trainer.step_plan.mesh(jax.devices()[:1])
        return [note for note in configuration_warnings(config.trainer, mesh) if "elastic_shards" in note]

    assert warnings(config_of(train_batch_size=512)) == warnings(config_of(256, train_batch_size=4)) == []
    (note,) = warnings(config_of(train_batch_size=12))
    assert note.startswith("trainer.elastic_shards is 4, the largest power of two that divides every batch")


class TestRunsBegunBefore:
    """Runs from the time when the default was 8 for every batch continue with 8."""

    BATCH: dict[str, Any] = {"id": "run", "train_batch_size": 512}

    def begin(self) -> None:
        config = config_of(**self.BATCH, elastic_shards=8)
        with RunDirectory(config.trainer, config, "run"):
            pass

    def resume(self, **trainer: Any) -> RunConfig:
        config = config_of(**{**self.BATCH, **trainer})
        directory: Any = RunDirectory(config.trainer, config, "run")
        directory.restore_recorded_keys()
        with directory:
            return directory.config

    def test_it_continues_with_its_microbatches(self, in_tmp_path: Path) -> None:
        self.begin()
        assert counts(self.resume()) == [8]
        identity = json.loads((in_tmp_path / "logs/run/run.json").read_text())["identity"]
        assert identity["trainer"]["elastic_shards"] == 8
        with pytest.raises(UserError, match="elastic_shards: was 8, now 64"):
            self.resume(elastic_shards=64)

    def test_the_recorded_configuration_has_the_number(self, in_tmp_path: Path) -> None:
        self.resume()
        recorded = yaml.safe_load((in_tmp_path / "logs/run/config.yaml").read_text())
        assert recorded["trainer"]["elastic_shards"] == 64

    def test_its_name_is_found(self) -> None:
        # The name of a run without an ID has the hash of its configuration.
        assert config_hash(config_of(train_batch_size=512)) == config_hash(
            config_of(train_batch_size=512, elastic_shards=8)
        )
        assert config_hash(config_of(train_batch_size=512, elastic_shards=64)) != config_hash(
            config_of(train_batch_size=512)
        )

    def test_another_batch_is_still_a_change(self) -> None:
        recorded = numeric_identity(config_of(train_batch_size=512, elastic_shards=8))
        config = config_with_recorded_keys(config_of(train_batch_size=500), recorded)
        changes = numeric_differences(recorded, numeric_identity(config), config)
        assert any("trainer.train_batch_size: was 512, now 500" in line for line in changes)
