"""Golden files: recorded once, equal on any number of devices, and a change is named at its step."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_trainer.core.batch import Batch
from lm_trainer.reproduce.golden import StepRecord, compare_steps
from lm_trainer.reproduce.golden_steps import digest_batch
from tests.conftest import Outcome, RunLmt, refused, run_here
from tests.run.conftest import Plain, merge

STEPS = 3
TINY: Plain = {
    "model": {
        "type": "gpt2",
        "seq_len": 16,
        "hidden_dim": 8,
        "num_layers": 1,
        "num_heads": 1,
        "use_bias": False,
        "gradient_checkpointing": False,
    },
    "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": ["text.txt"]},
    "trainer": {
        "train_batch_size": 8,
        "elastic_shards": 2,
        "num_train_steps": STEPS,
        "tracker": [],
        "sample_tokens": 0,
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "checkpointer": {"save_interval": "1h"},
    },
    "optimizer": {"learning_rate": 1e-2, "warmup": 0},
}


def write_config(directory: Path, **changes: Plain) -> Path:
    (directory / "text.txt").write_text("\n".join(f"{n} squared is {n * n}." for n in range(300)))
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(merge(TINY, changes)))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny configuration and its golden file, recorded on one device."""
    directory = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        result = run_here("golden", "record", write_config(directory), "--steps", str(STEPS), "--devices", "1")
    assert result.returncode == 0, result.stderr
    assert "wrote run.golden.json" in result.stdout
    return directory


@pytest.fixture
def copied(recorded: Path, in_tmp_path: Path) -> Path:
    """A copy of it, in which the test runs."""
    shutil.copytree(recorded, in_tmp_path, dirs_exist_ok=True)
    return in_tmp_path


def content(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.golden.json").read_text())


def change(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    golden = content(directory)
    edit(golden)
    (directory / "run.golden.json").write_text(json.dumps(golden))


def check(*args: str | Path) -> tuple[Outcome, dict[str, Any]]:
    result = run_here("golden", "check", "run.golden.json", "--json", *args)
    return result, json.loads(result.stdout)


def test_the_file_has_every_step_and_nothing_else_is_written(recorded: Path) -> None:
    golden = content(recorded)
    assert [step["step"] for step in golden["steps"]] == [0, 1, 2, 3]
    assert {len(step["weights"]) for step in golden["steps"]} == {len(golden["parameters"])}
    metrics = {"step", "batch", "train/loss", "optim/grad_norm", "optim/learning_rate", "data/loss_tokens", "weights"}
    assert golden["steps"][1].keys() == golden["steps"][2].keys() == metrics
    assert golden["steps"][3].keys() == metrics | {"state", "fingerprint"}
    assert (golden["config"], golden["devices"]) == ("run.yaml", [1])
    assert {path.name for path in recorded.iterdir()} <= {"run.yaml", "text.txt", "run.golden.json", "cache"}


def test_a_check_on_another_number_of_devices_is_equal(copied: Path) -> None:
    result = run_here("golden", "check", "run.golden.json", "--devices", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal, bit for bit: 3 steps on 2 devices"


def test_another_seed_and_other_versions_are_named_before_the_bits(copied: Path) -> None:
    change(copied, lambda golden: golden["environment"]["packages"].update(jax="0.1"))
    result = run_here("golden", "check", "run.golden.json", "trainer.seed=1")
    assert result.returncode == 1
    header = result.stdout.split("devices   steps")[0]
    assert "so bits may differ:\n  jax: 0.1 -> " in header
    assert "the configuration has changed:\n  trainer.seed: 0 -> 1\n" in header
    assert "first difference: step 0, weights of " in result.stdout


def test_bad_input_is_one_line_with_the_way_out(copied: Path) -> None:
    golden = Path("run.golden.json")
    text = golden.read_text()
    for args, words in {
        ("check", "no.json"): ("no.json: cannot be read", "lmt golden record"),
        ("check", "run.yaml"): ("run.yaml is damaged", "not JSON"),
        ("check", "run.golden.json", "--devices", "1,x"): ("--devices 1,x", "such as 1,2,4"),
        ("check", "run.golden.json", "--devices", "8"): ("8 devices",),
        ("check", "run.golden.json", "--config", "no.yaml"): ("no.yaml", "no such file"),
        ("check", "run.golden.json", "trainer.num_train_steps=2"): ("trainer.num_train_steps is 2",),
        ("check", "run.golden.json", "trainer.determinism=fast"): ("trainer.determinism: fast", "elastic"),
        ("record", "run.yaml", "--devices", "0"): ("--devices 0",),
        ("record", "run.yaml", "--steps", "9"): ("trainer.num_train_steps is 3",),
        ("record", "run.yaml", "trainer.determinism=fast"): ("trainer.determinism: fast", "elastic"),
        ("record", "run.yaml", "trainer.load_checkpoint_path=x"): ("trainer.load_checkpoint_path", "initialize_from"),
        ("record", "run.yaml", "data.train_urls=['s3://me:secret@bucket/x']"): ("credential",),
    }.items():
        refused(run_here("golden", *args), *words)
    for damaged, word in {
        text[: len(text) // 2]: "is damaged: it is not JSON",
        "[]": "no golden file",
        text.replace('"format": 1', '"format": 2'): "has format 2",
        text.replace('"step": 2', '"step": 7'): "steps are missing",
        text.replace('"overrides"', '"settings"'): "overrides missing",
    }.items():
        golden.write_text(damaged)
        refused(run_here("golden", "check", golden), word)


def test_the_first_quantity_in_the_order_of_a_step_is_named() -> None:
    recorded = StepRecord(4, {"batch": "a", "train/loss": 1.0, "optim/grad_norm": float("nan")}, {"w": "0", "b": "1"})
    assert compare_steps(recorded, recorded) is None
    assert compare_steps(recorded, StepRecord(4, {**recorded.values, "optim/new": 1.0}, recorded.weights)) is None
    weights = compare_steps(recorded, StepRecord(4, recorded.values, {"w": "0", "b": "2"}))
    assert weights is not None
    assert (weights.quantity, weights.recorded, weights.now, weights.parameters) == ("weights", "1", "2", ["b"])
    values = {**recorded.values, "optim/grad_norm": 2.0, "batch": "b"}
    batch = compare_steps(recorded, StepRecord(4, values, {"w": "0"}))
    assert batch is not None
    assert (batch.quantity, batch.others, batch.parameters) == ("batch", ["optim/grad_norm", "weights"], ["b"])


def test_the_digest_of_a_batch_depends_on_every_array() -> None:
    array = np.zeros((2, 3), np.int32)
    batch = Batch(array, array, array.astype(np.float32), array, array)
    digests = {digest_batch(batch)}
    for name in ("tokens", "targets", "weights", "positions", "segments"):
        other = getattr(batch, name).copy()
        other[1, 2] = 1
        digests.add(digest_batch(batch._replace(**{name: other})))
    assert len(digests) == 6


@pytest.mark.slow
def test_one_bit_of_a_loss_is_named_at_its_step(copied: Path) -> None:
    def edit(golden: dict[str, Any]) -> None:
        golden["code"]["code"] = "other"
        golden["steps"][2]["train/loss"] = float(
            np.nextafter(np.float32(golden["steps"][2]["train/loss"]), np.float32(9))
        )

    before = content(copied)["steps"][2]["train/loss"]
    change(copied, edit)
    result, report = check()
    assert (result.returncode, report["equal"], report["changes"]) == (1, False, [])
    difference = report["difference"]
    assert (difference["step"], difference["quantity"], difference["devices"]) == (2, "train/loss", 1)
    assert (difference["now"], difference["others"], difference["parameters"]) == (before, [], [])
    assert "the code of lm_trainer has changed" in report["notes"][0]


@pytest.mark.slow
def test_changed_data_and_a_changed_optimizer_are_named_at_their_step(copied: Path) -> None:
    _, report = check("optimizer.beta2=0.9", "optimizer.max_grad_norm=null")
    assert report["configuration"] == ["optimizer.beta2: 0.95 -> 0.9", "optimizer.max_grad_norm: 1.0 -> None"]
    # The first step has the same loss and gradient, and Adam's first update does not depend on either setting.
    assert (report["difference"]["step"] <= 2, report["difference"]["quantity"]) == (True, "weights")

    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace("squared", "SQUARED"))
    result, report = check()
    assert (result.returncode, report["configuration"]) == (1, [])
    assert (report["difference"]["step"], report["difference"]["quantity"]) == (1, "batch")
    assert report["difference"]["others"][:2] == ["train/loss", "optim/grad_norm"]
    Path("text.txt").write_text(text)
    assert check()[1]["equal"]


@pytest.mark.slow
def test_devices_that_differ_leave_no_file(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr("lm_trainer.reproduce.golden_steps.digest_batch", lambda _: f"batch {next(numbers)}")
    result = run_here("golden", "record", "run.yaml", "--steps", "1", "--devices", "1,2", "-o", "new.json")
    assert result.returncode == 1
    assert "first difference: step 1, batch, on 2 devices\n  recorded 'batch 0'\n  now      'batch 1'" in result.stdout
    assert result.stdout.splitlines()[-1] == "nothing was written, because 1 device and 2 devices differ"
    assert not Path("new.json").exists()


@pytest.mark.slow
def test_the_fingerprint_is_the_fingerprint_of_a_run(copied: Path) -> None:
    result = run_here("train", "run.yaml", "trainer.max_devices=1", "trainer.id=run")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in Path("logs/run/metrics.jsonl").read_text().splitlines()]
    run = {line["step"]: line for line in lines if "train/loss" in line}
    golden = content(copied)["steps"]
    for step in golden[1:]:
        for name in ("train/loss", "optim/grad_norm", "optim/learning_rate"):
            assert step[name] == run[step["step"]][name]
    assert golden[-1]["fingerprint"] == next(line["fingerprint"] for line in lines if "fingerprint" in line)


@pytest.mark.slow
def test_a_record_on_emulated_devices_is_checked_from_elsewhere(tmp_path: Path, run_lmt: RunLmt) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "tests").mkdir()
    config = write_config(tmp_path, model={"resid_pdrop": 0.1}, trainer={"elastic_shards": 4}).rename(
        tmp_path / "configs/tiny.yaml"
    )
    result = run_lmt(
        "golden",
        "record",
        config,
        "optimizer.learning_rate=0.02",
        "-o",
        "tests/tiny.json",
        "--steps",
        "3",
        "--devices",
        "1,4",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split() for line in result.stdout.splitlines()[2:4]] == [["1", "3", "recorded"], ["4", "3", "equal"]]
    golden = json.loads((tmp_path / "tests/tiny.json").read_text())
    assert (golden["config"], golden["overrides"]) == ("../configs/tiny.yaml", ["optimizer.learning_rate=0.02"])
    assert golden["environment"]["cpu_threads"] == 4
    result = run_lmt("golden", "check", "tests/tiny.json", "--devices", "3", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["results"] == [{"devices": 3, "steps": 3, "equal": True}]
