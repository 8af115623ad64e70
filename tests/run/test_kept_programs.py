"""Compiled programs that a run keeps: its next start compiles nothing, and damage costs a compilation, never bits."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from lm_trainer.parallel import kept_programs
from lm_trainer.parallel.kept_programs import KeptPrograms, compilation_target
from lm_trainer.run.trainer import Trainer
from tests.run.own_model import OPTIMIZER, STEPS, Bigrams, Numbered, loss, settings

REQUESTED, READ = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
RUN = Path("logs/own")


@pytest.fixture
def start(in_tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`start(steps, **changes)`: one attempt, without programs of earlier ones in memory or in JAX's cache.

    Returns the number of programs that it compiled.
    """
    events = Counter[str]()
    listen = lambda event, **_: events.update([event])  # noqa: E731
    of_tests = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]

    def start(steps: int, **changes: Any) -> int:
        jax.clear_caches()
        compilation_cache.reset_cache()
        cache = str(in_tmp_path / f"empty{len([*in_tmp_path.glob('empty*')])}")
        checkpointer = {"save_interval": "1h", "keep": [{"every": 1}]}
        base = {"jax_compilation_cache_dir": cache, "steps_per_eval": 99, "checkpointer": checkpointer}
        with Trainer(settings(**{**base, **changes}), OPTIMIZER, loss) as trainer:
            events.clear()
            state = trainer.initial_state(model_init=Bigrams)
            for info in trainer.training_steps(state, trainer.data_loader(Numbered())):
                if info.step == steps:
                    break
        return events[REQUESTED] - events[READ]

    xla_caches = jax.config.values["jax_persistent_cache_enable_xla_caches"]
    # As in runs: XLA stores its choices in the cache's directory.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir")
    jax.monitoring.register_event_listener(listen)
    yield start
    jax.monitoring.unregister_event_listener(listen)
    jax.config.update("jax_persistent_cache_enable_xla_caches", xla_caches)
    jax.config.update("jax_compilation_cache_dir", of_tests)
    compilation_cache.reset_cache()


def losses(run: Path = RUN) -> list[tuple[Any, ...]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train/loss"], line["optim/grad_norm"]) for line in lines if "train/loss" in line]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_the_next_start_compiles_nothing_and_a_damaged_program_again(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    start(STEPS, id="plain", jax_compilation_cache_dir=None)
    assert not Path("logs/plain/programs").exists(), "on a CPU, programs are kept on request"

    assert start(2, keep_programs=True) > 1
    assert start(3, keep_programs=True) == 0
    (target,) = (RUN / "programs").iterdir()
    files = sorted(target.iterdir())
    damaged = files[len(files) // 2]
    flip_a_bit(damaged)
    assert "warning" not in capsys.readouterr().out

    assert start(4, keep_programs=True) == 1
    warning = f"{damaged}: is damaged (its checksum differs); its program is compiled again"
    assert capsys.readouterr().out.count(warning) == 1
    assert start(5, keep_programs=True) == 0
    assert sorted(target.iterdir()) == files

    assert start(STEPS, keep_programs=True, max_devices=2) > 1, "other devices run other programs"
    assert losses() == losses(Path("logs/plain"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory with one program for these devices."""
    programs = KeptPrograms(tmp_path / "programs", compilation_target())
    programs.put("jit_f-12", b"machine code")
    return tmp_path / "programs"


def load(directory: Path, target: str | None = None) -> tuple[KeptPrograms, list[str]]:
    programs = KeptPrograms(directory, target or compilation_target())
    return programs, programs.load()


def test_programs_of_another_version_are_named_and_left_alone(kept: Path) -> None:
    programs, notes = load(kept)
    assert (programs.get("jit_f-12"), programs.get("jit_g-12"), notes) == (b"machine code", None, [])
    programs, (note,) = load(kept, "gpu-NVIDIA-H100-jaxlib-0.99.0")
    assert programs.get("jit_f-12") is None
    assert f"has programs for {compilation_target()}, and this is gpu-NVIDIA-H100-jaxlib-0.99.0: programs are " in note
    programs.put("jit_f-12", b"other code")
    assert load(kept)[0].get("jit_f-12") == b"machine code"
    assert load(kept, "gpu-NVIDIA-H100-jaxlib-0.99.0")[1] == []


@pytest.mark.parametrize("content", [b"", b"\x00", b"lm_trainer program 1 " + b"0" * 64 + b"\nmachine code"])
def test_files_that_are_no_programs_are_not_loaded(kept: Path, content: bytes) -> None:
    (file,) = kept.glob("*/*")
    file.write_bytes(content)
    programs, (note,) = load(kept)
    assert programs.get("jit_f-12") is None
    assert note == f"warning: {file}: is damaged (its checksum differs); its program is compiled again"


def test_programs_of_another_user_are_not_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_programs, "_find_owner", lambda directory: directory.stat().st_uid + 1)
    programs, (note,) = load(kept)
    assert programs.get("jit_f-12") is None
    assert "belongs to another user; its program is compiled again" in note


def test_a_disk_that_takes_no_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "programs").write_text("a file in the place of the directory")
    programs, notes = load(tmp_path / "programs")
    with caplog.at_level(logging.WARNING):
        for key in ("one", "two"):
            programs.put(key, key.encode())
    assert programs.get("two") == b"two"
    (message,) = caplog.messages
    assert "cannot be written" in message
    assert "the next start compiles the programs again" in message
    assert all("cannot be read" in note for note in notes)


def test_process_0_sends_its_programs_to_the_others(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(kept_programs, "broadcast_bytes", lambda content: sent.append(content) or content)
    first, _ = load(kept)
    first.put("jit_g-34", b"more\ncode")
    first.send()
    first.send()

    received = iter(sent)
    monkeypatch.setattr(kept_programs, "is_lead", lambda: False)
    monkeypatch.setattr(kept_programs, "broadcast_bytes", lambda _: next(received))
    other, notes = load(kept / "that this process does not see")
    assert (other.get("jit_f-12"), other.get("jit_g-34"), notes) == (b"machine code", None, [])
    other.send()
    other.send()
    assert other.get("jit_g-34") == b"more\ncode"
    # As after a compilation of its own, which it neither writes nor sends.
    other.put("jit_h-56", b"own code")
    assert not (kept / "that this process does not see").exists()
