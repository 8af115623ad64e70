"""Things that an attacker would look for in the repository itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.test_project import ROOT, name_of, tracked_files

# Put together, so that this file holds none of them.
SECRETS = re.compile(
    r"\bhf_[A-Za-z]{30,}\b"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\bxox[abp]-[0-9A-Za-z-]{20,}"
)
MADE_UP = {
    "token of a hub": "hf_" + "abcdefgh" * 4,
    "key of a cloud": "AKIA" + "ABCDEFGHIJKLMNOP",
    "token of a forge": "ghp_" + "a1B2" * 9,
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
}


@pytest.mark.parametrize("text", MADE_UP.values(), ids=MADE_UP)
def test_secrets_are_noticed(text: str) -> None:
    assert SECRETS.search(f"token = '{text}'")


def test_no_file_holds_a_secret() -> None:
    found = [
        f"{name_of(path)}: {match[0][:8]}..."
        for path in tracked_files()
        if (match := SECRETS.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert found == []


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))


PUBLISHING = {"publish": {"id-token": "write"}, "describe": {"contents": "write"}}


@pytest.mark.skipif(not workflows(), reason="an unpacked archive has no workflows")
def test_workflows_run_pinned_actions_with_the_least_rights() -> None:
    for path in workflows():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, name_of(path)
        for name, job in workflow["jobs"].items():
            # A job that publishes may write what it publishes, where no other job runs.
            assert job.get("permissions", {}) == PUBLISHING.get(name, {}), f"{name_of(path)}: {name}"
            for step in job["steps"]:
                uses = step.get("uses", "")
                assert not uses or re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", uses), f"{name_of(path)}: {uses}"
                if uses.startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False
                # An expression inside a script is a way in for whoever names a branch.
                assert "${{" not in step.get("run", ""), f"{name_of(path)}: {step['run']}"
