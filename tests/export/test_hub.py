"""Pushing to and fetching from a hub, in a process of its own, because the hub's client reads its settings once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.hub import check_push
from tests.core.forks import run_fork
from tests.export.fake_hub import TOKEN, FakeHub, Repo, fake_hub

PATTERNS = ["README.md", "config.json", "model*.safetensors", "model.safetensors.index.json"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        yield served


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):
        (out / name).write_bytes(name.encode())
    return out


def client(code: str, env: dict[str, str], tmp_path: Path, imports: str = "") -> CompletedProcess[str]:
    """Runs `code` with the functions of the hub module, and reports an error as the command line would."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom lm_trainer.core.errors import UserError\n"
        f"from lm_trainer.export.hub import download, push\n{imports}"
        f"try:\n    print({code})\n"
        "except UserError as error:\n    print('error:', error, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return run_fork(program, env={**clean, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path), **env})


def push(exported: Path, env: dict[str, str], *, public: bool = False) -> CompletedProcess[str]:
    code = f"push(Path({str(exported)!r}), 'org/nano', public={public}, patterns={PATTERNS!r})"
    return client(code, env, exported.parent)


@pytest.mark.slow
def test_push_makes_a_private_repository_with_the_listed_files_alone(hub: FakeHub, exported: Path) -> None:
    (exported / "secret.env").write_text("no pattern lists this file")
    result = push(exported, hub.environment())
    assert result.returncode == 0, result.stderr
    assert hub.repos["org/nano"].private
    assert hub.repos["org/nano"].files == {
        name: name.encode() for name in ("README.md", "config.json", "model.safetensors")
    }
    assert f"url='{hub.endpoint}/org/nano'" in result.stdout
    assert "private=True" in result.stdout


def test_public_is_said_by_the_user(hub: FakeHub, exported: Path) -> None:
    result = push(exported, hub.environment(), public=True)
    assert result.returncode == 0, result.stderr
    assert not hub.repos["org/nano"].private


def test_an_existing_public_repository_gets_nothing_unless_public_was_said(hub: FakeHub, exported: Path) -> None:
    hub.repos["org/nano"] = Repo(private=False)
    result = push(exported, hub.environment())
    assert result.returncode == 2
    assert "--public" in result.stderr
    assert hub.repos["org/nano"].files == {}


def test_stale_weights_of_an_earlier_push_are_deleted(hub: FakeHub, exported: Path) -> None:
    own_file, stale = "notes.md", ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    hub.repos["org/nano"] = Repo(private=True, files=dict.fromkeys((own_file, *stale), b"old"))
    assert push(exported, hub.environment()).returncode == 0
    assert sorted(hub.repos["org/nano"].files) == sorted([own_file, "README.md", "config.json", "model.safetensors"])


def test_without_a_token_nothing_is_asked_of_the_hub(hub: FakeHub, exported: Path) -> None:
    stored = exported.parent / "hf" / "token"
    stored.parent.mkdir()
    stored.write_text(TOKEN)
    result = push(exported, hub.environment(token=None))
    assert result.returncode == 2
    assert "HF_TOKEN" in result.stderr
    assert hub.requests == []


@pytest.mark.parametrize("token", ["hf_WRONGwrongWRONG", "hf_WRONG\nwrongWRONG"], ids=["refused", "malformed"])
def test_a_bad_token_is_named_by_its_variable_and_never_shown(hub: FakeHub, exported: Path, token: str) -> None:
    result = push(exported, hub.environment(token=token))
    assert result.returncode == 2
    assert "HF_TOKEN" in result.stderr
    assert "WRONG" not in result.stdout + result.stderr
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("status", "code", "words"), [(401, 2, "HF_TOKEN"), (403, 2, "write"), (404, 2, "no such"), (500, 1, "failed")]
)
def test_what_the_hub_answers_becomes_one_line(
    hub: FakeHub, exported: Path, status: int, code: int, words: str
) -> None:
    hub.answer = status
    result = push(exported, hub.environment())
    assert result.returncode == code
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert TOKEN not in result.stderr


def test_a_hub_that_cannot_be_reached(hub: FakeHub, exported: Path) -> None:
    result = push(exported, hub.environment() | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert result.returncode == 1
    assert "cannot be reached" in result.stderr
    assert TOKEN not in result.stderr


def test_a_hub_that_is_switched_off(hub: FakeHub, exported: Path) -> None:
    result = push(exported, hub.environment() | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE" in result.stderr


@pytest.mark.parametrize("name", ["nano", "a/b/c", "org/na me", "org/..", "org/nano.git", "", "../x"])
def test_malformed_names_are_refused_before_anything_is_asked(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(name))):
        check_push(name)


def test_download_takes_weights_configuration_and_tokenizer_but_no_code(hub: FakeHub, tmp_path: Path) -> None:
    expected = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    expected |= dict.fromkeys(("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"), b"carried")
    expected |= dict.fromkeys(("preprocessor_config.json", "adapter_config.json", "generation_config.json"), b"{}")
    refused = {"modeling_evil.py": b"import os", "pytorch_model.bin": b"pickle"}
    hub.repos["org/nano"] = Repo(private=False, files=expected | refused)
    result = client("download('org/nano')", hub.environment(token=None), tmp_path)
    assert result.returncode == 0, result.stderr
    local = Path(result.stdout.strip())
    assert {path.name: path.read_bytes() for path in local.iterdir()} == expected


def test_tokenizers_come_with_all_of_their_files(hub: FakeHub, tmp_path: Path) -> None:
    files = ByteTokenizer().files()
    further = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model", "vocab.json")
    files |= dict.fromkeys(further, b"{{ x }}")
    code = {"modeling_evil.py": b"", "training_args.bin": b""}
    hub.repos["org/nano"] = Repo(private=False, files={**files, **code})
    code_of_names = "sorted(load_pretrained(Pretrained(name='org/nano')).files())"
    program = (
        "from lm_trainer.data.tokenizer import Pretrained\nfrom lm_trainer.data.tokenizer.hf import load_pretrained\n"
    )
    result = client(code_of_names, hub.environment(token=None), tmp_path, program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(sorted(files))
    # Once more without the hub, from what was downloaded.
    offline = client(code_of_names, {**hub.environment(token=None), "HF_HUB_OFFLINE": "1"}, tmp_path, program)
    assert offline.stdout == result.stdout, offline.stderr


def test_downloading_what_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    result = client("download('org/missing')", hub.environment(), tmp_path)
    assert result.returncode == 2
    assert "org/missing" in result.stderr
