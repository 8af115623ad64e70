"""Mistakes of a user: a clear message, the right exit code, no traceback, nothing saved is harmed."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from lm_trainer.run.weights.saved_model import load_model
from tests.run.conftest import MakeConfig, write_config

SHORT = {"num_train_steps": 4, "steps_per_eval": 4, "max_eval_batches": 1}
SMALL = {"num_layers": 2, "hidden_dim": 16, "seq_len": 16}
Train = Callable[..., Result]


@pytest.fixture
def train(in_tmp_path: Path) -> Train:
    def run(config: Path, *overrides: str) -> Result:
        return CliRunner().invoke(app, ["train", str(config), *overrides])

    return run


def refused(result: Result, *parts: str, code: int = 2) -> None:
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.output, result.output


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory, text_files: tuple[Path, Path]) -> Path:
    """A working directory with a configuration and its complete run."""
    directory = tmp_path_factory.mktemp("complete")
    write_config(directory / "run.yaml", text_files, {"trainer": {**SHORT, "max_devices": 1}, "model": SMALL})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        done = CliRunner().invoke(app, ["train", "run.yaml"])
    assert done.exit_code == 0, done.output
    return directory


@pytest.fixture
def finished(complete_run: Path, in_tmp_path: Path) -> Path:
    """A configuration whose run is here, complete; a copy for each test to spoil."""
    shutil.copytree(complete_run, in_tmp_path, dirs_exist_ok=True)
    return in_tmp_path / "run.yaml"


def test_a_run_directory_that_holds_another_configuration(finished: Path, train: Train, in_tmp_path: Path) -> None:
    metrics_before = (in_tmp_path / "logs/run/metrics.jsonl").read_bytes()
    result = train(finished, "optimizer.learning_rate=1e-4", "model.num_layers=3")
    refused(
        result,
        "logs/run holds a run with another configuration",
        "model.num_layers: was 2, now 3",
        "optimizer.learning_rate: was 0.003, now 0.0001",
        "Set trainer.id",
    )
    assert (in_tmp_path / "logs/run/metrics.jsonl").read_bytes() == metrics_before


def test_what_changes_no_number_may_change_between_attempts(finished: Path, train: Train) -> None:
    result = train(
        finished, "trainer.steps_per_log=2", "trainer.fsdp_axis=mlp", "trainer.checkpointer.save_interval=5m"
    )
    assert result.exit_code == 0, result.output
    assert "complete already" in result.output


def test_a_damaged_configuration_or_tokenizer_beside_the_checkpoints_is_named(
    finished: Path, in_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def log_messages() -> str:
        caplog.clear()
        load_model(str(in_tmp_path / "checkpoints/run"))
        return caplog.text

    assert not log_messages()
    config = in_tmp_path / "checkpoints/run/config.yaml"
    original_text = config.read_text()
    config.write_text(original_text.replace("layer_norm_epsilon: 1.0e-05", "layer_norm_epsilon: 1.0e-01"))
    assert "config.yaml is not the configuration of the run" in log_messages()
    assert "was damaged or changed: model.layer_norm_epsilon: was 1e-05, now 0.1" in log_messages()
    config.write_text(original_text)
    tokenizer = in_tmp_path / "checkpoints/run/tokenizer/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert f"{tokenizer} is not the file of the run's tokenizer" in log_messages()


def test_a_checkpoint_of_another_model(finished: Path, train: Train, in_tmp_path: Path) -> None:
    result = train(finished, "trainer.id=other", "model.hidden_dim=48", "trainer.load_checkpoint_path=checkpoints/run")
    refused(
        result,
        "checkpoints/run/4 is a checkpoint of another model",
        "params.blocks.0.attention.k.bias: the checkpoint has float32[2,2,8], ",
        "the configuration asks for float32[2,2,24]",
    )
    assert (in_tmp_path / "checkpoints/run/4").is_dir()


def test_a_checkpoint_of_another_optimizer(finished: Path, train: Train) -> None:
    options = ("trainer.id=other", "trainer.load_checkpoint_path=checkpoints/run")
    result = train(finished, *options, "optimizer={type: lion, learning_rate: 0.001}")
    refused(result, "checkpoints/run/4 is a checkpoint of another optimizer", "trainer.initialize_from")


def test_a_checkpoint_of_other_data(finished: Path, train: Train, text_files: tuple[Path, Path]) -> None:
    result = train(
        finished, "trainer.id=other", f"data.train_urls={text_files[1]}", "trainer.load_checkpoint_path=checkpoints/run"
    )
    refused(result, "the checkpoint of step 4 was trained on other data")


def test_a_checkpoint_that_must_be_there(make_config: MakeConfig, train: Train) -> None:
    refused(
        train(make_config(trainer=SHORT), "trainer.load_checkpoint=true"),
        "trainer.load_checkpoint is true, but there is no checkpoint",
    )


def test_a_run_directory_in_use(make_config: MakeConfig, train: Train, in_tmp_path: Path) -> None:
    directory = in_tmp_path / "logs" / "run"
    directory.mkdir(parents=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 4242")
        lock.flush()
        refused(train(make_config(trainer=SHORT)), "logs/run is in use by process 4242", "trainer.id")


def test_a_directory_that_cannot_be_written(make_config: MakeConfig, train: Train, in_tmp_path: Path) -> None:
    (in_tmp_path / "logs").write_text("a file where a directory should be")
    refused(train(make_config(trainer=SHORT)), "logs/run: cannot be written", "trainer.log_dir")


@pytest.mark.parametrize(
    ("trainer", "parts"),
    [
        ({"train_batch_size": 12, "elastic_shards": 8}, ("train_batch_size 12 cannot be cut into elastic_shards=8",)),
        ({"per_device_parallelism": 3}, ("train_batch_size 16 is not a multiple of per_device_parallelism=3",)),
        ({"per_device_parallelism": 4}, ("8 devices along the data axes cannot share 4 microbatches of 4 rows",)),
        ({"model_axis_size": 3}, ("8 devices cannot be divided", "model_axis_size=3")),
        (
            {"axis_resources": {"embed": "data", "mlp": "data"}},
            ("'mlp' and 'embed' are both mapped onto the mesh axis 'data'",),
        ),
        ({"fsdp_axis": "embd"}, ("trainer", "unknown logical axis 'embd'", "did you mean 'embed'")),
        ({"jax_config": {"jax_no_such_setting": 1}}, ("has no setting 'jax_no_such_setting'",)),
        ({"mp": "f33"}, ("unknown dtype 'f33'",)),
        ({"id": "../escape"}, ("cannot name a directory",)),
        ({"quantization": {"targets": "mpl"}}, ("trainer.quantization.targets: 'mpl' selects no linear map",)),
        ({"quantization": {"type": "nvfp4"}}, ("unknown type 'nvfp4', expected 'int8',", "write mxfp8")),
        ({"require_accelerator": True}, ("no accelerator",)),
    ],
)
def test_settings_that_cannot_be(make_config: MakeConfig, train: Train, trainer: dict, parts: tuple[str, ...]) -> None:
    refused(train(make_config(trainer={**SHORT, **trainer})), *parts)


def test_a_schedule_that_does_not_fit(make_config: MakeConfig, train: Train) -> None:
    config = make_config(trainer=SHORT, optimizer={"warmup": 3, "decay": 3})
    refused(train(config), "warmup (3 steps) and decay (3 steps) do not fit into 4 training steps")


def test_missing_data(make_config: MakeConfig, train: Train) -> None:
    refused(train(make_config(trainer=SHORT, data={"train_urls": ["no/such/file.txt"]})), "no/such/file.txt")


def test_a_loss_that_is_not_finite_stops_the_run_before_it_harms_anything(
    make_config: MakeConfig, train: Train, tmp_path: Path
) -> None:
    config = make_config(
        trainer={**SHORT, "num_train_steps": 40, "max_devices": 1},
        model=SMALL,
        optimizer={"learning_rate": 1e30, "warmup": 0},
    )
    refused(train(config), "the step was not applied", "Lower optimizer.learning_rate", code=3)
    rows = [json.loads(line) for line in (tmp_path / "logs/run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["train/loss"] > 0


@pytest.mark.slow
def test_steps_that_are_not_finite_can_be_skipped(make_config: MakeConfig, train: Train) -> None:
    config = make_config(
        trainer={**SHORT, "crash_on_nan": False, "crash_on_inf": False, "max_devices": 1},
        model=SMALL,
        optimizer={"learning_rate": 1e30, "warmup": 0},
    )
    done = train(config)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_continuing_from_the_weights_of_another_run(finished: Path, train: Train, in_tmp_path: Path) -> None:
    done = train(finished, "trainer.id=second", "trainer.initialize_from=checkpoints/run")
    assert done.exit_code == 0, done.output

    def first_loss(run: str) -> float:
        return json.loads((in_tmp_path / "logs" / run / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]

    assert first_loss("second") < first_loss("run")
    refused(
        train(finished, "trainer.id=third", "trainer.initialize_from=checkpoints/run", "model.num_layers=1"),
        "checkpoints/run is another model",
    )
    refused(train(finished, "trainer.id=fourth", "trainer.initialize_from=nowhere"), "nowhere: no run of this name")
