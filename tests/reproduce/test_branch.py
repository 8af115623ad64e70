"""Branches of a tiny run: what they share, what they may change, and what each command says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_trainer.checkpoint.pins import pinned_steps
from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery
from lm_trainer.checkpoint.store import PERMANENT_KEY, CheckpointStore
from lm_trainer.run.files.listing import as_tree, list_runs
from tests.conftest import RunLmt, refused, run_here
from tests.reproduce.conftest import STEPS, as_json, metrics, on_one_device, write_config


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    with on_one_device():
        yield


def values(directory: Path, run: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = (line for line in metrics(directory, run) if "train/loss" in line)
    return {line["step"]: (line["train/loss"], line["optim/grad_norm"]) for line in lines}


def fingerprints(directory: Path, run: str) -> dict[int, str]:
    return {line["step"]: line["fingerprint"] for line in metrics(directory, run) if "fingerprint" in line}


def record(directory: Path, run: str) -> dict[str, Any]:
    return json.loads((directory / "logs" / run / "run.json").read_text())


@pytest.mark.slow
def test_an_unchanged_branch_at_a_checkpoint_goes_on_as_its_parent(copied: Path) -> None:
    result = run_here("branch", "run", "--at", "4", "same")
    assert result.returncode == 0, result.stderr
    assert "branch of run at step 4, unchanged" in result.stdout
    assert "warning" not in result.stdout
    parent = values(copied, "run")
    assert values(copied, "same") == {5: parent[5], 6: parent[6]}
    assert fingerprints(copied, "same") == {6: fingerprints(copied, "run")[6]}
    branch = record(copied, "same")["branch"]
    assert (branch["parent"], branch["step"], branch["checkpoint"]) == ("run", 4, 4)
    assert branch["differences"] == []
    assert Path(branch["directory"]) == copied / "logs/run"
    # The checkpoint is not copied, and both runs keep it.
    assert (copied / "checkpoints/same/4").resolve() == copied / "checkpoints/run/4"
    assert pinned_steps(copied / "checkpoints/run") == pinned_steps(copied / "checkpoints/same") == {4}

    report = run_here("diff", "run", "same", "--json")
    assert report.returncode == 0
    assert (as_json(report)["parting"], as_json(report)["shared"], as_json(report)["common"]) == (None, 4, STEPS)
    verified = as_json(run_here("verify", "same", "--json"))
    assert (verified["equal"], verified["stretches"][0]["fingerprints"]) == (True, 1)
    assert "was complete already" in run_here("branch", "run", "--at", "4", "same").stdout
    refused(run_here("branch", "run", "--at", "2", "same"), "is a branch of run at step 4", "choose another NAME")


@pytest.mark.slow
def test_a_branch_between_checkpoints_replays_to_its_step(copied: Path) -> None:
    result = run_here("branch", "run", "--at", "3", "half", "optimizer.learning_rate=5e-3")
    assert result.returncode == 0, result.stderr
    assert "1 steps of run to compute again, from the checkpoint of step 2" in result.stderr
    assert "optimizer.learning_rate: was 0.01, now 0.005" in result.stdout
    branch = record(copied, "half")["branch"]
    assert (branch["step"], branch["checkpoint"]) == (3, 2)
    assert branch["differences"] == ["optimizer.learning_rate: was 0.01, now 0.005"]
    # The gradient of step 4 is computed with shared weights, and the first changed weights are those after it.
    parent, own = values(copied, "run"), values(copied, "half")
    assert own[4] == parent[4]
    assert own[5] != parent[5]
    assert pinned_steps(copied / "checkpoints/run") == set(), "the branch has a copy of its own"

    result = run_here("diff", "run", "half")
    assert result.returncode == 1
    assert "steps up to 3 are shared" in result.stdout
    assert "equal up to 3, then: optimizer.learning_rate: 0.01 -> 0.005" in result.stdout
    verified = as_json(run_here("verify", "half", "--segments", "9", "--json"))
    assert verified["equal"]
    assert [(part["start"], part["end"]) for part in verified["stretches"]] == [(3, 4), (4, 6)]

    # A branch of the branch, from its past and from its own steps.
    refused(
        run_here("branch", "half", "--at", "2", "x"), "begins at step 3, as a branch of run", "lmt branch run --at 2"
    )
    result = run_here("branch", "half", "--at", "4", "second", "optimizer.weight_decay=0.3")
    assert result.returncode == 0, result.stderr
    assert "equal up to 3, then" in run_here("diff", "run", "second").stdout
    assert as_json(run_here("diff", "run", "second", "--json"))["shared"] == 3
    refused(run_here("prove", "second", "-o", "proof", "--key", "key.pem"), "second is a branch of half", "prove half")
    tree = [(depth, run.id, run.branched_at) for depth, run in as_tree(list_runs([copied / "logs"]))]
    assert tree == [(0, "run", None), (1, "half", 3), (2, "second", 4)]
    lines = run_here("runs").stdout.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:2]] == ["run"]
    assert "└ half, from 3" in lines[2]
    assert "  └ second, from 4" in lines[3]


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 3])
def test_a_branch_keeps_what_its_parent_has_from_a_published_model(hf_model: Path, in_tmp_path: Path, at: int) -> None:
    published = in_tmp_path / "published"
    shutil.copytree(hf_model, published)
    (published / "generation_config.json").write_text('{"eos_token_id": [256, 10], "temperature": 0.6, "top_p": 0.9}')
    (published / "processor_config.json").write_bytes(b'{ "processor_class": "P"}')
    start = {"initialize_from_hf": "published", "use_hf_model_config": True}
    parent = write_config(in_tmp_path)
    parent.write_text(yaml.safe_dump({**yaml.safe_load(parent.read_text()), "model": {"type": "gpt2"}, **start}))
    assert run_here("train", parent).returncode == 0
    # Only the run itself still has what it took from the published model.
    published.rename(in_tmp_path / "elsewhere")
    branch = ("branch", "run", "--at", str(at), "child", "optimizer.learning_rate=1e-3")
    assert run_here(*branch, "--prepare").returncode == 0
    assert run_here("generate", "child", "--prompt", "a", "--max-new-tokens", "2").returncode == 0
    result = run_here(*branch)
    assert result.returncode == 0, result.stderr
    for run in ("run", "child"):
        assert run_here("export-hf", run, f"out/{run}").returncode == 0
    files = {path.name for path in (in_tmp_path / "out/run").iterdir()} - {"README.md", "model.safetensors"}
    assert {"generation_config.json", "processor_config.json", "config.json"} < files
    for name in files:
        assert (in_tmp_path / "out/child" / name).read_bytes() == (in_tmp_path / "out/run" / name).read_bytes()
    assert json.loads((in_tmp_path / "out/child/generation_config.json").read_text())["eos_token_id"] == [256, 10]


def test_what_a_branch_cannot_change_is_refused_with_the_reason(copied: Path) -> None:
    def branch(*settings: str, at: int = 4, name: str = "b") -> Any:
        return run_here("branch", "run", "--at", str(at), name, *settings)

    refused(branch("model.hidden_dim=32"), "another model", "16] in the run, float32[", "and 16 more")
    refused(branch("trainer.mp=bfloat16"), "bfloat16")
    refused(branch("data.tokenizer=gpt2"), "data.tokenizer", "train a new run")
    refused(branch("trainer.initialize_from=x"), "decides the weights before step 1")
    refused(
        branch("trainer.train_batch_size=16"),
        "trainer.train_batch_size='[{start: 0, value: 8}, {start: 4, value: 16}]'",
    )
    refused(branch("trainer.num_train_steps=4"), "nothing is left after step 4")
    refused(branch("trainer.id=c"), "named by NAME")
    refused(
        branch(
            "trainer.checkpointer.append_run_id_to_base_path=false", "trainer.checkpointer.base_path=checkpoints/run"
        ),
        "would write into",
    )
    refused(branch("optimizer.learning_rat=1"), "optimizer.learning_rat")
    refused(branch(at=0), "`lmt train` starts a new run")
    refused(branch(at=7), "has done 6 steps so far")
    refused(branch(name="a/b"), "cannot name a directory")
    refused(branch(name="run"), "is the run to branch")
    refused(run_here("branch", "run", "--at", "4"), "NAME is missing")
    refused(run_here("branch", "run", "--at", "4", "optimizer.learning_rate=1"), "NAME is missing")
    refused(run_here("branch", "nothing", "--at", "4", "b"), "no run of this name")
    assert sorted(path.name for path in Path("logs").iterdir()) == ["run"]
    assert pinned_steps(copied / "checkpoints/run") == set()


@pytest.mark.slow
def test_another_optimizer_begins_its_state_and_other_data_are_read_from_the_step_on(copied: Path) -> None:
    (copied / "other.txt").write_text("other text " * 900)
    result = run_here("branch", "run", "--at", "4", "lion", "optimizer.type=lion", "data.train_urls=[other.txt]")
    assert result.returncode == 0, result.stderr
    assert "the state of the optimizer is new at step 4" in result.stdout
    assert "the data or their order change from step 4 on" in result.stdout
    assert [*values(copied, "lion")] == [5, 6]
    assert values(copied, "lion")[5] != values(copied, "run")[5]
    verified = run_here("verify", "lion", "--segments", "9", "--json")
    assert as_json(verified)["equal"], verified.stdout
    replayed = as_json(run_here("replay", "lion", "--step", "6", "--json"))
    assert replayed["now"].items() <= replayed["recorded"].items()
    causes = as_json(run_here("diff", "run", "lion", "--json"))["causes"]
    assert any(line.startswith("optimizer.type") for line in causes["configuration"])


@pytest.mark.slow
@pytest.mark.optimised
def test_a_branch_begins_and_another_stops_to_clip_attention_logits(in_tmp_path: Path) -> None:
    config = write_config(in_tmp_path, optimizer={"type": "muon"})
    assert run_here("train", config).returncode == 0
    result = run_here("branch", "run", "--at", "2", "clipped", "optimizer.qk_clip=1e-3")
    assert result.returncode == 0, result.stderr
    assert "optimizer.qk_clip: was null, now 0.001" in result.stdout
    clipped = {line["step"]: line["train/qk_clipped_heads"] for line in metrics(in_tmp_path, "clipped")
               if "train/loss" in line}  # fmt: skip
    assert [*clipped] == [3, 4, 5, 6]
    assert min(clipped.values()) > 0
    # The gradient of the first step is computed with shared weights, and the first clipped weights are those after it.
    parent, own = values(in_tmp_path, "run"), values(in_tmp_path, "clipped")
    assert own[3] == parent[3]
    assert own[4] != parent[4]
    assert as_json(run_here("verify", "clipped", "--segments", "9", "--json"))["equal"]

    result = run_here("branch", "clipped", "--at", "4", "free", "optimizer.qk_clip=null")
    assert result.returncode == 0, result.stderr
    free = values(in_tmp_path, "free")
    assert free[5] == own[5]
    assert free[6] != own[6]
    assert not any("train/qk_clipped_heads" in line for line in metrics(in_tmp_path, "free"))
    assert as_json(run_here("verify", "free", "--segments", "9", "--json"))["equal"]


def test_a_larger_batch_from_the_step_on(copied: Path) -> None:
    schedule = "trainer.train_batch_size=[{start: 0, value: 8}, {start: 4, value: 16}]"
    result = run_here("branch", "run", "--at", "4", "large", schedule, "--prepare", "--json")
    assert result.returncode == 0, result.stderr
    report = as_json(result)
    assert (report["run"], report["replayed"], report["step"]) == ("large", 0, 4)
    config = yaml.safe_load((copied / "logs/large/config.yaml").read_text())
    assert config["trainer"]["id"] == "large"
    assert metrics_missing(copied / "logs/large")
    result = run_here("train", "logs/large/config.yaml")
    assert result.returncode == 0, result.stderr
    assert [*values(copied, "large")] == [5, 6]
    assert [line["data/loss_tokens"] for line in metrics(copied, "large") if "train/loss" in line] == [16 * 16] * 2


def metrics_missing(directory: Path) -> bool:
    return not (directory / "metrics.jsonl").exists()


def test_a_replay_that_comes_out_otherwise_makes_no_branch(copied: Path) -> None:
    file = copied / "logs/run/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] == 3 and "train/loss" in line:
            line["train/loss"] = float(np.nextafter(np.float32(line["train/loss"]), np.float32(9)))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run_here("branch", "run", "--at", "3", "b")
    refused(result, "step 3 of run comes out otherwise here: train/loss", "(there are: 2, 4, 6)")
    assert not (copied / "logs/b").exists()
    assert not (copied / "checkpoints/b").exists()
    assert pinned_steps(copied / "checkpoints/run") == set()
    # The same is found by the gate for other code.
    result = run_here("branch", "run", "--at", "2", "--check", "2")
    assert result.returncode == 1
    assert "first difference: step 3, train/loss" in result.stdout


def test_the_gate_compares_steps_and_checkpoints_without_a_branch(copied: Path) -> None:
    before = sorted(str(path) for path in copied.rglob("*"))
    result = run_here("branch", "run", "--at", "3", "--check", "3")
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "equal, bit for bit: 4 steps, 2 fingerprints"
    assert sorted(str(path) for path in copied.rglob("*")) == before
    report = as_json(run_here("branch", "run", "--at", "4", "--check", "2", "trainer.steps_per_eval=5", "--json"))
    assert (report["start"], report["end"], report["steps"], report["equal"]) == (4, 6, 2, True)
    refused(run_here("branch", "run", "--at", "4", "--check", "3"), "2 can be compared after step 4")
    refused(run_here("branch", "run", "--at", "4", "b", "--check", "2"), "--check makes no branch")
    refused(run_here("branch", "run", "--at", "4", "trainer.seed=5", "--check", "2"), "would give other numbers")
    # A checkpoint with another optimizer state and equal weights is a difference.
    file = copied / "checkpoints/run/4/_CHECKPOINT_METADATA"
    content = file.read_text()
    digest = json.loads(content)["custom_metadata"]["digests"]
    name = next(name for name in digest if name.startswith("opt_state."))
    from lm_trainer.core.checksummed import with_checksum

    damaged = json.loads(content)
    damaged["custom_metadata"]["digests"][name] += 1
    damaged["custom_metadata"] = with_checksum(damaged["custom_metadata"])
    file.write_text(json.dumps(damaged))
    result = run_here("branch", "run", "--at", "2", "--check", "3")
    assert (result.returncode, f"first difference: step 4, {name}" in result.stdout) == (1, True)


def test_a_branch_whose_first_checkpoint_is_gone_says_how_to_make_it_again(copied: Path) -> None:
    assert run_here("branch", "run", "--at", "4", "b", "--prepare").returncode == 0
    (copied / "checkpoints/b/4").unlink()
    command = ("lmt branch run --at 4 b",)
    refused(run_here("train", "logs/b/config.yaml"), "is gone", *command)
    assert run_here("branch", "run", "--at", "4", "b", "--prepare").returncode == 0
    assert (copied / "checkpoints/b/4").is_symlink()
    # A run of this name that is no branch is left alone.
    file = copied / "logs/b/run.json"
    file.write_text(json.dumps({key: value for key, value in record(copied, "b").items() if key != "branch"}))
    refused(run_here("branch", "run", "--at", "4", "b"), "is a run that is no branch")


def test_pinned_checkpoints_are_not_deleted_by_either_run(tmp_path: Path) -> None:
    import jax.numpy as jnp

    from lm_trainer.checkpoint.pins import pin_step, unpin_step

    def save(store: CheckpointStore, *steps: int) -> None:
        for step in steps:
            store.save(step, {"x": jnp.ones(3)}, {PERMANENT_KEY: False})
        store.wait()

    config = CheckpointerConfig(keep=(KeepEvery(every=100),))
    store = CheckpointStore(tmp_path / "run", config)
    save(store, 1, 2)
    pin_step(tmp_path / "run", 1, "a-branch")
    save(store, 3, 4)
    assert store.steps() == [1, 3, 4]
    store.close()
    assert store.steps() == [1, 4]
    branch = tmp_path / "branch"
    branch.mkdir()
    (branch / "1").symlink_to(tmp_path / "run/1")
    pin_step(branch, 1, "a-branch")
    other = CheckpointStore(branch, config)
    save(other, 5, 6, 7)
    other.close()
    assert other.steps() == [1, 7]
    # Without the files, the policy holds again, and removing the link leaves the parent's checkpoint.
    unpin_step(branch, 1, "a-branch")
    other = CheckpointStore(branch, config)
    save(other, 8, 9)
    other.close()
    assert other.steps() == [9]
    assert not [*branch.glob(".trash*")]
    assert (tmp_path / "run/1").is_dir()


@pytest.mark.slow
def test_equal_bits_of_a_branch_on_other_devices(copied_from_four: Path, run_lmt: RunLmt) -> None:
    result = run_lmt("branch", "run", "--at", "3", "one")
    assert result.returncode == 0, result.stdout + result.stderr
    assert fingerprints(copied_from_four, "one")[6] == fingerprints(copied_from_four, "run")[6]
    assert run_here("diff", "run", "one").returncode == 0
    result = run_lmt("branch", "run", "--at", "2", "--check", "4", devices=2)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_branch_from_before_the_first_checkpoint_and_of_a_run_that_goes_on(copied: Path) -> None:
    result = run_here("branch", "run", "--at", "1", "early", "optimizer.learning_rate=5e-3")
    assert result.returncode == 0, result.stderr
    assert "1 steps of run to compute again, from the start" in result.stderr
    assert record(copied, "early")["branch"]["checkpoint"] == 0
    assert values(copied, "early")[2] == values(copied, "run")[2]
    # A run in progress has fewer steps than its configuration asks for, and holds the lock of its directory.
    shutil.rmtree("checkpoints/run/6")
    file = copied / "logs/run/metrics.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if json.loads(line)["step"] <= 4))
    from lm_trainer.run.files.directory import lock_directory

    with lock_directory(copied / "logs/run"):
        result = run_here("branch", "run", "--at", "4", "now", "--prepare")
        assert result.returncode == 0, result.stderr
        refused(run_here("branch", "run", "--at", "6", "late"), "has done 4 steps so far")


def test_a_parent_whose_text_is_gone_or_has_changed(copied: Path) -> None:
    shutil.rmtree("cache")
    text = Path("text.txt").read_text()
    Path("text.txt").unlink()
    commands = (
        ("branch", "run", "--at", "3", "b"),
        ("branch", "run", "--at", "4", "b"),
        ("branch", "run", "--at", "2", "--check", "2"),
        ("without", "run", "0", "--dry-run"),
        ("bisect", "spike", "run", "--step", "3"),
    )
    for command in commands:
        refused(run_here(*command), "there is no file text.txt; put back the text of ")
    Path("text.txt").write_text(text.replace("squared", "Squared"))
    for command in (commands[0], *commands[2:]):
        result = run_here(*command)
        refused(result, "the data of run have changed since it was trained", "put back the text, the tokenizer, or")
        assert "--allow-config-change" not in result.stderr
    assert [path.name for path in Path("logs").iterdir()] == ["run"]
    assert [path.name for path in Path("checkpoints").iterdir()] == ["run"]
    assert pinned_steps(copied / "checkpoints/run") == set()


@pytest.mark.slow
def test_a_parent_whose_cache_is_gone(copied: Path) -> None:
    # It is built again from the same text.
    shutil.rmtree("cache")
    result = run_here("branch", "run", "--at", "3", "b")
    assert result.returncode == 0, result.stderr
    assert fingerprints(copied, "b")[6] == fingerprints(copied, "run")[6]


@pytest.mark.slow
def test_a_branch_whose_parent_is_gone(copied: Path) -> None:
    assert run_here("branch", "run", "--at", "3", "copy", "optimizer.learning_rate=5e-3").returncode == 0
    assert run_here("branch", "run", "--at", "4", "linked", "optimizer.learning_rate=5e-3").returncode == 0
    shutil.rmtree("logs/run")
    shutil.rmtree("checkpoints/run")
    refused(run_here("branch", "run", "--at", "4", "b"), "run: no run of this name", "runs here: copy, linked")
    # A branch that had to be computed has a state of its own.
    assert as_json(run_here("verify", "copy", "--segments", "9", "--json"))["equal"]
    refused(
        run_here("verify", "linked"),
        "linked: the checkpoint of step 4, with which the branch begins, is gone",
        "`lmt branch run --at 4 linked`",
    )
