"""Predictions of a reference or teacher that are computed before training: their bits, their files, their checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.checkpoint.store import read_record
from lm_trainer.config.loader import load
from lm_trainer.nn.reference import is_reference_param
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.model import teacher_flops, trace_model
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.weights.adapters import training_flops
from lm_trainer.run.weights.teacher import resolve_teacher
from tests.conftest import Outcome, refused, run_here
from tests.run.conftest import MakeConfig
from tests.run.frozen_weights import STEPS
from tests.run.test_adapters import VOCAB, write_base
from tests.run.test_distillation_run import distillation_changes
from tests.run.test_preference_run import preference_changes

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo", "beta": 0.5},
    "dpo-lora": {"type": "dpo", "beta": 0.5},
    "kto": {"type": "kto", "beta": 0.5},
    "top-k": {"type": "distillation", "weight": 0.7, "temperature": 2.0, "top_k": 20},
    "full": {"type": "distillation", "weight": 0.7, "divergence": "reverse"},
}
ONCE, ONE = "--loss.precompute=true", "--trainer.max_devices=1"


def changes_of(name: str) -> dict[str, Any]:
    """The configuration of a run that computes the frozen model in every step."""
    changes: dict[str, Any] = {"optimizer": {"learning_rate": 1e-2, "warmup": 0}}
    loss = LOSSES[name]
    if loss["type"] == "distillation":
        return distillation_changes({key: value for key, value in loss.items() if key != "type"}, **changes)
    if name == "dpo-lora":
        changes["adapter"] = {"rank": 2, "alpha": 6.0, "dropout": 0.1}
    return preference_changes(loss, **changes)


def train(path: Path, run: str, *keys: str) -> Outcome:
    done = run_here("train", path, f"--trainer.id={run}", *keys)
    assert done.returncode == 0, done.stderr
    return done


def hashes(run: str) -> dict[str, str]:
    """The hashes of the weights after the last step."""
    return dict(read_record(Path(f"checkpoints/{run}"), STEPS)["hashes"])


def metrics(run: str) -> list[dict[str, float]]:
    """The values of the loss and its parts, in all steps and in evaluations."""
    lines = [json.loads(line) for line in Path(f"logs/{run}/metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/grad_norm", "train/kl", "train/rewards/margin", "eval/loss", "eval/kl")
    selected = [{name: line[name] for name in names if name in line} for line in lines]
    return [line for line in selected if line]


def stored_parts() -> list[Path]:
    return sorted(Path("cache").glob("*/frozen-*/parts/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "top-k" else pytest.param(name, marks=pytest.mark.exhaustive) for name in LOSSES]
)
def test_bits_are_the_same_on_any_number_of_devices(name: str, make_config: MakeConfig, in_tmp_path: Path) -> None:
    """The files are made on each number of devices, and the results are close to a run without them."""
    write_base(Path("base"), seed=0)
    path = make_config(**changes_of(name))
    train(path, "each", ONE)
    files = []
    for devices in (1, 2, 4):
        shutil.rmtree("cache")
        done = train(path, f"once{devices}", ONCE, f"--trainer.max_devices={devices}")
        assert "computed before the first step" in done.stdout
        files.append({path.parent.parent.name: path.read_bytes() for path in stored_parts()})
    assert files[0] == files[1] == files[2]
    assert len(files[0]) == 2, "the training rows and the held-out rows"
    assert hashes("once1") == hashes("once2") == hashes("once4")
    assert metrics("once1") == metrics("once2") == metrics("once4")
    assert len(metrics("each")) > STEPS
    for once, each in zip(metrics("once1"), metrics("each"), strict=True):
        assert once == {name: pytest.approx(x, rel=1e-4, abs=1e-5) for name, x in each.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_one_layer_at_a_time_the_bits_are_those_of_a_run_without_files(
    name: str, make_config: MakeConfig, in_tmp_path: Path
) -> None:
    write_base(Path("base"), seed=0)
    path = make_config(**changes_of(name))
    train(path, "each", ONE, "--trainer.gather=layer")
    train(path, "once", ONCE, ONE, "--trainer.gather=layer")
    assert metrics("once") == metrics("each")
    assert hashes("once") == hashes("each")


@pytest.mark.slow
def test_files_are_resumed_used_again_and_checked(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    path = make_config(**changes_of("dpo"))
    done = train(path, "first", ONCE, ONE)
    assert "the log probabilities of the reference: " in done.stdout
    assert "34,720 parameters" in done.stdout, "the run holds no second model"
    contents = {part: part.read_bytes() for part in stored_parts()}

    # A run that was cut off has the first rows; the next one computes the others.
    rows = next(Path("cache").glob("*/frozen-*/rows.json"))
    rows.unlink()
    assert "computed before the first step" in train(path, "second", ONCE, ONE).stdout
    assert {part: part.read_bytes() for part in stored_parts()} == contents
    assert hashes("second") == hashes("first")
    assert "read from" in train(path, "third", ONCE, ONE).stdout

    part = stored_parts()[0]
    part.write_bytes(bytes([contents[part][0] ^ 1]) + contents[part][1:])
    damaged = run_here("train", path, "--trainer.id=fourth", ONCE, ONE)
    assert damaged.returncode == 1
    assert "is damaged; remove" in damaged.stderr
    assert "to compute the log probabilities of the reference again" in damaged.stderr
    part.write_bytes(contents[part])

    # Files of another directory are not mistaken for these.
    manifest = part.parent.parent / "manifest.json"
    original = manifest.read_text()
    manifest.write_text(original.replace('"weights":"', '"weights":"0').replace('"checksum"', '"was"'))
    refused(run_here("train", path, "--trainer.id=fifth", ONCE, ONE), "were not made for this run (different: was, we")
    manifest.write_text(original)

    # Another reference has files of its own, and a run does not continue with it.
    shutil.rmtree("base")
    write_base(Path("base"), seed=1)
    shutil.rmtree(f"checkpoints/first/{STEPS}")
    refused(run_here("train", path, "--trainer.id=first", ONCE, ONE), "was trained beside other frozen weights")
    assert len(stored_parts()) == 2 * len(contents)


def test_the_frozen_model_is_part_of_neither_the_state_nor_the_step(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    for name, passes in (("dpo", 1), ("kto", 2), ("full", 0)):
        path = make_config(**changes_of(name))
        each, once = (resolve_teacher(load(path, keys, RunConfig).config) for keys in ([], ["loss.precompute=true"]))
        assert any(map(is_reference_param, trace_model(each, VOCAB).shapes))
        model = trace_model(once, VOCAB)
        assert not any(map(is_reference_param, model.shapes))
        count = flops_per_token(once.model.spec(VOCAB), 32)
        saved = training_flops(count, model, each.loss) - training_flops(count, model, once.loss)
        assert saved == passes * count.forward
        assert (teacher_flops(each, VOCAB) > 0, teacher_flops(once, VOCAB)) == (name == "full", 0)


def test_the_key_changes_the_identity_of_a_run_only_if_it_is_set(make_config: MakeConfig, in_tmp_path: Path) -> None:
    path = make_config(**changes_of("dpo"))
    each, false, once = (
        load(path, keys, RunConfig).config for keys in ([], ["loss.precompute=false"], ["loss.precompute=true"])
    )
    assert config_hash(each) == config_hash(false) != config_hash(once)


def test_a_disk_that_is_too_small_is_named(
    make_config: MakeConfig, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    write_base(Path("base"), seed=0)
    failed = run_here("train", make_config(**changes_of("dpo")), ONCE, ONE)
    assert failed.returncode == 1
    assert "loss.precompute: the log probabilities of the reference need 0.01 MB, but" in failed.stderr
    assert "set data.cache_dir to a larger disk" in failed.stderr
