"""The means by which the tests take less time: kept programs, warm processes, and a selection of the slow tests."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tests import compile_cache
from tests.compile_cache import open_cache, seal_cache
from tests.conftest import ROOT, SLOW_FILES, RunLmt, lmt_command, lmt_environment
from tests.hangs import HANG_SECONDS
from tests.record import record
from tests.selection import ImportGraph, marked_files
from tests.warm_lmt import WarmLmt


def entry(directory: Path, name: str, content: bytes = b"program" * 100) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(content))
    return path


def opened(base: Path) -> Path:
    directory = open_cache(base)
    assert directory is not None
    return directory


def test_intact_programs_are_kept_and_damaged_ones_removed(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    intact, flipped, truncated = entry(directory, "a"), entry(directory, "8-threads/b"), entry(directory, "c")
    cut_before_the_end = entry(directory, "d")
    cut_before_the_end.write_bytes(cut_before_the_end.read_bytes()[:-5])
    seal_cache(directory)
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    truncated.write_bytes(truncated.read_bytes()[:10])
    of_a_session_that_was_killed = entry(directory, "e")
    assert opened(tmp_path) == directory
    assert intact.exists()
    assert not any(path.exists() for path in (flipped, truncated, cut_before_the_end, of_a_session_that_was_killed))


def test_what_another_session_is_writing_is_spared(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    written = entry(directory, "a")
    with (directory / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        opened(tmp_path)
        assert written.exists()
    opened(tmp_path)
    assert not written.exists()


@pytest.mark.parametrize("digests", ["", "{", "[1]", '{"a": 1}'])
def test_digests_that_cannot_be_read_cost_the_programs(tmp_path: Path, digests: str) -> None:
    directory = opened(tmp_path)
    program = entry(directory, "a")
    (directory / "digests.json").write_text(digests)
    assert opened(tmp_path) == directory
    assert not program.exists()


def test_what_was_written_first_goes_where_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = opened(tmp_path)
    programs = [entry(directory, name, os.urandom(1000)) for name in ("a", "b", "c")]
    for age, path in enumerate(programs):
        os.utime(path, (10 - age, 10 - age))
    seal_cache(directory)
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 2500)
    opened(tmp_path)
    assert [path.exists() for path in programs] == [True, True, False]


def test_other_versions_and_processors_have_programs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = {opened(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.importlib.metadata, "version", lambda _: "9.9")
        directories.add(opened(tmp_path))
    monkeypatch.setattr(compile_cache, "_cpu_features", lambda: ["flags: none"])
    directories.add(opened(tmp_path))
    assert len(directories) == 3


def test_a_place_that_takes_no_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert open_cache(tmp_path / "file") is None

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    directory = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    assert open_cache(tmp_path) is None
    seal_cache(tmp_path / "file")
    assert directory.exists()


READ = """
import sys
import jax

print(jax.jit(lambda x: 3 * x + 1)(jax.numpy.arange(4.0)).tolist())
"""


@pytest.mark.slow
def test_a_program_that_is_cut_off_is_compiled_again(tmp_path: Path) -> None:
    def computed() -> str:
        command = [sys.executable, "-W", "ignore", "-c", READ]
        env = lmt_environment(env={"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    first = computed()
    programs = list(tmp_path.glob("*-cache"))
    assert programs
    for path in programs:
        path.write_bytes(path.read_bytes()[:-20])
    assert computed() == first == "[1.0, 4.0, 7.0, 10.0]\n"


@pytest.mark.slow
def test_a_warm_process_does_as_a_fresh_one(run_lmt: RunLmt, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {num_leyers: 2}\n")
    for args in (["config", "check", "run.yaml"], ["config", "show", "gpt2_nano"]):
        command, env = lmt_command(*args), lmt_environment()
        fresh = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        warm = run_lmt(*args)
        assert (warm.returncode, warm.stdout, warm.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_warm_processes_have_their_own_devices_run_at_once_and_end_in_time(warm_lmt: WarmLmt, tmp_path: Path) -> None:
    one, three = lmt_environment(), lmt_environment(devices=3)
    assert warm_lmt.takes(one)
    assert warm_lmt.takes(three)
    assert not warm_lmt.takes(lmt_environment(env={"OMP_NUM_THREADS": "2"}))
    os.mkfifo(tmp_path / "waits.yaml")
    waiting = ["config", "check", "waits.yaml"]
    with (tmp_path / "out").open("wb") as out:
        slow = warm_lmt.start(waiting, cwd=tmp_path, env=one, stdout=out, stderr=out)
        assert slow.poll() is None
        assert warm_lmt.run(["--version"], cwd=tmp_path, env=three, timeout=HANG_SECONDS).returncode == 0
        slow.kill()
        assert slow.wait() == slow.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        warm_lmt.run(waiting, cwd=tmp_path, env=one, timeout=0.1)
    assert warm_lmt.run(["--bogus"], cwd=tmp_path, env=one, timeout=HANG_SECONDS).returncode == 2


IMPORTED = """
import json, sys
import pytest, tests.conftest, {module}

names = ("lm_trainer", "cli", "tests", "benchmarks")
print(json.dumps([name for name in sys.modules if name.split(".")[0] in names]))
"""


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("tests/optim/test_kron.py", marks=pytest.mark.exhaustive),
        pytest.param("tests/plan/test_search.py", marks=pytest.mark.slow),
    ],
)
def test_the_graph_holds_what_python_imports(test: str) -> None:
    module = test.removesuffix(".py").replace("/", ".")
    command = [sys.executable, "-c", IMPORTED.format(module=module)]
    done = subprocess.run(command, cwd=ROOT, env=lmt_environment(), capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert f"lm_trainer.{Path(test).parts[1]}" in {".".join(name.split(".")[:2]) for name in imported}
    # The server of `lmt` is imported with the fixtures of all tests; these start no `lmt`.
    assert imported - {"benchmarks", "tests.warm_lmt"} <= ImportGraph(ROOT).modules_behind(test)


def test_every_file_with_slow_tests_is_known(pytestconfig: pytest.Config) -> None:
    """The quick suite collects all files, and a session with one file that file alone."""
    collected = pytestconfig.stash[SLOW_FILES]
    assert "tests/test_gate.py" in collected
    assert collected <= set(marked_files(ROOT, "slow"))


FILES = {
    "lm_trainer/__init__.py": "",
    "lm_trainer/deep.py": "",
    "lm_trainer/upper.py": "def f():\n    import lm_trainer.deep\n",
    "lm_trainer/wing/__init__.py": "",
    "lm_trainer/wing/part.py": "import lm_trainer.upper\n",
    "lm_trainer/wing/satellite.py": "import lm_trainer.wing.part\n",
    "pyproject.toml": "[[tool.importlinter.contracts]]\nprotected_modules = ['lm_trainer.wing.satellite']\n",
    "cli/__init__.py": "",
    "cli/main.py": "from cli import build, show\napp.command()(build.build)\napp.add_typer(show.app, name='show')\n",
    "cli/build.py": "import lm_trainer.wing.part\n",
    "cli/show.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/wing/__init__.py": "",
    "tests/wing/golden.json": "{}",
    "tests/wing/test_part.py": "# mark.slow\n",
    "tests/wing/test_satellite.py": "# mark.slow\nimport lm_trainer.wing.satellite\n",
    "tests/other/__init__.py": "",
    "tests/other/test_command.py": "# mark.slow\ndef test(run_lmt): run_lmt('build')\n",
    "tests/other/test_another.py": "# mark.slow\nMADE = {'build': 1}\ndef test(run_lmt): run_lmt('show', 'a')\n",
    "tests/other/test_all.py": "# mark.slow\ndef test(run_lmt, name): run_lmt(name)\n",
    "tests/other/test_program.py": "# mark.slow\nPROGRAM = 'from lm_trainer.upper import f'\n",
    "tests/other/test_alone.py": "# mark.slow\n",
    "tests/other/test_shape.py": "# mark.slow\nimport tests.shapes\n",
    "tests/shapes.py": "SHAPE = 'one_nano'\n",
    "tests/other/test_shapes.py": "# mark.slow\nALL = ('x' / 'configs').glob('*.yaml')\n",
    "benchmarks/__init__.py": "",
    "benchmarks/measure.py": "import benchmarks.timing\n",
    "benchmarks/timing.py": "",
    "benchmarks/other.py": "",
    "tests/other/test_measure.py": '# mark.slow\nSCRIPT = ROOT / "benchmarks" / "measure.py"\n',
    "configs/one_nano.yaml": "",
    "configs/two_nano.yaml": "",
    "tests/other/test_quick.py": "",
    "constraints.txt": "",
    "CHANGELOG.md": "",
}
PART = "tests/wing/test_part.py"
COMMAND, ANOTHER, ALL, PROGRAM, ALONE, SHAPE, SHAPES, MEASURE = (
    f"tests/other/test_{name}.py"
    for name in ("command", "another", "all", "program", "alone", "shape", "shapes", "measure")
)
SATELLITE = "tests/wing/test_satellite.py"
EVERYTHING = {PART, SATELLITE, COMMAND, ANOTHER, ALL, PROGRAM, ALONE, SHAPE, SHAPES, MEASURE}


class Project:
    """A small project under version control, with the selection in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)
        self.write("tests/selection.py", (ROOT / "tests/selection.py").read_text())
        self.git("init", "-q")
        self.record(self.commit())
        self.commit()

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def git(self, *args: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *args], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def record(self, commit: str, full: bool = True) -> None:
        self.write("benchmarks/results/full_run.json", json.dumps({"commit": commit, "all": full}))

    def selected(self, *options: str) -> tuple[set[str], str]:
        command = [sys.executable, "-m", "tests.selection", "slow", *options]
        env = {name: value for name, value in lmt_environment().items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=True)
        return set(done.stdout.split()), done.stderr

    def selected_after(self, *changed: str) -> set[str]:
        """Returns what these changes select, which are undone."""
        for name in changed:
            self.write(name, FILES.get(name, "") + "\n")
        self.commit()
        selected, _ = self.selected()
        self.git("reset", "-q", "--hard", "HEAD~1")
        return selected


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


def test_nothing_is_selected_where_nothing_has_changed_and_that_is_said(project: Project) -> None:
    selected, output = project.selected()
    assert selected == set()
    assert "nothing to run" in output
    assert all(f"left out, nothing that it depends on has changed: {test}" in output for test in EVERYTHING)
    assert project.selected("--all")[0] == EVERYTHING


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("lm_trainer/deep.py", {PART, SATELLITE, COMMAND, ALL, PROGRAM}),
        ("lm_trainer/wing/satellite.py", {SATELLITE}),
        ("cli/show.py", {ANOTHER, ALL}),
        ("cli/main.py", {COMMAND, ANOTHER, ALL}),
        (ALONE, {ALONE}),
        ("tests/wing/golden.json", {PART, SATELLITE}),
        ("tests/conftest.py", EVERYTHING),
        ("constraints.txt", EVERYTHING),
        ("lm_trainer/template.html", EVERYTHING),
        ("benchmarks/timing.py", {MEASURE}),
        ("benchmarks/other.py", set()),
        ("configs/one_nano.yaml", {SHAPE, SHAPES}),
        ("configs/two_nano.yaml", {SHAPES}),
        ("CHANGELOG.md", set()),
    ],
)
def test_a_change_selects_what_it_can_affect(project: Project, changed: str, expected: set[str]) -> None:
    assert project.selected_after(changed) == expected


def test_shards_are_all_of_the_selection(project: Project) -> None:
    shards = [project.selected("--all", "--shard", f"{index}/2")[0] for index in (1, 2)]
    assert shards[0] | shards[1] == EVERYTHING
    assert not shards[0] & shards[1]


@pytest.mark.parametrize("commit", ["0" * 40, "", "--output=/x", None])
def test_all_are_selected_where_the_commit_of_the_last_full_run_is_not_known(
    tmp_path: Path, commit: str | None
) -> None:
    project = Project(tmp_path)
    project.record(commit) if commit is not None else project.write("benchmarks/results/full_run.json", "[")
    project.commit()
    selected, output = project.selected()
    assert selected == EVERYTHING
    assert "names no commit" in output or "git does not know" in output


def test_the_record_of_a_part_selects_all(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.record(project.git("rev-parse", "HEAD"), full=False)
    project.commit()
    assert project.selected()[0] == EVERYTHING


def test_a_record_says_what_ran(tmp_path: Path) -> None:
    (tmp_path / "seconds").write_text("static 61\ntests 400\n")
    (tmp_path / "static.log").write_text("ok\n")
    (tmp_path / "tests.log").write_text("...\n== 4365 passed, 1 skipped, 2 warnings in 361.02s (0:06:01) ==\n")
    written = record("a" * 40, tmp_path, everything=False)
    assert written["stages"] == {"static": {"seconds": 61}, "tests": {"seconds": 400, "passed": 4365, "skipped": 1}}
    assert (written["commit"], written["all"]) == ("a" * 40, False)


FREES_MEMORY = """
import numpy as np
from lm_trainer.core.runtime import keep_freed_memory, resident_bytes
from tests.compiling import free_memory

assert keep_freed_memory()
before = resident_bytes()
arrays = [np.ones(1 << 24, np.uint8) for _ in range(32)]
del arrays
assert resident_bytes() - before > 500e6
free_memory(most=1e9)
assert resident_bytes() - before > 500e6
free_memory(most=400e6)
assert resident_bytes() - before < 100e6
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can keep freed memory, and only Linux tells its size")
def test_memory_that_a_worker_keeps_is_returned_when_it_has_grown() -> None:
    subprocess.run([sys.executable, "-c", FREES_MEMORY], cwd=ROOT, check=True)
