"""Event files, read back frame by frame."""

from __future__ import annotations

import contextlib
import math
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from lm_trainer.core.errors import UserError
from lm_trainer.trackers import NoopConfig, TensorboardConfig, open_trackers, profile_directory, read_metrics

PB: Any = event_pb2


def read_events(directory: Path) -> list[Any]:
    """The events of all files of a directory, in the order in which TensorBoard reads the files."""
    records = []
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            if 16 + length > len(data):
                break  # cut off
            records.append(PB.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return records


def read_scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Events as TensorBoard shows them: a session start hides earlier ones of its step or later."""
    shown: dict[str, dict[int, float]] = {}
    for event in read_events(directory):
        if event.HasField("session_log") and event.session_log.status == PB.SessionLog.START:
            shown = {tag: {s: v for s, v in series.items() if s < event.step} for tag, series in shown.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def track(config: TensorboardConfig, run_dir: Path, losses: dict[int, float], resume_step: int = 0) -> None:
    trackers = open_trackers([config], run_dir=run_dir, run_id="my-run", resume_step=resume_step)
    with contextlib.closing(trackers):
        for step, loss in losses.items():
            trackers.log({"train/loss": loss}, step=step)


def test_scalars_are_there_as_soon_as_they_are_logged(tmp_path):
    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers):
        trackers.log({"train/loss": 2.5, "optim/learning_rate": 0.25}, step=1)
        trackers.log({"train/loss": math.nan}, step=2)
        values = read_scalars(tmp_path / "tensorboard")
    assert values["optim/learning_rate"] == {1: 0.25}
    assert values["train/loss"][1] == 2.5
    assert math.isnan(values["train/loss"][2])


def test_scalars_of_jax_are_not_lost(tmp_path):
    import jax.numpy as jnp

    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers):
        trackers.log({"optim/grad_norm": jnp.float32(0.5), "n": jnp.int32(3)}, step=1)
    assert read_scalars(tmp_path / "tensorboard") == {"optim/grad_norm": {1: 0.5}, "n": {1: 3.0}}


@pytest.mark.parametrize("resume_step", [0, 2])
def test_a_resumed_run_hides_what_comes_again(tmp_path, resume_step):
    track(TensorboardConfig(), tmp_path, {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    repeated = {resume_step + 1: 8.0}
    track(TensorboardConfig(), tmp_path, repeated, resume_step)
    retained = {step: loss for step, loss in {1: 4.0, 2: 3.0}.items() if step <= resume_step}
    assert read_scalars(tmp_path / "tensorboard") == {"train/loss": retained | repeated}


def test_text_and_configuration_are_shown(tmp_path):
    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers):
        trackers.log_text("sample", "def f(): ...", step=3)
        trackers.log_config({"model": {"num_layers": 2}})
    shown = [v for e in read_events(tmp_path / "tensorboard") for v in e.summary.value]
    values = {v.tag: v.tensor.string_val[0].decode() for v in shown if v.HasField("tensor")}
    assert values["sample/text_summary"] == "def f(): ..."
    assert '"num_layers": 2' in values["config/text_summary"]


def test_the_configuration_can_be_compared_between_runs(tmp_path):
    from tensorboardX.proto import plugin_hparams_pb2

    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers):
        trackers.log_config({"model": {"num_layers": 2, "type": "gpt2"}, "data": {"urls": ["a", "b"], "cache": None}})
    plugins = [
        plugin_hparams_pb2.HParamsPluginData.FromString(v.metadata.plugin_data.content)  # pyright: ignore[reportAttributeAccessIssue]
        for e in read_events(tmp_path / "tensorboard")
        for v in e.summary.value
        if v.metadata.plugin_data.plugin_name == "hparams"
    ]
    (start,) = [p.session_start_info.hparams for p in plugins if p.HasField("session_start_info")]
    assert set(start) == {"model.num_layers", "model.type", "data.urls"}
    assert (start["model.num_layers"].number_value, start["model.type"].string_value) == (2, "gpt2")
    assert start["data.urls"].string_value == '["a", "b"]'


def test_histograms_are_shown_as_such(tmp_path):
    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    with contextlib.closing(trackers):
        trackers.log_histogram("grads", np.array([3, 0, 5]), np.array([-1.0, 0.0, 1.0, 2.0]), step=7)
        trackers.log_histogram("one value", np.array([1, 2, 4, 8]), np.array([0.0, 1.0, 1.0, 1.0, 2.0]), step=7)
    shown = {v.tag: v.histo for e in read_events(tmp_path / "tensorboard") if e.step == 7 for v in e.summary.value}
    grads = shown["grads"]
    assert (grads.min, grads.max, grads.num, grads.sum) == (-1, 2, 8, 6)
    assert list(zip(grads.bucket_limit, grads.bucket, strict=True)) == [(0, 3), (1, 0), (2, 5)]
    one = shown["one value"]
    assert list(zip(one.bucket_limit, one.bucket, strict=True)) == [(1, 7), (2, 8)]


def test_a_log_directory_holds_one_directory_for_each_run(tmp_path):
    track(TensorboardConfig(logdir=f"{tmp_path}/boards/"), tmp_path, {1: 1.0})
    assert read_scalars(tmp_path / "boards" / "my-run") == {"train/loss": {1: 1.0}}
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("configs", "directory"),
    [
        ([], "run/tensorboard"),
        ([NoopConfig(), TensorboardConfig()], "run/tensorboard"),
        ([TensorboardConfig(logdir="s3://b/x"), TensorboardConfig(logdir="boards")], "boards/my-run"),
        ([TensorboardConfig(logdir="s3://b/x")], "run/tensorboard"),
    ],
    ids=str,
)
def test_traces_lie_beside_the_events_of_a_local_board(configs, directory):
    assert profile_directory(configs, run_dir="run", run_id="my-run") == Path(directory)


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    config = TensorboardConfig(logdir=str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"set trainer\.tracker\.logdir"):
        open_trackers([config], run_dir=tmp_path, run_id="r")


def test_a_full_disk_switches_it_off_and_training_goes_on(tmp_path, caplog):
    trackers = open_trackers([TensorboardConfig()], run_dir=tmp_path, run_id="r")
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(trackers):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, previous[1]))
        try:
            trackers.log_config({"long": "x" * 8192})
            for step in range(1, 20):
                trackers.log({"m": 1.0}, step=step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert len(read_metrics(tmp_path)) == 19
    assert caplog.text.count("tensorboard tracker failed and is switched off") == 1
