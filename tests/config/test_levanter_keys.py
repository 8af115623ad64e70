"""Other spellings in configurations of Levanter, and keys that have no effect."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.config import parse_duration
from lm_trainer.core.errors import ConfigError
from lm_trainer.data.config import SetConfig
from lm_trainer.nn.linear import ACTIVATIONS
from lm_trainer.parallel.mesh import BATCH_AXES, build_mesh
from lm_trainer.run.build.startup_notes import configuration_warnings
from lm_trainer.run.config.run_config import RunConfig, numeric_identity


def read(directory: Path, text: str, *overrides: str) -> RunConfig:
    (directory / "theirs.yaml").write_text(text + "\n")
    return load(directory / "theirs.yaml", overrides, RunConfig).config


@pytest.mark.parametrize(
    ("levanter_text", "our_text"),
    [
        ("model: {activation_function: swish}", "model: {activation_function: silu}"),
        ("model: {type: llama, activation_function: gelu_fast}", "model: {type: llama, activation_function: gelu_new}"),
        ("model: {attn_backend: vanilla}", "model: {attn_backend: xla}"),
        ("model: {attn_backend: jax_flash}", "model: {attn_backend: xla}"),
        ("model: {attn_backend: nvte}", "model: {attn_backend: cudnn}"),
        ("model: {attn_backend: default}", "model: {attn_backend: auto}"),
        (
            "model: {gradient_checkpointing: {offload_block_internals: true}}",
            "model: {gradient_checkpointing: {offload_block_internals: [attention, mlp]}}",
        ),
        ("trainer: {quantization: {fp8: true}}", "trainer: {quantization: {type: fp8}}"),
        ("trainer: {quantization: {fp8: true, targets: mlp}}", "trainer: {quantization: {type: fp8, targets: mlp}}"),
    ],
)
def test_other_spellings_mean_the_same(levanter_text: str, our_text: str, tmp_path: Path) -> None:
    assert numeric_identity(read(tmp_path, levanter_text)) == numeric_identity(read(tmp_path, our_text))


class TestFp8OnTheCommandLine:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["trainer.quantization.fp8=true"],
            ["--trainer.quantization.fp8=true"],
            ["--trainer.quantization.fp8", "true"],
        ],
    )
    @pytest.mark.parametrize("file", ["{}", "trainer: {quantization: {type: int8}}"])
    def test_it_is_that_of_a_file(self, file: str, arguments: list[str], tmp_path: Path) -> None:
        written = read(tmp_path, "trainer: {quantization: {fp8: true}}")
        assert read(tmp_path, file, *arguments) == written
        loaded = load(tmp_path / "theirs.yaml", arguments, RunConfig)
        assert loaded.origin("trainer.quantization.type") == f"override `{' '.join(arguments)}`"

    @pytest.mark.parametrize("reverse", [False, True])
    def test_other_keys_of_the_block_are_kept_whatever_the_order(self, reverse: bool, tmp_path: Path) -> None:
        arguments = ["trainer.quantization.fp8=true", "trainer.quantization.targets=mlp"]
        (tmp_path / "theirs.yaml").write_text("{}\n")
        loaded = load(tmp_path / "theirs.yaml", arguments[::-1] if reverse else arguments, RunConfig)
        assert loaded.config == read(tmp_path, "trainer: {quantization: {fp8: true, targets: mlp}}")
        assert loaded.notes == ()

    def test_false_is_refused_as_in_a_file(self, tmp_path: Path) -> None:
        for arguments in (["trainer: {quantization: {fp8: false}}"], ["{}", "trainer.quantization.fp8=false"]):
            with pytest.raises(ConfigError, match=r"quantization\.fp8: unknown key"):
                read(tmp_path, *arguments)


@pytest.mark.parametrize("name", ["quick_gelu", "tanh", "gelu_new", "silu"])
def test_activations_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers.activations import ACT2FN

    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    expected = ACT2FN[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, atol=2e-6)  # pyright: ignore[reportArgumentType]


def test_nested_layers_are_a_loop_unless_told_otherwise(tmp_path: Path) -> None:
    model = read(tmp_path, "model: {gradient_checkpointing: nested, num_layers: 4}").model
    assert model.scan
    assert model.remat_groups == 2
    with pytest.raises(ConfigError, match="nested layers must run as a loop"):
        read(tmp_path, "model: {gradient_checkpointing: nested, num_layers: 4, scan_layers: false}")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("172 hr", timedelta(hours=172)),
        ("1w2d", timedelta(days=9)),
        ("2w", timedelta(days=14)),
        ("1 h 30 m", timedelta(minutes=90)),
        ("1h30m", timedelta(minutes=90)),
        ("0.5 h", timedelta(minutes=30)),
    ],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["12 r", "r", "1 hrr", "15 fortnights", "1 2 m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


class TestRulesWithoutEffect:
    @pytest.mark.parametrize(
        ("settings", "note"),
        [
            (
                "tensor_parallel_axes: [mlp, heads]",
                "tensor_parallel_axes has no effect while trainer.model_axis_size is 1",
            ),
            ("axis_resources: {token: data}", "rules for the axes token have no effect"),
            ("axis_resources: {batch: data}", "rules for the axes batch have no effect"),
        ],
    )
    def test_they_are_taken_with_a_note(self, settings: str, note: str, tmp_path: Path) -> None:
        trainer = read(tmp_path, f"trainer: {{{settings}}}").trainer
        plan = trainer.step_plan
        assert plan.compute_rules["batch"] == BATCH_AXES
        assert not any("model" in over for over in plan.compute_rules.values())
        mesh = build_mesh(plan.mesh_shape, jax.devices()[:1])
        (warning,) = configuration_warnings(trainer, mesh)
        assert note in warning

    def test_over_several_devices_they_have_one(self, tmp_path: Path) -> None:
        trainer = read(tmp_path, "trainer: {tensor_parallel_axes: [mlp], model_axis_size: 2}").trainer
        assert trainer.step_plan.compute_rules["mlp"] == ("model",)


def mixture(*names: str) -> str:
    sets = ", ".join(f"{name}: {{train_urls: [{index}.txt]}}" for index, name in enumerate(names))
    weights = ", ".join(f"{name}: 1" for name in names)
    return f"data: {{configs: {{{sets}}}, train_weights: {{{weights}}}}}"


def test_names_of_sets_may_have_directories(tmp_path: Path) -> None:
    assert list(read(tmp_path, mixture("paloma/4chan", "paloma/c4_en", "token")).data.configs) == [
        "paloma/4chan",
        "paloma/c4_en",
        "token",
    ]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("paloma", "paloma/c4"), "the cache of 'paloma/c4' would lie inside that of 'paloma'"),
        (("../c4",), "a set cannot be called '../c4'"),
        (("paloma//c4",), "a set cannot be called 'paloma//c4'"),
        (("/c4",), "a set cannot be called '/c4'"),
        (("c4/",), "a set cannot be called 'c4/'"),
    ],
)
def test_names_that_make_no_directory_of_their_own(names: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, mixture(*names))


@pytest.mark.parametrize(
    ("batch", "shards"),
    [("32", 8), ("12", 4), ("30", 2), ("15", 1), ("[{start: 0, value: 64}, {start: 9, value: 36}]", 4)],
)
def test_a_batch_is_cut_into_a_power_of_two_of_microbatches(batch: str, shards: int, tmp_path: Path) -> None:
    config = read(tmp_path, f"trainer: {{train_batch_size: {batch}}}")
    assert config.trainer.step_plan.microbatches.at(0).count == shards
    mesh = build_mesh(config.trainer.step_plan.mesh_shape, jax.devices()[:1])
    notes = list(configuration_warnings(config.trainer, mesh))
    assert [f"elastic_shards is {shards}" in note for note in notes] == [True] * (shards != 8)
    # Written out in full, as every run keeps it, it means the same.
    assert numeric_identity(RunConfig.model_validate(config.model_dump(mode="json"))) == numeric_identity(config)


URLS = "train_urls: [a.jsonl], validation_urls: [b.jsonl]"
HUB = "id: org/set, name: en, stream: false"


class TestSourceOnTheCommandLine:
    @pytest.mark.parametrize(
        ("text", "overrides", "equivalent", "note"),
        [
            (URLS, ["data.id=org/set"], "id: org/set", "data.train_urls, data.validation_urls"),
            (
                URLS,
                ["--data.id", "org/set", "data.name=en"],
                "id: org/set, name: en",
                "data.train_urls, data.validation_urls",
            ),
            (HUB, ["data.train_urls=[a.jsonl]"], "train_urls: [a.jsonl]", "data.id, data.name, data.stream"),
            (HUB, ["data.validation_urls=b.jsonl", "data.train_urls=a.jsonl"], URLS, "data.id, data.name, data.stream"),
            (URLS, ["data.id=null"], URLS, None),
            (HUB, ["data.id=org/other"], "id: org/other, name: en, stream: false", None),
        ],
    )
    def test_it_takes_the_place_of_the_files(
        self, text: str, overrides: list[str], equivalent: str, note: str | None, tmp_path: Path
    ) -> None:
        path = tmp_path / "theirs.yaml"
        path.write_text(f"data: {{{text}}}")
        loaded = load(path, overrides, RunConfig)
        assert loaded.config == read(tmp_path, f"data: {{{equivalent}}}")
        notes = [note_text for note_text in loaded.notes if "takes the place of" in note_text]
        assert [note_text.partition(" takes the place of ")[2] for note_text in notes] == (
            [f"{note} of the file"] if note else []
        )

    def test_it_holds_for_each_set(self, tmp_path: Path) -> None:
        path = tmp_path / "theirs.yaml"
        path.write_text(mixture("wiki", "code"))
        loaded = load(path, ["data.configs.code.id=org/set"], RunConfig)
        assert loaded.config.data.configs["code"] == SetConfig(id="org/set")
        assert loaded.config.data.configs["wiki"].train_urls == ["0.txt"]

    @pytest.mark.parametrize(
        ("text", "overrides"),
        [
            (f"{URLS}, {HUB}", []),
            (URLS, ["data.id=org/set", "data.train_urls=c.jsonl"]),
            (URLS, ["data.train_urls=c.jsonl", "data.id=org/set"]),
        ],
    )
    def test_both_in_one_place_are_an_error(self, text: str, overrides: list[str], tmp_path: Path) -> None:
        path = tmp_path / "theirs.yaml"
        path.write_text(f"data: {{{text}}}")
        with pytest.raises(ConfigError, match="id names a data set of the hub; remove it"):
            load(path, overrides, RunConfig)


@pytest.mark.parametrize("first", ["wandb", "tracker"])
def test_wandb_takes_the_place_of_a_tracker(first: str, tmp_path: Path) -> None:
    blocks = {"tracker": "tracker: {type: wandb, project: p, tags: [a]}", "wandb": "wandb: {project: q, name: n}"}
    other = blocks[({*blocks} - {first}).pop()]
    (tmp_path / "both.yaml").write_text(f"trainer:\n  {blocks[first]}\n  {other}\n")
    loaded = load(tmp_path / "both.yaml", [], RunConfig)
    assert loaded.config == read(tmp_path, "trainer: {tracker: {type: wandb, project: q, name: n}}")
    (note,) = loaded.notes
    assert note.endswith("trainer.wandb is read as tracker, in the place of the tracker beside it, which has no effect")
    assert loaded.origin("trainer.tracker.project").endswith(":2:20" if first == "wandb" else ":3:20")
    # A wandb that is unset says nothing.
    (tmp_path / "both.yaml").write_text(f"trainer:\n  {blocks['tracker']}\n  wandb: null\n")
    assert load(tmp_path / "both.yaml", [], RunConfig).config.trainer.trackers[0].project == "p"


def test_a_batch_is_no_multiple_of_the_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1:29: trainer\.train_batch_size: -1 would be .* with 4 and 8 of them, 32"):
        read(tmp_path, "trainer: {train_batch_size: -1, per_device_parallelism: 4}")
    trainer = read(tmp_path, "trainer: {train_batch_size: 32, per_device_parallelism: 4}").trainer
    assert trainer.step_plan.microbatches.at(0).count == 8
