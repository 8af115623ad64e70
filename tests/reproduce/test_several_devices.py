"""Bisection, counterfactuals and proofs on several devices, with the results of other numbers of devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Outcome, lmt_environment
from tests.reproduce.conftest import as_json, metrics, write_config
from tests.reproduce.test_prove import write_key
from tests.reproduce.test_without import DATA, LINES
from tests.warm_lmt import WarmLmt

pytestmark = pytest.mark.slow


class Recorded(NamedTuple):
    """The directory of a run with dropout, which one device computed."""

    directory: Path
    warm_lmt: WarmLmt

    def lmt(self, devices: int, *args: str | Path) -> Outcome:
        """Runs `lmt` on emulated devices."""
        environment = lmt_environment(devices=devices)
        done = self.warm_lmt.run([*map(str, args)], cwd=self.directory, env=environment, timeout=300)
        return Outcome(done.returncode, done.stdout, done.stderr)

    def train(self, devices: int, name: str, *overrides: str) -> None:
        result = self.lmt(devices, "train", "run.yaml", f"trainer.id={name}", *overrides)
        assert result.returncode == 0, result.stderr

    def locate(self, devices: int, other: str) -> dict[str, Any]:
        """Bisects the run and another one."""
        result = self.lmt(devices, "bisect", "runs", "run", other, "--json")
        assert (result.returncode, bool(result.stdout)) == (1, True), result.stderr
        report = as_json(result)
        assert report["reproduced"] == {"run": True, other: True}
        return report

    def documents_at(self, step: int) -> set[int]:
        rows = as_json(self.lmt(1, "data", "at", "run.yaml", "--step", str(step), "--json"))["rows"]
        return {int(passage["where"].rpartition(":")[2]) - 1 for row in rows for passage in row["passages"]}


LAYER_BY_LAYER = pytest.mark.parametrize("recorded", ["layer"], indirect=True)


@pytest.fixture(scope="module", params=["model", "layer"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_lmt: WarmLmt) -> Recorded:
    directory = tmp_path_factory.mktemp(f"recorded-{request.param}")
    (directory / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    write_config(
        directory,
        data=DATA,
        model={"resid_pdrop": 0.1},
        trainer={"max_devices": None, "gather": request.param},
    )
    recorded = Recorded(directory, warm_lmt)
    recorded.train(1, "run")
    return recorded


def test_the_first_difference_is_the_same_on_any_number_of_devices(recorded: Recorded) -> None:
    new = min(recorded.documents_at(5) - set[int]().union(*map(recorded.documents_at, range(1, 5))))
    changed = [line.replace("squared", "sQuared") if number == new else line for number, line in enumerate(LINES)]
    (recorded.directory / "other.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in changed))
    recorded.train(4, "other", "data.train_urls=[other.jsonl]")
    on_one = recorded.locate(1, "other")
    assert (on_one["step"], on_one["location"]["part"], on_one["location"]["operand"]) == (5, "batch", "tokens")
    assert recorded.locate(4, "other") == on_one

    recorded.train(2, "dropout", "model.resid_pdrop=0.2")
    location = recorded.locate(2, "dropout")["location"]
    assert (location["step"], location["part"], location["layer"]) == (1, "forward pass", 0)
    assert (location["microbatch"], location["microbatches"]) == (0, [*range(8)])


@LAYER_BY_LAYER
def test_gradients_of_documents_have_the_same_bits(recorded: Recorded) -> None:
    on_one, on_four = (as_json(recorded.lmt(n, "bisect", "spike", "run", "--step", "3", "--json")) for n in (1, 4))
    recorded_step = next(line for line in metrics(recorded.directory) if line["step"] == 3)
    assert on_four["size"]["grad_norm"] == recorded_step["optim/grad_norm"]
    for token in [*on_one["tokens"], *on_four["tokens"]]:
        # A loss that is computed for all rows in one program, whose sums another mesh divides differently.
        token["loss"] = pytest.approx(token["loss"], rel=1e-5)
    assert on_one == on_four


@LAYER_BY_LAYER
def test_a_counterfactual_on_four_devices_has_the_bits_of_a_run_without_the_document_on_one(recorded: Recorded) -> None:
    document = str(min(recorded.documents_at(5) - set[int]().union(*map(recorded.documents_at, range(1, 5)))))
    result = recorded.lmt(4, "without", "run", document, "--name", "without")
    assert result.returncode == 0, result.stderr
    assert "without begins at the checkpoint of step 4 of run" in result.stdout
    recorded.train(1, "never", f"data.without.documents=[{document}]")
    result = recorded.lmt(1, "diff", "never", "without")
    assert result.returncode == 0, result.stdout
    assert as_json(recorded.lmt(2, "verify", "without", "--json"))["equal"]


@LAYER_BY_LAYER
def test_a_proof_of_a_run_on_one_device_is_verified_on_four(recorded: Recorded) -> None:
    pytest.importorskip("cryptography")
    command = ("prove", "run", "-o", "proof", "--key", write_key(recorded.directory), "--checkpoints")
    result = recorded.lmt(2, *command)
    assert result.returncode == 0, result.stderr
    shutil.copyfile(recorded.directory / "lines.jsonl", recorded.directory / "proof/lines.jsonl")
    result = recorded.lmt(4, "verify", "proof", "--segments", "9")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("equal, bit for bit: 6 steps")
