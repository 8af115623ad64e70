"""`lmt import-hf` and `lmt export-hf` as a user types them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import Lmt, RunLmt, lmt_command, lmt_environment, refused
from tests.export.fake_hub import TOKEN, Repo, fake_hub


def test_import_then_export_keeps_every_tensor_to_the_bit(
    lmt: Lmt, checkpoint: Path, hf_model: Path, tmp_path: Path
) -> None:
    result = lmt("export-hf", checkpoint, "out")
    assert result.returncode == 0, result.stderr
    before, after = (load_file(path / "model.safetensors") for path in (hf_model, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].tobytes() == after[name].tobytes(), name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (hf_model / "tokenizer.json").read_bytes()


def test_options_of_export(lmt: Lmt, checkpoint: Path, hf_model: Path, tmp_path: Path) -> None:
    result = lmt("export-hf", checkpoint / "0", "out", "--dtype", "bf16", "--max-shard-size", "100KB")
    assert result.returncode == 0, result.stderr
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    held = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    exact = load_file(hf_model / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {np.dtype(ml_dtypes.bfloat16)}
    for name, tensor in held.items():
        np.testing.assert_array_equal(tensor, exact[name].astype(tensor.dtype), err_msg=name)


def test_what_export_refuses_costs_nothing_and_destroys_nothing(lmt: Lmt, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    refused(lmt("export-hf", checkpoint, "full"), "full", "not empty")
    refused(lmt("export-hf", checkpoint, "full", "--overwrite"), "letter.txt")
    refused(lmt("export-hf", "no-such-run", "out"), "no-such-run")
    refused(lmt("export-hf", checkpoint, "out", "--step", "7"), "step 7")
    refused(lmt("export-hf", checkpoint, "out", "--max-shard-size", "much"), "much")
    refused(lmt("export-hf", checkpoint, "out", "--dtype", "fp8"), "fp8")
    refused(lmt("export-hf", checkpoint, "out", "--push-to-hub", "org/nano"), "HF_TOKEN")
    assert (tmp_path / "full" / "letter.txt").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.slow
def test_a_push_is_private_complete_and_keeps_the_token_to_itself(
    run_lmt: RunLmt, checkpoint: Path, tmp_path: Path
) -> None:
    with fake_hub() as hub:
        env = hub.environment() | {"HF_HOME": str(tmp_path / "hf")}
        result = run_lmt("export-hf", checkpoint, "out", "--push-to-hub", "org/nano", env=env)
        assert result.returncode == 0, result.stderr
        assert f"{hub.endpoint}/org/nano (private)" in result.stdout
        assert hub.repos["org/nano"] == Repo(
            private=True, files={path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        )
        hub.repos["org/nano"].private = False
        second_push = run_lmt("export-hf", checkpoint, "out", "--overwrite", "--push-to-hub", "org/nano", env=env)
        refused(second_push, "--public", "complete")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "CANARY" in TOKEN
    assert "CANARY" not in result.stdout + result.stderr + second_push.stdout + second_push.stderr
    assert b"CANARY" not in written


@pytest.mark.slow
def test_a_model_is_imported_from_the_hub_without_its_code(run_lmt: RunLmt, hf_model: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        files = {path.name: path.read_bytes() for path in hf_model.iterdir()}
        hub.repos["org/tiny"] = Repo(private=True, files=files | {"modeling.py": b"raise SystemExit('ran')"})
        env = hub.environment() | {"HF_HOME": str(tmp_path / "hf")}
        result = run_lmt("import-hf", "org/tiny", "imported", env=env)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "imported" / "config.yaml").is_file()
        assert not any("modeling.py" in request for request in hub.requests)
        refused(run_lmt("import-hf", "org/missing", "other", env=env), "org/missing")


def test_what_import_refuses(lmt: Lmt, hf_model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    refused(lmt("import-hf", hf_model, "there"), "there", "not empty")
    refused(lmt("import-hf", "./missing", "out"), "missing: no such directory")
    refused(lmt("import-hf", "org/name", "out"), "org/name", "HF_HUB_OFFLINE")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (pickled / name).write_bytes((hf_model / name).read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")
    refused(lmt("import-hf", pickled, "out"), "pytorch_model.bin is a pickle")
    (pickled / "model.safetensors").write_bytes(b"\xff" * 100)
    refused(lmt("import-hf", pickled, "out"), "model.safetensors: damaged")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_no_model(lmt: Lmt, checkpoint: Path, tmp_path: Path) -> None:
    stop = "import os, lm_trainer.export.huggingface as h; h.write_weights = lambda *a, **k: os.kill(os.getpid(), 9)"
    program = f"{stop}\nfrom cli.main import main; main()"
    command = lmt_command("export-hf", checkpoint, tmp_path / "out")
    command[command.index("-c") + 1] = program
    killed = subprocess.run(command, env=lmt_environment(), capture_output=True, timeout=300, check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()
    assert lmt("export-hf", checkpoint, tmp_path / "out").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
