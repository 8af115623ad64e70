"""The configuration that is saved with a run: without the secrets of URLs and commands, and readable again."""

from __future__ import annotations

from pathlib import Path

from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.run.weights.saved_model import read_config

SECRET = "s3cr3tVALUE"


def test_no_secret_is_saved(in_tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "data": {"train_urls": [f"https://me:{SECRET}@host/x.jsonl"]},
            "trainer": {
                "id": "run",
                "alerts": {"command": f"curl -H 'Authorization: Bearer {SECRET}' https://hooks.slack.com/{SECRET}"},
            },
        }
    )
    with RunDirectory(config.trainer, config, "run") as directory:
        assert SECRET in str(directory.config.model_dump()["trainer"]["alerts"]["command"])
    files = [path for path in in_tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if SECRET in path.read_text()] == []
    assert "Authorization: ***" in str(read_config(in_tmp_path / "checkpoints" / "run").trainer.alerts.command)


def test_the_same_command_goes_on_with_a_run_whose_secret_has_changed(in_tmp_path: Path) -> None:
    for secret in (SECRET, "another"):
        section = {"id": "run", "alerts": {"command": f"./notify --token {secret}"}}
        config = RunConfig.model_validate({"trainer": section})
        with RunDirectory(config.trainer, config, "run") as directory:
            assert directory.path.is_dir()
