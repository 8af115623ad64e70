"""Processes of one run that were started with different things."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.start import agreement
from lm_trainer.run.start.agreement import check_agreement, check_data_agreement, check_program_agreement
from tests.conftest import StartLmt
from tests.run.conftest import MakeConfig
from tests.run.test_processes import free_port

SetOtherProcesses = Callable[..., None]


@pytest.fixture
def set_other_processes(monkeypatch: pytest.MonkeyPatch) -> SetOtherProcesses:
    """Adds processes that send what this one does, changed by functions of theirs."""

    def add(*changes: Callable[[str], str]) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 1 + len(changes))
        monkeypatch.setattr(agreement, "gather_texts", lambda text: [text, *(change(text) for change in changes)])

    return add


def unchanged(text: str) -> str:
    return text


def with_value(value: Any, *keys: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        sent = block = json.loads(text)
        for key in keys[:-1]:
            block = block[key]
        block[keys[-1]] = value
        return json.dumps(sent)

    return change


CONFIG = RunConfig.model_validate({"optimizer": {"type": "adam", "learning_rate": 0.01}})


def test_different_configurations_are_refused_with_their_keys(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(
        unchanged, with_value(0.02, "config", "optimizer", "learning_rate"), with_value(7, "config", "trainer", "seed")
    )
    with pytest.raises(UserError) as refused:
        check_agreement(CONFIG)
    assert "optimizer.learning_rate: 0.01 in processes 0, 1, 3, 0.02 in process 2" in str(refused.value)
    assert "trainer.seed: 0 in processes 0, 1, 2, 7 in process 3" in str(refused.value)


def test_a_key_with_a_dot_in_it_has_its_values(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(with_value(2, "config", "trainer", "layers.0"))
    with pytest.raises(UserError, match=r"trainer\.layers\.0: null in process 0, 2 in process 1"):
        check_agreement(CONFIG)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("trainer", "distributed", "process_id"), 1),
        (("trainer", "jax_compilation_cache_dir"), "/disk/of/its/own"),
        (("data", "cache_dir"), "/disk/of/its/own"),
    ],
)
def test_each_process_may_have_its_own_number_and_disk(
    set_other_processes: SetOtherProcesses, keys: tuple[str, ...], value: Any
) -> None:
    set_other_processes(with_value(value, "config", *keys))
    assert check_agreement(CONFIG) == []


def test_other_packages_and_devices_are_warned_of(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(
        unchanged,
        with_value("0.9.9", "environment", "packages", "jax"),
        with_value(["NVIDIA A100"], "environment", "devices"),
        with_value("1.2.3", "environment", "packages", "pytest"),
    )
    notes = check_agreement(CONFIG)
    assert [note.split(" so bits")[0] for note in notes] == [
        "warning: process 2 runs on something else than process 0 does,",
        "warning: process 3 runs on something else than process 0 does,",
    ]
    assert f"jax: {jax.__version__} -> 0.9.9" in notes[0]
    assert "devices: cpu -> NVIDIA A100" in notes[1]


def test_different_programs_are_warned_of(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(unchanged, unchanged)
    assert check_program_agreement("0123", lambda: "graph") == []
    set_other_processes(unchanged, lambda _: "4567")
    (warning,) = check_program_agreement("0123", lambda: "graph")
    assert "0123 in processes 0, 1, 4567 in process 2" in warning


def test_programs_that_are_printed_differently_and_compute_the_same_are_no_difference(
    set_other_processes: SetOtherProcesses,
) -> None:
    set_other_processes(lambda text: "4567" if text == "0123" else text)
    assert check_program_agreement("0123", lambda: "graph") == []


def test_different_tokens_are_refused(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(unchanged, with_value("b", "tokens"))
    with pytest.raises(UserError, match="a in processes 0, 1, b in process 2"):
        check_data_agreement({"tokens": "a", "sources": "s"})
    set_other_processes(lambda _: json.dumps({"tokens": "b"}))
    with pytest.raises(UserError, match="a in process 0, b in process 1"):
        check_data_agreement("a")


def test_files_whose_tokens_are_not_known_yet_may_be_copies(set_other_processes: SetOtherProcesses) -> None:
    set_other_processes(with_value("other times", "sources"))
    assert check_data_agreement({"tokens": "a", "sources": "s"}) == []
    (warning,) = check_data_agreement({"sources": "s"})
    assert "s in process 0, other times in process 1" in warning
    set_other_processes(lambda _: json.dumps({"sources": "s"}))
    assert check_data_agreement({"tokens": "a", "sources": "s"}) == []


@pytest.mark.slow
def test_two_processes_with_different_settings_end_at_once(
    make_config: MakeConfig, start_lmt: StartLmt, tmp_path: Path
) -> None:
    config, address = make_config(trainer={"num_train_steps": 4}), f"127.0.0.1:{free_port()}"
    running = [
        start_lmt(
            "train",
            config,
            f"trainer.distributed.coordinator_address={address}",
            "trainer.distributed.num_processes=2",
            f"trainer.distributed.process_id={index}",
            f"optimizer.learning_rate=0.0{index + 1}",
            output=tmp_path / f"out.{index}",
        )
        for index in range(2)
    ]
    for index, process in enumerate(running):
        code, printed = process.wait(timeout=300), (tmp_path / f"out.{index}").read_text()
        assert code == 2, printed
        assert "optimizer.learning_rate: 0.01 in process 0, 0.02 in process 1" in printed
        assert "Traceback" not in printed
    assert not (tmp_path / "logs").exists(), "nothing is left behind"
