"""Exports during training: what is written when, what happens to an upload, and a whole run from one to the next."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.tree import nest_named_leaves
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.hub import PushedModel
from lm_trainer.export.huggingface import read_hf
from lm_trainer.models import hf
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.training import hf_exports
from lm_trainer.run.training.hf_exports import HfExports
from tests.conftest import RunLmt
from tests.export.fake_hub import fake_hub
from tests.run.test_pretrained import LLAMA, write_checkpoint

PARAMS = {
    name: jnp.asarray(np.random.default_rng(0).normal(size=leaf.shape), jnp.float32)
    for name, leaf in hf.param_infos(LLAMA, 257).items()
}


class Notes(list):
    def note(self, text: str) -> None:
        self.append(text)

    def phase(self, text: str) -> None: ...


def exports(notes: Notes, **keys: Any) -> HfExports:
    config = RunConfig.model_validate({"model": LLAMA, "hf_save_path": "out", **keys})
    hub_name = hf_exports.check_exports(config, "run")
    return HfExports(config, "run", notes, ByteTokenizer(), hub_name)  # pyright: ignore[reportArgumentType]


def export_after(step: int, exported: HfExports) -> None:
    """Exports as the loop does after a step."""
    program: Any = SimpleNamespace(
        weights_to_evaluate=lambda state: {"": {}, "ema": state},
        model=SimpleNamespace(nest=nest_named_leaves),
    )
    metrics: Any = SimpleNamespace(flush=lambda: None, train_loss=1.5, eval_losses={"wiki": 2.5, "bad": float("nan")})
    info: Any = SimpleNamespace(step=step, state=PARAMS, total_tokens=640)
    exported.export(info, program, metrics)


def test_each_step_has_a_directory_of_its_own_that_reads_back(in_tmp_path: Path) -> None:
    notes = Notes()
    with exports(notes) as exported:
        export_after(4, exported)
        export_after(8, exported)
        export_after(8, exported)  # a run that was killed comes to the same step again
    assert sorted(path.name for path in (in_tmp_path / "out" / "run").iterdir()) == ["step-4", "step-8"]
    model = read_hf(in_tmp_path / "out" / "run" / "step-8")
    assert model.config.spec(257) == LLAMA.spec(257)
    for name, tensor in load_file(in_tmp_path / "out" / "run" / "step-8" / "model.safetensors").items():
        assert tensor.dtype == np.float32, name
    card = (in_tmp_path / "out" / "run" / "step-8" / "README.md").read_text()
    assert "| Training steps | 8 |" in card
    assert "wiki (nats per token) | 2.5000 |" in card
    assert "bad" not in card
    assert notes == [f"step {step}: exported to out/run/step-{step}" for step in (4, 8, 8)]


def test_numbers_and_place_are_as_configured(in_tmp_path: Path) -> None:
    checkpointer = {"checkpointer": {"append_run_id_to_base_path": False}}
    with exports(Notes(), hf_save_dtype="bfloat16", trainer=checkpointer) as exported:
        export_after(1, exported)
    config = json.loads((in_tmp_path / "out" / "step-1" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert load_file(in_tmp_path / "out" / "step-1" / "model.safetensors")["model.norm.weight"].dtype == "bfloat16"


def test_a_model_without_a_place_in_the_format_is_refused_before_the_first_step(in_tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use_qk_norm"), exports(Notes(), model={"type": "llama", "use_qk_norm": True}):
        pytest.fail("nothing may run")
    assert list(in_tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_not_deleted(in_tmp_path: Path) -> None:
    (in_tmp_path / "out" / "run" / "step-4").mkdir(parents=True)
    (in_tmp_path / "out" / "run" / "step-4" / "thesis.txt").write_text("mine")
    with exports(Notes()) as exported, pytest.raises(UserError, match=r"thesis\.txt"):
        export_after(4, exported)


def test_uploads_follow_one_another_and_a_failed_one_ends_nothing(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, str, bool]] = []

    def push(out: Path, name: str, *, public: bool, patterns: Any, message: str) -> PushedModel:
        assert (out / "model.safetensors").is_file()
        assert "config.json" in patterns
        pushed.append((name, message, public))
        if len(pushed) == 1:
            raise MachineError("the hub cannot be reached")
        return PushedModel("https://hub/me/run", True)

    monkeypatch.setattr(hf_exports, "push", push)
    monkeypatch.setattr(hf_exports, "prepare_push", lambda name: f"me/{name}")
    notes = Notes()
    with exports(notes, hf_upload=True) as exported:
        export_after(4, exported)
        export_after(8, exported)
    assert pushed == [("me/run", "Step 4", False), ("me/run", "Step 8", False)]
    (failed,) = [note for note in notes if note.startswith("warning")]
    assert "out/run/step-4 was not uploaded: the hub cannot be reached" in failed
    assert "lmt export-hf out/run/step-4 OUT --push-to-hub me/run" in failed
    assert notes[-1] == "uploaded out/run/step-8 to https://hub/me/run"
    assert 'from_pretrained("me/run")' in (in_tmp_path / "out" / "run" / "step-8" / "README.md").read_text()


@pytest.mark.slow
def test_a_run_from_an_import_to_an_upload(run_lmt: RunLmt, tmp_path: Path, text_files: tuple[Path, Path]) -> None:
    """With next to no learning rate what comes out is what went in; the run goes on without what it started from."""
    base = tmp_path / "base"
    write_checkpoint(base, vocab_size=264)
    run = {
        "initialize_from_hf": "base",
        "use_hf_model_config": True,
        "hf_save_path": "out",
        "hf_save_steps": 1,
        "hf_upload": True,
        "data": {"tokenizer": "base", "num_workers": 0, "train_urls": [str(text_files[0])]},
        "trainer": {"id": "run", "train_batch_size": 8, "num_train_steps": 2, "sample_tokens": 0},
        "optimizer": {"learning_rate": 1e-30},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with fake_hub() as hub:
        result = run_lmt("train", "run.yaml", env=hub.environment(), timeout=900)
        assert result.returncode == 0, result.stderr
        assert "starting from the weights of base: llama" in result.stdout + result.stderr
        assert hub.repos["me/run"].private
        uploaded = hub.repos["me/run"].files["model.safetensors"]
    assert uploaded == (tmp_path / "out" / "run" / "step-2" / "model.safetensors").read_bytes()
    base_tensors = {name: x.tobytes() for file in base.glob("*.safetensors") for name, x in load_file(file).items()}
    for step in (1, 2):
        exported_tensors = load_file(tmp_path / "out" / "run" / f"step-{step}" / "model.safetensors")
        assert {name: x.tobytes() for name, x in exported_tensors.items()} == base_tensors
    for file in base.glob("[cm]*"):
        file.unlink()
    rerun = run_lmt("train", "run.yaml", "hf_upload=false", timeout=900)
    assert rerun.returncode == 0, rerun.stderr
    assert "complete already" in rerun.stdout
