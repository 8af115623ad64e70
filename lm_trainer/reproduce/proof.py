"""Proofs of a run: signed directories with its records and digests, from which others can recompute segments."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lm_trainer import __version__
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path, write_atomically
from lm_trainer.core.safe_names import check_relative_path, path_inside
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.same_data import check_same_data, open_complete_data
from lm_trainer.reproduce.signature import SIGNATURE, read_key, sign, verify_signature
from lm_trainer.run.files.fingerprint import compute_fingerprint, extend_chain
from lm_trainer.run.files.records import ENVIRONMENT, RUN
from lm_trainer.run.weights.saved_model import SETTINGS, TOKENIZER
from lm_trainer.trackers import Progress
from lm_trainer.trackers.json_lines import METRICS
from lm_trainer.trackers.jsonl import encode_non_finite

PROOF = "proof.json"
FORMAT = 1
_COPIED = ("config.yaml", TOKENIZER, SETTINGS)
"""Files and directories next to the checkpoints that reading a checkpoint needs."""


@dataclass(frozen=True)
class Proof:
    """A proof directory whose signature and digests are valid."""

    directory: Path
    statement: Mapping[str, Any]
    key: str
    """Public key that signed it, as 64 hexadecimal digits."""
    record: RunRecord
    """Record of the run, with the checkpoints that the proof contains."""


def write_proof(record: RunRecord, directory: Path, key: Path, *, checkpoints: bool) -> dict[str, Any]:
    """Writes a signed proof of a run up to its newest checkpoint, and returns its statement.

    Args:
        record: the run.
        directory: a new or empty directory.
        key: PEM file with the Ed25519 key to sign with.
        checkpoints: also copy the checkpoints.

    Raises:
        UserError: if the run recorded no fingerprint, its records contradict each other, or the key cannot be used.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"-o {directory}: the directory is not empty; name a new one")
    if checkpoints and isinstance(record.checkpoints, Bucket):
        raise UserError(
            f"--checkpoints: {record.checkpoints} is in a bucket; copy it to checkpoints/{record.id} in the proof"
        )
    if record.branch is not None:
        raise UserError(
            f"{record.id} is a branch of {record.branch.parent}, whose steps its own record does not have; prove "
            f"{record.branch.parent}, and the branch by `lmt verify`"
        )
    if not record.load_config(record.last).trainer.bitwise:
        raise UserError(
            f"{record.id} was trained with trainer.determinism: fast, which promises no bits, so others could not "
            "recompute it; train it with elastic"
        )
    # Read first, so that a wrong key leaves no directory.
    private = read_key(key)
    saved = {step: record.read_checkpoint(step) for step in record.checkpoint_steps()}
    saved = {step: content for step, content in saved.items() if content}
    if not saved or "fingerprint" not in saved[max(saved)]:
        raise UserError(f"{record.id} has no checkpoint with a fingerprint, so there is nothing to prove")
    if problem := find_contradiction(record, saved):
        raise UserError(f"{record.id}: {problem}; `lmt verify {record.id}` looks for the step")
    run_path, last = _run_path(record), max(saved)
    directory.mkdir(parents=True, exist_ok=True)
    _copy_records(record, directory / run_path, last)
    if checkpoints:
        _copy_checkpoints(record, directory / "checkpoints" / record.id)
    newest = saved[last]
    statement = {
        "format": FORMAT,
        "run": record.id,
        "path": run_path.as_posix(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "lm_trainer": __version__,
        "steps": last,
        "fingerprint": newest["fingerprint"],
        "chain": newest.get("chain"),
        "data": newest.get("data_fingerprint"),
        "identity": dict(record.identity),
        "environments": [_describe(attempt) for attempt in record.attempts],
        "checkpoints": {str(step): _digest_checkpoint(content) for step, content in saved.items()},
        "files": {name: _sha256(directory / name) for name in _list_files(directory / run_path, directory)},
    }
    content = json.dumps(encode_non_finite(statement), indent=1, sort_keys=True) + "\n"
    signature = sign(private, content.encode())
    write_atomically(directory / PROOF, content)
    write_atomically(directory / SIGNATURE, signature)
    return statement


def _run_path(record: RunRecord) -> Path:
    """Returns the path of the run directory in a proof, such that relative paths refer to the proof directory."""
    logs = local_path(record.load_config(record.last).trainer.log_dir)
    return (Path("logs") if logs.is_absolute() or ".." in logs.parts else logs) / record.id


def _copy_records(record: RunRecord, target: Path, last: int) -> None:
    target.mkdir(parents=True)
    configs = ["config.yaml", *(change["config_before"] for change in record.changes)]
    for name in (RUN, ENVIRONMENT, *configs):
        shutil.copyfile(path_inside(record.path, name, record.path / RUN), target / name)
    # Times, speeds and memory are facts of a machine, which nobody can recompute.
    steps = {step: values for step, values in record.steps.items() if values and step <= last}
    lines = (json.dumps(encode_non_finite({"step": step, **values})) for step, values in steps.items())
    (target / METRICS).write_text("".join(f"{line}\n" for line in lines))


def _copy_checkpoints(record: RunRecord, target: Path) -> None:
    assert isinstance(record.checkpoints, Path)
    for name in (*_COPIED, *map(str, record.checkpoint_steps())):
        source = record.checkpoints / name
        if source.is_dir():
            shutil.copytree(source, target / name, dirs_exist_ok=True)
        elif source.is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def _describe(attempt: Mapping[str, Any]) -> dict[str, Any]:
    keys = (
        "step",
        "python",
        "packages",
        "git",
        "code",
        "devices",
        "processes",
        "cpu_threads",
        "instructions",
        "program",
    )
    return {key: attempt[key] for key in keys if key in attempt}


def _digest_checkpoint(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "fingerprint": content.get("fingerprint"),
        "arrays": hashlib.sha256(json.dumps(content.get("digests"), sort_keys=True).encode()).hexdigest(),
        "weights": hashlib.sha256(json.dumps(content.get("hashes"), sort_keys=True).encode()).hexdigest(),
    }


def _list_files(path: Path, directory: Path) -> list[str]:
    return [file.relative_to(directory).as_posix() for file in sorted(path.rglob("*")) if file.is_file()]


def _sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None


def find_contradiction(record: RunRecord, checkpoints: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Checks that the recorded losses and gradient norms give the recorded hash chain, as far as all are recorded.

    Args:
        record: the run.
        checkpoints: content of its checkpoints, by step.

    Returns:
        The first contradiction; None if there is none.
    """
    chain = record.first_chain if record.covers_all_steps else None
    for step in range(record.start + 1, record.last + 1):
        line = record.computed.get(step, {})
        if chain is None or not {"train/loss", "optim/grad_norm"} <= line.keys():
            return None
        chain = extend_chain(chain, step, line["train/loss"], line["optim/grad_norm"])
        saved = checkpoints.get(step, {})
        if "chain" in saved and saved["chain"] != chain:
            return f"the losses and gradient norms up to step {step} do not give the hash chain of its checkpoint"
        if "hashes" in saved and compute_fingerprint(chain, saved["hashes"]) != line.get("fingerprint"):
            return f"the fingerprint of step {step} is not the one of its checkpoint"
    return None


def is_proof(path: str | Path) -> bool:
    """Returns True if a path is a proof directory."""
    return (local_path(path) / PROOF).is_file()


def read_proof(directory: Path, trusted: str | None = None) -> Proof:
    """Reads a proof, and checks its signature and all digests that need no computation.

    Args:
        directory: the proof directory.
        trusted: public key that must have signed it: a PEM file or 64 hexadecimal digits; None accepts any.

    Raises:
        UserError: if a file is missing, or something is not as signed.
    """
    try:
        content, signature = (directory / PROOF).read_bytes(), (directory / SIGNATURE).read_bytes()
        statement = json.loads(content)
    except OSError as error:
        raise UserError(f"{directory}: this is no complete proof ({error.strerror}); `lmt prove` writes one") from None
    except ValueError as error:
        raise UserError(f"{directory / PROOF} is damaged: {error}") from None
    key = verify_signature(content, signature, trusted, directory / SIGNATURE)
    if not isinstance(statement, dict) or statement.get("format") != FORMAT:
        raise UserError(f"{directory / PROOF}: this version of lm_trainer reads proofs of format {FORMAT}")
    if missing := [key for key in ("run", "path", "steps", "files", "checkpoints", "data") if key not in statement]:
        raise UserError(f"{directory / PROOF} is damaged: it has no {', '.join(missing)}")
    for name, digest in statement["files"].items():
        if _sha256(path_inside(directory, name, directory / PROOF)) != digest:
            raise UserError(f"{directory / name} is not the file that was signed")
    run_id = check_relative_path(statement["run"], directory / PROOF)
    run = RunRecord.read(path_inside(directory, statement["path"], directory / PROOF))
    checkpoints = (directory / "checkpoints" / run_id).absolute()
    record = replace(run, checkpoints=checkpoints)
    saved = {step: record.read_checkpoint(step) for step in record.checkpoint_steps()}
    for step, saved_content in saved.items():
        if _digest_checkpoint(saved_content) != statement["checkpoints"].get(str(step)):
            raise UserError(f"{checkpoints / str(step)} is not the checkpoint that was signed")
    if problem := find_contradiction(record, saved):
        raise UserError(f"{directory}: {problem}")
    return Proof(directory, statement, key, record)


def check_data(proof: Proof, progress: Progress) -> None:
    """Opens the data of the run, and compares them with the digests in the proof.

    Raises:
        UserError: if the data differ or cannot be opened.
    """
    record, step = proof.record, max(map(int, proof.statement["checkpoints"]))
    config = record.load_config(record.last)
    with contextlib.chdir(record.root), closing(open_complete_data(record.id, config, progress)) as data:
        check_same_data(record.id, data, step, proof.statement["data"])


def summary_lines(proof: Proof) -> Iterator[str]:
    """Yields a description of a proof for the user."""
    statement = proof.statement
    yield f"proof of {statement['run']}, {statement['steps']} steps, fingerprint {statement['fingerprint']}"
    yield f"signed by the key {proof.key}, {statement['created']}"
