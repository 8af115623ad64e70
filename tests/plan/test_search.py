"""`lmt plan --search`: the layouts it considers, and the one it calls the fastest."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.plan import Assumptions, Search, parse_devices, search_layouts
from lm_trainer.plan.devices import memory_budget
from lm_trainer.plan.estimate import Traces, estimate_step, estimate_temporary
from lm_trainer.plan.layouts import Layout, enumerate_layouts
from lm_trainer.plan.memory import StepMemory
from lm_trainer.plan.search import CompiledLayout
from lm_trainer.plan.search_table import search_lines
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.step.dispatch.memory import PhaseBytes
from lm_trainer.step.state.model_def import ModelDef
from tests.conftest import RunLmt

CONFIG = """
model: {type: llama, seq_len: 256, hidden_dim: 128, intermediate_dim: 256, num_layers: 4, num_heads: 4, num_kv_heads: 2,
        attn_backend: auto}
data: {tokenizer: bytes}
trainer: {train_batch_size: 16, num_train_steps: 10, mp: "p=f32,c=bfloat16"}
"""
MIXTRAL = {"type": "mixtral", "seq_len": 64, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 2,
           "num_kv_heads": 2, "n_routed_experts": 4}  # fmt: skip
SMALL_BATCH = 4
"""A batch of few layouts: where none fits, a search estimates the memory of all."""


@pytest.fixture
def path(in_tmp_path: Path) -> Path:
    file = in_tmp_path / "small.yaml"
    file.write_text(CONFIG)
    return file


@functools.cache
def searched(devices: str = "4xH100", memory: int | None = None, batch_size: int = 16) -> Search:
    """The search for the small run, once for all tests that look at it."""
    plain = yaml.safe_load(CONFIG)
    plain["trainer"]["train_batch_size"] = batch_size
    config = RunConfig.model_validate(plain)
    return search_layouts(config, parse_devices(devices), Assumptions(vocab_size=VOCAB, memory=memory))


def trace_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `build_setup` trace each model section once, which takes it nearly all of its time."""
    traced = dict[str, ModelDef]()

    def trace(config: RunConfig, vocab_size: int) -> ModelDef:
        key = config.model.model_dump_json()
        if key not in traced:
            traced[key] = trace_model(config, vocab_size)
        return traced[key]

    monkeypatch.setattr("lm_trainer.run.build.setup.trace_model", trace)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_every_layout_is_one_that_a_run_takes_by_its_overrides(
    path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
):
    trace_each_model_once(monkeypatch)
    config = load(path, [], RunConfig).config
    layouts = list(enumerate_layouts(config, VOCAB, 4))
    assert len({layout.overrides for layout in layouts}) == len(layouts) > 100
    for layout in layouts[:: len(layouts) // samples]:
        read = with_resolved_gather(load(path, layout.overrides, RunConfig).config, VOCAB)
        assert read.model_dump() == layout.config.model_dump()
        build_setup(read, VOCAB, jax.devices()[:4])


def test_layouts_say_which_of_their_settings_make_another_run(path: Path):
    config = with_resolved_gather(load(path, [], RunConfig).config, VOCAB)
    layouts = list(enumerate_layouts(config, VOCAB, 4))

    @functools.cache
    def hash_with(overrides: tuple[str, ...]) -> str:
        return config_hash(with_resolved_gather(load(path, overrides, RunConfig).config, VOCAB))

    for layout in layouts:
        assert bool(layout.changes) == (config_hash(layout.config) != config_hash(config))
        # Without the settings that it names, it is the same run.
        harmless_overrides = tuple(text for text in layout.overrides if text.split("=")[0] not in layout.changes)
        if "trainer.gather" not in layout.changes:
            assert hash_with(harmless_overrides) == config_hash(config)
    assert any(not layout.changes for layout in layouts)


def axes_of(layouts: list[Layout]) -> dict[str, set[int]]:
    names = ("pipeline", "context", "expert", "model")
    return {name: {getattr(layout.config.trainer, f"{name}_axis_size") for layout in layouts} for name in names}


def test_axes_are_those_that_the_model_admits():
    llama = config_of({"model": {"type": "llama", "seq_len": 64, "hidden_dim": 32, "intermediate_dim": 64,
                                 "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
                       "trainer": {"train_batch_size": 16}})  # fmt: skip
    every = {1, 2, 4}
    assert axes_of([*enumerate_layouts(llama, VOCAB, 4)]) == {
        "pipeline": {1, 2},
        "context": every,
        "expert": {1},
        "model": {1, 2},
    }
    mixtral = config_of({"model": MIXTRAL, "trainer": {"train_batch_size": 16}})
    axes = axes_of([*enumerate_layouts(mixtral, VOCAB, 4)])
    assert axes == {"pipeline": {1}, "context": every, "expert": every, "model": {1, 2}}


def test_what_is_given_stays(path: Path):
    config = load(path, ["trainer.elastic_shards=8"], RunConfig).config
    layouts = list(enumerate_layouts(config, VOCAB, 2))
    assert min(layout.plan.count for layout in layouts) == 8
    assert {layout.plan.batch_size for layout in layouts} == {16}
    fast = load(path, ["trainer.determinism=fast"], RunConfig).config
    assert {layout.config.trainer.gather for layout in enumerate_layouts(fast, VOCAB, 2)} == {"auto"}
    assert {layout.config.trainer.gather for layout in enumerate_layouts(config, VOCAB, 2)} == {"model", "layer"}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [SMALL_BATCH, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_the_fastest_that_fits_is_the_fastest_of_all_that_fit(batch_size: int):
    everything = searched("2xH100", batch_size=batch_size)
    assert [candidate.seconds for candidate in everything.ranked] == sorted(
        candidate.seconds for candidate in everything.ranked
    )
    assert all(candidate.fits for candidate in everything.ranked)
    assert everything.nearest is None
    # With less memory than the fastest takes, another one is found, or none.
    limit = everything.ranked[0].memory.bytes
    tighter = searched("2xH100", memory=limit, batch_size=batch_size)
    assert all(candidate.memory.bytes < limit for candidate in tighter.ranked)
    assert tighter.ranked[0].seconds >= everything.ranked[0].seconds
    none = searched("2xH100", memory=1, batch_size=batch_size)
    assert none.ranked == ()
    assert none.nearest is not None
    assert none.nearest.memory.bytes <= min(
        candidate.memory.bytes for candidate in (*everything.ranked, *tighter.ranked)
    )


@pytest.mark.slow
def test_the_fastest_with_the_same_numbers_is_named_beside_one_that_changes_them():
    search = searched()
    assert search.ranked[0].layout.changes
    assert search.same_numbers is not None
    assert search.same_numbers.layout.changes == ()
    text = "\n".join(search_lines(search))
    assert "fastest; changes the numbers of the run, by " in text
    assert "fastest with the same numbers" in text
    short = "\n".join(search_lines(searched("2xH100", memory=1, batch_size=SMALL_BATCH)))
    assert "NO LAYOUT FITS: the nearest takes" in short
    assert "more than the" in short


LLAMA = {"type": "llama", "seq_len": 256, "hidden_dim": 256, "intermediate_dim": 512, "num_layers": 8, "num_heads": 4,
         "num_kv_heads": 4, "flash_attention_block_size": 64}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        ({}, {}),
        ({"gradient_checkpointing": False}, {}),
        ({"gradient_checkpointing": "dots_no_batch"}, {}),
        ({}, {"context_axis_size": 2}),
        ({"gradient_checkpointing": "dots_no_batch"}, {"pipeline_axis_size": 2}),
        ({}, {"model_axis_size": 2, "tensor_parallel_axes": ["heads", "mlp"]}),
        ({}, {"determinism": "fast"}),
        ({}, {"determinism": "layerwise"}),
        ({"gradient_checkpointing": "dots_no_batch"}, {"determinism": "layerwise"}),
    ],
)
def test_estimates_are_near_what_xla_plans(model: dict[str, Any], trainer: dict[str, Any]):
    config = config_of({"model": {**LLAMA, "scan_layers": True, **model},
                        "trainer": {"train_batch_size": 32, "per_device_parallelism": 4, **trainer}})  # fmt: skip
    group, devices = parse_devices("4xH100"), jax.devices()[:4]
    memory = StepMemory(config, VOCAB, devices, "gpu")
    planned = memory.plan().peak
    plan = memory.largest_step()
    axes = dict(config.trainer.step_plan.abstract_mesh(4).shape)
    temporary = estimate_temporary(config, VOCAB, 4, plan.rows * config.model.seq_len, axes=axes)
    estimate = estimate_step(config, group, temporary, Traces(VOCAB))
    assert estimate.bytes == pytest.approx(planned.bytes, rel=0.25)


def test_devices_without_figures_are_refused(path: Path):
    with pytest.raises(UserError, match="no datasheet figure"):
        searched("4xcpu")
    many = load(path, ["trainer.elastic_shards=16"], RunConfig).config
    with pytest.raises(UserError, match="cannot share the batch"):
        search_layouts(many, parse_devices("63xH100"), Assumptions(vocab_size=VOCAB))


@pytest.mark.slow
def test_the_command_prints_settings_that_training_takes(run_lmt: RunLmt, path: Path):
    done = run_lmt("plan", path, "--devices", "4xH100", "--search")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("fastest"))
    settings = [line.strip() for line in lines[start + 1 :] if line.startswith("  ")]
    end = next((index for index, line in enumerate(lines[start + 1 :]) if not line.startswith("  ")), len(settings))
    checked = run_lmt("config", "check", path, *settings[:end])
    assert checked.returncode == 0, checked.stderr
    search = json.loads(run_lmt("plan", path, "--devices", "4xH100", "--search", "--json").stdout)
    assert search["ranked"][0]["overrides"] == settings[:end]
    assert search["budget"]["bytes"] == memory_budget("NVIDIA H100 80GB HBM3").bytes  # pyright: ignore[reportOptionalMemberAccess]
    assert [path.name for path in path.parent.iterdir()] == ["small.yaml"]


@pytest.mark.slow
def test_the_compilers_word_decides(path: Path):
    config, group = load(path, [], RunConfig).config, parse_devices("4xH100")
    guessed, compiled_overrides = searched(), list[tuple[str, ...]]()

    def compile_one(overrides: tuple[str, ...]) -> CompiledLayout:
        compiled_overrides.append(overrides)
        if len(compiled_overrides) == 1:
            raise UserError("no such register")
        size = 10**15 if len(compiled_overrides) == 2 else 1000
        return CompiledLayout(
            PhaseBytes("step", {"state": size}), (1 / len(compiled_overrides), 4 / len(compiled_overrides))
        )

    search = search_layouts(config, group, Assumptions(vocab_size=VOCAB), compile_best=(2, compile_one))
    assert guessed.same_numbers is not None
    # Two that fit, and the one with the same numbers, which is among them or is compiled after them.
    same_overrides = guessed.same_numbers.layout.overrides
    first = [candidate.layout.overrides for candidate in guessed.ranked[:4]]
    assert compiled_overrides == (first if same_overrides in first else [*first, same_overrides])
    assert search.same_numbers is None or search.same_numbers.compiled is not None
    # Of those that fit the later one is faster, by the geometric mean of its bounds.
    assert [candidate.layout.overrides for candidate in search.ranked] == [compiled_overrides[3], compiled_overrides[2]]
    assert search.ranked[0].seconds == pytest.approx(2 / 4)
    assert [candidate.refused for candidate in search.rejected] == ["no such register", None]
    text = "\n".join(search_lines(search))
    assert "left out: " in text
    assert ": no such register" in text
    assert "by the compiler, in step" in text
    assert "0.25 to 1 s" in text


@pytest.mark.slow
def test_a_search_whose_layouts_all_are_refused_says_so(path: Path):
    def refuse(overrides: tuple[str, ...]) -> CompiledLayout:
        raise UserError("no such register")

    config, group = load(path, [], RunConfig).config, parse_devices("2xH100")
    search = search_layouts(config, group, Assumptions(vocab_size=VOCAB), compile_best=(1, refuse))
    assert search.ranked == ()
    assert "no layout can be compiled" in "\n".join(search_lines(search))
    assert json.loads(json.dumps(search.as_dict()))["rejected"][0]["refused"] == "no such register"
