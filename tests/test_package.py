"""The package as users install it: its metadata, its files, and a first run from the wheel alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests.conftest import ROOT, lmt_environment

REPOSITORY = "https://git.example/team/lm_trainer"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def build_package(source: Path, out: Path, target: str = "wheel", env: Mapping[str, str] | None = None) -> Path:
    """Builds the wheel or the source distribution (`sdist`) of a source tree, without a network."""
    inherited = {name: value for name, value in os.environ.items() if name != "LMT_REPOSITORY_URL"}
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    done = subprocess.run(command, cwd=source, env={**inherited, **(env or {})}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (package,) = out.iterdir()
    return package


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> Metadata:
    """The metadata of a wheel, every field of which is valid."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_package(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def released_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_package(ROOT, tmp_path_factory.mktemp("dist"), env={"LMT_REPOSITORY_URL": f"{REPOSITORY}/"})


@pytest.mark.slow
def test_the_metadata_are_complete(released_wheel: Path) -> None:
    metadata = metadata_of(released_wheel)
    assert metadata.name == "lm_trainer"
    assert metadata.summary
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.keywords
    classifiers = metadata.classifiers or []
    assert {"Typing :: Typed", "Environment :: Console"} < set(classifiers)
    urls = metadata.project_urls or {}
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} == set(urls)
    assert all(url.startswith(REPOSITORY) for url in urls.values())


@pytest.mark.slow
def test_the_description_has_no_link_that_leads_nowhere(wheel: Path, released_wheel: Path) -> None:
    for built, least in ((wheel, 0), (released_wheel, 30)):
        metadata = metadata_of(built)
        text = metadata.description or ""
        assert metadata.description_content_type == "text/markdown"
        assert text.startswith("# lm_trainer\n")
        targets = re.findall(r"\]\(([^)]+)\)", text)
        assert [target for target in targets if not target.startswith("https://")] == []
        linked = [target.partition("/blob/HEAD/")[2] for target in targets if target.startswith(REPOSITORY)]
        assert len(linked) >= least
        assert [path for path in linked if not (ROOT / path.partition("#")[0]).is_file()] == []
    assert metadata_of(wheel).project_urls is None


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("needs the repository")
    packaged = {"cli/": "lm_trainer/_cli/", "configs/": "lm_trainer/_configs/", "lm_trainer/": "lm_trainer/"}
    expected = {
        f"{target}{name.removeprefix(folder)}"
        for folder, target in packaged.items()
        for name in listed
        if name.startswith(folder)
    }
    assert "lm_trainer/_configs/gpt2_nano.yaml" in expected
    assert files_of(wheel) == expected


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sources = build_package(ROOT, tmp_path / "sources", "sdist")
    shutil.unpack_archive(sources, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    built = build_package(unpacked, tmp_path / "dist")
    assert files_of(built) == files_of(wheel)
    assert metadata_of(built).as_rfc822().as_string() == metadata_of(wheel).as_rfc822().as_string()


def installed(wheel: Path, directory: Path) -> Path:
    """Installs a wheel into a new environment, with the other packages of this one, and returns its programs."""
    venv.create(directory, with_pip=False)
    python = directory / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    # As a plain path it adds packages, but not the checkout, which an editable installation adds by a file of its own.
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return directory / "bin"


@pytest.mark.slow
def test_a_first_run_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "environment")
    env = {name: value for name, value in lmt_environment().items() if name != "PYTHONPATH"}
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run([programs / command[0], *command[1:]], cwd=empty, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import lm_trainer; print(lm_trainer.__file__)")
    assert where.startswith(str(tmp_path / "environment")), where
    small = ["trainer.id=first", "trainer.num_train_steps=2", "trainer.steps_per_eval=2", "trainer.max_eval_batches=1"]
    run("lmt", "train", "gpt2_nano", *small)
    assert (empty / "logs/first/metrics.jsonl").read_text().count('"train/loss"') == 2
    run("lmt", "export-hf", "first", "exported")
    assert (empty / "exported/model.safetensors").is_file()
    assert run("lmt", "config", "check", "llama_8b", "--no-files").rstrip().endswith(": ok")


def copied_into_the_image() -> list[str]:
    """Files and folders that the Dockerfile copies from the source tree."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


@pytest.mark.slow
def test_the_image_has_all_that_the_wheel_is_built_from(wheel: Path, tmp_path: Path) -> None:
    context = tmp_path / "src"
    context.mkdir()
    for name in copied_into_the_image():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    assert files_of(build_package(context, tmp_path / "dist")) == files_of(wheel)


def test_the_image_is_fixed_not_of_root_and_says_how_it_is_built() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases == ["${BASE}", "${BASE}"]
    assert re.search(r"^ARG BASE=python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", stage, re.MULTILINE)
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert admitted[0] == "*"
    assert {f"!{name}" for name in copied_into_the_image()} == {line for line in admitted if line.startswith("!")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"EXTRAS=(\w+)", DOCKERFILE)) <= set(extras)


def test_the_release_checks_every_python_before_it_publishes() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    match = re.search(r"python: (\[.+?\])", workflow)
    assert match is not None
    assert re.findall(r'"(3\.\d+)"', match[1]) == ["3.10", *promised]
    # Actions of others are fixed by their commit.
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in re.findall(r"uses: \S+@(\S+)", workflow))
    for script in ("build-release", "check-package"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)
        assert f"- run: .ci/{script}" in workflow
