"""The Python interface of OLMo-core's `olmo_core.model_ladder`, called as its reference page has it.

Each row is one name of the page with its own argument names; it has the value that the page's formula gives, or is
refused with the name of what stands in its place.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer import ladder as api
from lm_trainer.core.errors import UserError
from lm_trainer.ladder import (
    DeviceMeshSpec,
    ModelConfigurator,
    ModelLadder,
    Olmo3ModelConfigurator,
    RunCheckpointInfo,
    RunConfigurator,
    TransformerModelConfigurator,
    TransformerSize,
    WSDSChinchillaRunConfigurator,
)
from lm_trainer.models import LlamaConfig
from lm_trainer.optim import AdamConfig, OptimizerConfig
from lm_trainer.profile.matmul import MatmulProbe

H100 = "NVIDIA H100 80GB HBM3"
SIZE = {"size_spec": "190M", "sequence_length": 8192, "device_type": H100}
VOCABULARY = 256 + 1
"""Bytes, and the token at the end of a document."""

# Of OLMo 3's 190M: 12 layers of four attention matrices, three of the MLP and four norms; a last norm; the head.
N = 12 * (4 * 768**2 + 3 * 768 * 3072 + 4 * 768) + 768 + VOCABULARY * 768
TARGET = round(2048 * 160 * (N / 108e6) ** (2 / 3))
RATE = 0.0047 * (N / 108e6) ** (-1 / 3) / 2
BATCH = 2**19
STEPS = {multiple: round(20 * N * multiple / BATCH) for multiple in (0.5, 1, 2)}
FIRST_DECAY = math.ceil(0.1 * STEPS[0.5])


def olmo(**changes: Any) -> ModelLadder:
    values: dict[str, Any] = {
        "name": "ladder",
        "dir": "ladders/olmo",
        "project": None,
        "sizes": ["190M", "1B"],
        "max_devices": 8,
        "device_type": H100,
        "model_configurator": Olmo3ModelConfigurator(rank_microbatch_size=None),
        "run_configurator": recipe(),
        "sequence_length": 8192,
        "tokenizer": "bytes",
        "seed": 42,
    }
    return ModelLadder(**{**values, **changes})


def recipe(**changes: Any) -> WSDSChinchillaRunConfigurator:
    defaults = {"decay_fraction": 0.1, "tokens_per_param": 20, "lr_multiplier": 1.0, "stepped_schedule": False}
    return WSDSChinchillaRunConfigurator(chinchilla_multiple=2, **{**defaults, **changes})


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


INFO = RunCheckpointInfo(name="1xC", step=2, tokens=8, path=Path("a/2"), metrics_path=None, exists=True)

ROWS: dict[str, tuple[Callable[[], Any], Any]] = {
    "name": (lambda: olmo().name, "ladder"),
    "dir": (lambda: olmo().dir, "ladders/olmo"),
    "project": (lambda: olmo().project, None),
    "sizes": (lambda: list(olmo().sizes), ["190M", "1B"]),
    "max_devices": (lambda: olmo().max_devices, 8),
    "device_type": (lambda: olmo().device_type, H100),
    "model_configurator": (lambda: olmo().model_configurator, Olmo3ModelConfigurator()),
    "run_configurator": (lambda: olmo().run_configurator, recipe()),
    "data_loader": (lambda: olmo(data_loader={"shuffle": False}).data_loader.shuffle, False),
    "instance_sources": (lambda: olmo(instance_sources=[{"train_urls": "a.txt"}]).instance_sources[0].weight, 1.0),
    "sequence_length": (lambda: ModelLadder.model_fields["sequence_length"].default, 8192),
    "tokenizer": (lambda: olmo().vocab_size(), VOCABULARY),
    "seed": (lambda: ModelLadder.model_fields["seed"].default, 42),
    "get_model_config": (lambda: olmo().get_model_config(size_spec="190M").spec(VOCABULARY).hidden_dim, 768),
    "get_num_params": (lambda: olmo().get_num_params(size_spec="190M"), N),
    "get_num_devices": (lambda: olmo().get_num_devices(size_spec="190M"), 8),
    "get_save_folder": (lambda: olmo().get_save_folder(size_spec="190M"), "ladders/olmo/190M"),
    "get_checkpoints": (
        lambda: [info.name for info in olmo().get_checkpoints("190M", False, False, None)][:2],
        ["period 1, 0.5xC pre-decay", "period 1, 0.5xC post-decay"],
    ),
    "get_metrics": (
        lambda: olmo().get_metrics(size_spec="190M", prefix=None, discover_all=False, alternative_dirs=None),
        None,
    ),
    "dry_run": (lambda: olmo().dry_run(size_spec="190M", show_plot=True, save_plot=None).num_params, N),
    "configure_model": (
        lambda: Olmo3ModelConfigurator().configure_model(**SIZE, tokenizer="bytes").seq_len,
        8192,
    ),
    "configure_rank_microbatch_size": (lambda: Olmo3ModelConfigurator().configure_rank_microbatch_size(**SIZE), 65_536),
    "configure_rank_microbatch_size of any transformer": (
        lambda: TransformerModelConfigurator(rank_microbatch_size=4096).configure_rank_microbatch_size(**SIZE),
        4096,
    ),
    "configure_minimal_device_mesh_spec": (
        lambda: TransformerModelConfigurator().configure_minimal_device_mesh_spec(**SIZE),
        DeviceMeshSpec(world_size=8, dp_world_size=None),
    ),
    "TransformerModelConfigurator": (lambda: TransformerModelConfigurator().rank_microbatch_size, None),
    "model_construction_kwargs": (
        lambda: (
            Olmo3ModelConfigurator().model_construction_kwargs,
            Olmo3ModelConfigurator(model_construction_kwargs={"num_layers": 3})
            .configure_model(**SIZE, tokenizer="bytes")
            .num_layers,
        ),
        ({}, 3),
    ),
    "configure_target_batch_size": (lambda: recipe().configure_target_batch_size(num_params=N), TARGET),
    "configure_duration": (lambda: recipe().configure_duration(num_params=N, batch_size=BATCH), STEPS[2] * BATCH),
    "configure_optimizer": (
        lambda: recipe().configure_optimizer(num_params=N, batch_size=BATCH).learning_rate,
        near(RATE),
    ),
    "lr_multiplier": (lambda: recipe(lr_multiplier=3.0).configure_optimizer(N, BATCH).learning_rate, near(3 * RATE)),
    "configure_lr_scheduler": (
        lambda: recipe().configure_lr_scheduler(num_params=N, batch_size=BATCH)(STEPS[0.5] - FIRST_DECAY),
        near(RATE),
    ),
    "stepped_schedule": (
        lambda: recipe(stepped_schedule=True).configure_lr_scheduler(N, BATCH)(STEPS[1]),
        near(RATE / math.sqrt(2)),
    ),
    "tokens_per_param": (lambda: recipe(tokens_per_param=40).configure_duration(N, BATCH) // BATCH, 2 * STEPS[2]),
    "configure_checkpoint_intervals": (
        lambda: recipe().configure_checkpoint_intervals(num_params=N, batch_size=BATCH)[:2],
        [
            ((STEPS[0.5] - FIRST_DECAY) * BATCH, "period 1, 0.5xC pre-decay"),
            (STEPS[0.5] * BATCH, "period 1, 0.5xC post-decay"),
        ],
    ),
    "decay_fraction": (
        lambda: recipe(decay_fraction=0.25).configure_checkpoint_intervals(N, BATCH)[0][0] // BATCH,
        STEPS[0.5] - math.ceil(0.25 * STEPS[0.5]),
    ),
    "plot_lr_schedule": (lambda: recipe().plot_lr_schedule(N, BATCH, show=True, save_path=None), None),
    "RunCheckpointInfo.path": (lambda: INFO.path, Path("a/2")),
    "RunCheckpointInfo.metrics_path": (lambda: INFO.metrics_path, None),
    "RunCheckpointInfo.display": (lambda: INFO.display().split(), ["✔", "1xC", "step", "2", "8", "tokens"]),
    "DeviceMeshSpec": (lambda: tuple(DeviceMeshSpec(world_size=4, dp_world_size=2)), (4, 2)),
    "TransformerSize": (lambda: TransformerSize("190M"), "190M"),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_gives_what_the_page_says(name: str) -> None:
    call, expected = ROWS[name]
    assert call() == expected


BUILD = {**SIZE, "rank_microbatch_size": 8192, "model_config": None, "optim_config": None, "scheduler": None}
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "build_train_module": (
        lambda: Olmo3ModelConfigurator().build_train_module(**BUILD),  # pyright: ignore[reportAttributeAccessIssue]
        AttributeError,
        r"no Olmo3ModelConfigurator.build_train_module: .*ModelLadder.run .*build_setup.*Trainer",
    ),
    "configure_model": (
        lambda: TransformerModelConfigurator().configure_model(**SIZE, tokenizer="bytes"),
        UserError,
        "write the model of each size there, or override configure_model",
    ),
    "chinchilla_multiple": (
        lambda: WSDSChinchillaRunConfigurator(chinchilla_multiple=3),
        ValidationError,
        "power of two .* the nearest is 4",
    ),
    "decay_fraction": (lambda: recipe(decay_fraction=0.05), ValidationError, "greater than or equal to 0.1"),
    "no size": (lambda: olmo(model_configurator=TransformerModelConfigurator()), ValidationError, "models is empty"),
    "size": (lambda: olmo().get_num_params("190m"), UserError, "did you mean 190M"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_use(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


def test_a_backend_is_refused() -> None:
    assert "JAX brings its own" in ModelLadder.refused_keys["backend"]
    with pytest.raises(ValidationError, match="backend"):
        olmo(backend="cpu:gloo,cuda:nccl")


def test_every_name_of_the_page_is_exported() -> None:
    classes = {ModelLadder, ModelConfigurator, RunConfigurator, RunCheckpointInfo, DeviceMeshSpec, TransformerSize}
    classes |= {WSDSChinchillaRunConfigurator, TransformerModelConfigurator, Olmo3ModelConfigurator}
    assert {cls.__name__ for cls in classes} <= set(api.__all__)
    assert issubclass(WSDSChinchillaRunConfigurator, RunConfigurator)
    assert issubclass(Olmo3ModelConfigurator, ModelConfigurator)


def test_arguments_stand_where_the_page_has_them() -> None:
    places = {
        "dry_run": ["size_spec", "show_plot", "save_plot"],
        "run": ["size_spec", "for_benchmarking"],
        "run_benchmark": ["size_spec"],
        "get_checkpoints": ["size_spec", "download_metrics", "discover_all", "alternative_dirs"],
        "get_metrics": ["size_spec", "prefix", "discover_all", "alternative_dirs"],
    }
    for name, expected in places.items():
        parameters = inspect.signature(getattr(ModelLadder, name)).parameters.values()
        by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert by_place == ["self", *expected], name


class OwnModels(ModelConfigurator):
    """Models as a subclass by the page has them."""

    def configure_model(self, *, size_spec: str, sequence_length: int, tokenizer: Any, device_type: str) -> LlamaConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert (tokenizer, device_type) == ("bytes", "cpu")
        width = 8 * int(size_spec)
        return LlamaConfig(
            seq_len=sequence_length,
            hidden_dim=width,
            intermediate_dim=2 * width,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            gradient_checkpointing=False,
        )


class OwnRuns(RunConfigurator):
    """Ten steps, whatever the size."""

    def configure_target_batch_size(self, num_params: int) -> int:
        return 64

    def configure_duration(self, num_params: int, batch_size: int) -> int:
        return 10 * batch_size

    def configure_optimizer(self, num_params: int, batch_size: int) -> OptimizerConfig:
        return AdamConfig(learning_rate=0.01)

    def configure_checkpoint_intervals(self, num_params: int, batch_size: int) -> list[tuple[int, str]]:
        return [(10 * batch_size, "end")]


@pytest.fixture
def custom(tmp_path: Path) -> ModelLadder:
    return ModelLadder(
        name="own",
        dir=tmp_path,  # pyright: ignore[reportArgumentType]
        sizes=["1"],  # pyright: ignore[reportArgumentType]
        max_devices=1,
        sequence_length=16,
        tokenizer="bytes",
        model_configurator=OwnModels(),  # pyright: ignore[reportArgumentType]
        run_configurator=OwnRuns(),  # pyright: ignore[reportArgumentType]
    )


def test_subclasses_of_ones_own(custom: ModelLadder) -> None:
    config = custom.run_config("1")
    assert (config.model.hidden_dim, config.optimizer.learning_rate) == (8, 0.01)  # pyright: ignore[reportAttributeAccessIssue]
    assert config.trainer.num_train_steps == 10
    assert [info.step for info in custom.get_checkpoints("1")] == [10]
    assert custom.dry_run("1", show_plot=False).tokens == 10 * custom.get_batch_size("1")


@pytest.mark.slow
@pytest.mark.parametrize("call", [lambda ladder: ladder.run("1", True), lambda ladder: ladder.run_benchmark("1")])
def test_a_benchmark_trains_nothing(
    call: Callable[[ModelLadder], dict], custom: ModelLadder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_trainer.ladder.running.MatmulProbe", functools.partial(MatmulProbe, size=64, products=3))
    report = call(custom)
    assert report["tokens_per_second"] > 0
    assert not Path(custom.get_save_folder("1")).exists()
