"""A small configuration with every construction that the real one has, so that these tests need no JAX."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from lm_trainer.config.imports.translate import explain_foreign_flag
from lm_trainer.config.loader import LoadedConfig, load
from lm_trainer.core.config import Config, Duration, IgnoredKey, Name
from lm_trainer.core.errors import ConfigError


class SmallModel(Config):
    type: Literal["small"] = "small"
    hidden_dim: int = 64
    num_heads: int = 4
    num_layers: PositiveInt = 2
    checkpointing: bool | Literal["full", "dots"] = True

    @model_validator(mode="after")
    def _heads_divide(self) -> "SmallModel":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim ({self.hidden_dim}) must be a multiple of num_heads ({self.num_heads})")
        return self


class WideModel(Config):
    type: Literal["wide"] = "wide"
    hidden_dim: int = 512
    rope_theta: float = 1e4


class Board(Config):
    type: Literal["board"] = "board"
    logdir: str | None = None


class Cloud(Config):
    type: Literal["cloud"] = "cloud"
    project: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: list[str] = []


AnyTracker = Annotated[Cloud | Board, Field(discriminator="type")]


class Keep(Config):
    every: PositiveInt
    until: int | None = None


class Checkpointer(Config):
    save_interval: Duration = timedelta(minutes=15)
    keep: tuple[Keep, ...] = (Keep(every=10),)

    @model_validator(mode="after")
    def _ordered(self) -> "Checkpointer":
        if any(entry.until is None for entry in self.keep[:-1]):
            raise ValueError("keep: only the last entry may lack `until`")
        return self


class Trainer(Config):
    refused_keys: ClassVar[Mapping[str, str]] = {
        "wandb": "use `tracker`",
        "auth_token": "not needed",
        "eager": "everything is compiled",
    }
    renamed_keys: ClassVar[Mapping[str, str]] = {"boards": "tracker", "steps": "num_train_steps"}
    ignored_keys: ClassVar[Mapping[str, IgnoredKey]] = {
        "tuning": IgnoredKey("nothing needs tuning"),
        "eager": IgnoredKey("everything is compiled", (False,)),
    }

    seed: int = 0
    id: str | None = None
    num_train_steps: PositiveInt = 10
    train_batch_size: int = 8
    crash_on_nan: bool = True
    tracker: AnyTracker | tuple[AnyTracker, ...] = Board()
    checkpointer: Checkpointer = Checkpointer()
    jax_config: dict[str, str | int | float | bool | None] = {}
    rules: dict[Name, str] = {}
    stages: list[tuple[int, dict[str, float]]] = []
    sets: dict[str, Keep] = {}

    @field_validator("rules")
    @classmethod
    def _rules_name_an_axis(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value.keys() - {"batch", "embed", "token"}:
            raise ValueError(f"rules: no axis {key!r}; there are batch, embed and token")
        return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class TrainedTokenizer(Config):
    type: Literal["trained"] = "trained"
    vocab_size: int = 256


class NamedTokenizer(Config):
    type: Literal["named"] = "named"
    name: str


class Data(Config):
    train_urls: Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])] = []
    validation_urls: list[str] = []
    tokenizer: str | Annotated[TrainedTokenizer | NamedTokenizer, Field(discriminator="type")] | None = None
    sample_tokens: int = 16


class Adam(Config):
    type: Literal["adam"] = "adam"
    learning_rate: float = Field(default=1e-4, gt=0)
    """The peak."""
    warmup: int | float = 0.01


class Run(Config):
    """The configuration that these tests load."""

    model: Annotated[SmallModel | WideModel, Field(discriminator="type")] = SmallModel()
    trainer: Trainer = Trainer()
    data: Data = Data()
    optimizer: Adam = Adam()


OPTIONS = ("--dry-run", "--help")


class Files:
    """Configuration files in the working directory of a test, and what comes of loading them."""

    def __init__(self, directory: Path):
        self.directory = directory

    def write(self, text: str, name: str = "run.yaml") -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).removeprefix("\n"), encoding="utf-8")
        return Path(name)

    def load(self, text: str, *overrides: str) -> LoadedConfig[Any]:
        return load(self.write(text), overrides, Run, options=OPTIONS, foreign=explain_foreign_flag)

    def problems(self, text: str, *overrides: str) -> list[str]:
        """Lists the problems of a file; the file's name is left out of the positions."""
        self.write(text)
        return self.problems_of("run.yaml", *overrides)

    def problems_of(self, name: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(Path(name), overrides, Run, options=OPTIONS, foreign=explain_foreign_flag)
        return [problem.removeprefix("run.yaml:").removeprefix(" ") for problem in caught.value.problems]
