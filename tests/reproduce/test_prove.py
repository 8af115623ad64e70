"""Signed proofs of a run: what they contain, what changes them, and segments that are computed again from them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunLmt, refused, run_here
from tests.reproduce.conftest import STEPS, as_json, metrics, on_one_device

pytest.importorskip("cryptography")


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    with on_one_device():
        yield


def write_key(directory: Path) -> Path:
    """Writes a new key to sign with, and returns its file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    file = directory / "key.pem"
    private = Ed25519PrivateKey.generate()
    file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_key(tmp_path_factory.mktemp("key"))


def prove(key: Path, *args: str) -> None:
    result = run_here("prove", "run", "-o", "proof", "--key", key, *args)
    assert result.returncode == 0, result.stderr


def test_a_proof_has_the_digests_of_the_run(copied: Path, key: Path) -> None:
    result = run_here("prove", "run", "-o", "proof", "--key", key, "--json")
    assert result.returncode == 0, result.stderr
    statement = as_json(result)
    last = next(line for line in metrics(copied) if line["step"] == STEPS and "fingerprint" in line)
    assert (statement["run"], statement["steps"], statement["fingerprint"]) == ("run", STEPS, last["fingerprint"])
    assert {*statement["checkpoints"]} == {"2", "4", "6"}
    assert {*statement["files"]} == {
        f"logs/run/{name}" for name in ("config.yaml", "env.json", "metrics.jsonl", "run.json")
    }
    assert statement["data"].keys() == {"tokens", "sources"}
    # The signature is one that OpenSSL accepts, too.
    signature = json.loads(Path("proof/signature.json").read_text())
    assert signature["key"] == statement["key"]
    Path("raw").write_bytes(bytes.fromhex(signature["signature"]))
    command = [
        "openssl",
        "pkeyutl",
        "-verify",
        "-inkey",
        str(key),
        "-rawin",
        "-in",
        "proof/proof.json",
        "-sigfile",
        "raw",
    ]
    if shutil.which("openssl"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Signature Verified Successfully" in done.stdout, done.stderr
    refused(run_here("prove", "run", "-o", "proof", "--key", key), "the directory is not empty")
    refused(run_here("prove", "run", "-o", "p", "--key", "no.pem"), "openssl genpkey -algorithm ed25519")
    refused(run_here("prove", "run", "-o", "p", "--key", "text.txt"), "no private key in PEM form")
    refused(run_here("verify", "run", "--signed-by", "0" * 64), "run is no proof")
    refused(run_here("verify", "proof", "--signed-by", "0" * 64), "signed by the key", "and not by 0000")


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda proof: edit(proof / "proof.json", '"steps": 6', '"steps": 7'), "the signature does not fit"),
    (lambda proof: edit(proof / "logs/run/metrics.jsonl", '"train/loss": ', '"train/loss": 1'), "is not the file"),
    (lambda proof: edit(proof / "logs/run/config.yaml", "seed: 0", "seed: 1"), "is not the file"),
    (lambda proof: (proof / "signature.json").unlink(), "this is no complete proof"),
    (lambda proof: edit(proof / "checkpoints/run/4/_CHECKPOINT_METADATA", "params", "parama"), "checkpoint"),
]


def test_a_changed_proof_is_refused(copied: Path, key: Path) -> None:
    prove(key, "--checkpoints")
    for number, (change, word) in enumerate(CHANGES):
        proof = copied / str(number)
        shutil.copytree("proof", proof)
        change(proof)
        refused(run_here("verify", proof), word)


def test_a_record_that_contradicts_itself_is_not_signed(copied: Path, key: Path) -> None:
    lines = metrics(copied)
    for line in lines:
        if line["step"] == 3 and "train/loss" in line:
            line["train/loss"] = float(np.nextafter(np.float32(line["train/loss"]), np.float32(9)))
    (copied / "logs/run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run_here("prove", "run", "-o", "proof", "--key", key)
    refused(result, "up to step 4 do not give the hash chain of its checkpoint")
    assert not Path("proof").exists()


def test_a_run_in_progress_is_proved_up_to_its_newest_checkpoint(copied: Path, key: Path) -> None:
    shutil.rmtree("checkpoints/run/6")
    result = run_here("prove", "run", "-o", "proof", "--key", key, "--json")
    assert result.returncode == 0, result.stderr
    statement = as_json(result)
    saved = next(line for line in metrics(copied) if line["step"] == 4 and "fingerprint" in line)
    assert (statement["steps"], statement["fingerprint"]) == (4, saved["fingerprint"])
    assert max(line["step"] for line in metrics(copied / "proof")) == 4


@pytest.mark.slow
def test_segments_are_computed_again_from_a_copy_of_the_proof(copied: Path, key: Path, run_lmt: RunLmt) -> None:
    prove(key, "--checkpoints")
    other = copied / "elsewhere"
    shutil.copytree("proof", other / "proof")
    shutil.rmtree("logs")
    shutil.rmtree("checkpoints")
    text = copied / "text.txt"
    shutil.copyfile(text, other / "proof/text.txt")
    text.unlink()
    signed_by = json.loads(Path("proof/signature.json").read_text())["key"]
    result = run_lmt("verify", "proof", "--segments", "2", "--seed", "1", "--signed-by", signed_by, cwd=other)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal, bit for bit: 4 steps"
    assert f"signed by the key {signed_by}" in result.stdout
    (other / "proof/text.txt").write_text((other / "proof/text.txt").read_text().replace("squared", "Squared"))
    shutil.rmtree(other / "proof/cache")
    refused(run_lmt("verify", "proof", cwd=other), "the data of run have changed")
