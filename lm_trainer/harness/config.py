"""Configuration of evaluation tasks."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config, LocalPath


class TaskConfig(BaseModel):
    """A task of lm-evaluation-harness, with additional settings."""

    # The settings of a task depend on the harness version, which checks them.
    model_config = ConfigDict(extra="allow", frozen=True)

    task: str
    """Name of the task, a group or a tag."""
    task_alias: str | None = None
    """Name under which its results are reported."""
    num_fewshot: NonNegativeInt | None = None
    """Examples in front of each question; null: as the task says."""

    def settings(self) -> dict[str, Any]:
        """The settings that override the task's."""
        return {key: value for key, value in self.model_dump(exclude={"task"}).items() if value is not None}


class HarnessConfig(Config):
    """Tasks of lm-evaluation-harness (`pip install "lm_trainer[eval]"`) that a model is asked while it trains."""

    task_spec: tuple[str | TaskConfig, ...] = Field(min_length=1)
    """Tasks, each a name such as `arc_easy`, or a mapping with `task`, perhaps `task_alias` and `num_fewshot`, and
    other settings of the task."""
    max_examples: PositiveInt | None = None
    """Ask at most so many questions of each task; null: all."""
    include_path: LocalPath | None = None
    """Directory with tasks of your own, as YAML files of the harness."""
    apply_chat_template: bool = False
    """Write questions in the chat template of the tokenizer."""
    fewshot_as_multiturn: bool = False
    """With a chat template, write the examples as earlier turns of the conversation."""
    log_samples: bool = False
    """Write every question with the model's answer to RUN_DIR/eval-harness."""
    bootstrap_iters: NonNegativeInt = 1000
    """Resamplings for the standard errors that have no closed formula."""
    max_eval_length: PositiveInt | None = None
    """Tokens that the model reads at most; null: its context."""
    confirm_run_unsafe_code: bool = False
    """Run the code that tasks such as humaneval make the model write."""

    @model_validator(mode="after")
    def _package_is_there(self) -> HarnessConfig:
        check_package()
        return self


def check_package() -> None:
    """Raises ValueError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('lm-evaluation-harness is not installed; run: pip install "lm_trainer[eval]"')


def quiet_bars() -> None:
    """Disables the progress bars of the harness, one for every step of every task.

    Call it before importing the harness: its progress bar package reads the environment once.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
