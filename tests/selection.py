"""The test files that a change can affect, by the graph of imports: `python -m tests.selection` prints them.

A file is selected when itself, its wing (`lm_trainer/step/` for `tests/step/`), or anything that either imports has
changed since the last full run, whose record `.ci/run --all` writes. Satellites of training in a wing, which contracts
of imports name, do not count as parts of it: tests of them import them. What no graph of imports shows selects more: a
test that starts `lmt` depends on the commands that it names, or on all of them if it names none; a program that it
writes out depends on the modules that it names; one that starts a benchmark depends on it, or on all benchmarks if a
program makes the name; and a file that no rule names selects everything. A configuration affects the tests and
benchmarks that name it, and those that read many.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("benchmarks/results/full_run.json")
PACKAGES = ("lm_trainer", "cli", "benchmarks", "tests")
IRRELEVANT = re.compile(
    r"CHANGELOG\.md|CITATION\.cff|LICENSE|CONTRIBUTING\.md|\.github/.*|\.gitignore|\.dockerignore|Dockerfile"
    r"|\.pre-commit-config\.yaml|\.ci/.*|mkdocs\.yml|benchmarks/results/.*"
)
"""Files that no slow test reads; the static checks and the quick tests, which always run, read some of them."""
ENTRY = "cli.main"
"""The module in which all commands of `lmt` come together."""
SERVER = "tests.warm_lmt"
"""The process from which those of `lmt` fork, with what it imports for them."""
STARTS_LMT = re.compile(r"(run|start|warm)_lmt|lmt_command|\blmt: Lmt\b|run_here|\bcli\b")
MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.[a-z_0-9]+)+")
SCRIPT = re.compile(r"\bbenchmarks(?:/|\" / \")(\w+)\.py\b")
STARTS_BENCHMARK = re.compile(r"benchmarks(?!/results|/workloads|\.[a-z_]| import)")
"""Benchmarks whose names a program makes; those that are written out are found as modules."""
READS_DOCUMENTS = re.compile(r"\bdocs\b|ROOT / \"README")
READS_CONFIGS = re.compile(r"configs/?[\"') /]*(?:\.glob|(?:f\")?\{)|\{\w+\}_nano")
"""All configurations, or those whose names a program makes."""


@dataclass(frozen=True)
class Selection:
    """Test files that run, with those left out; paths from the root of the project."""

    selected: list[str]
    left_out: list[str]
    reason: str


class ImportGraph:
    """Imports between the modules of the project, those inside of functions too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        packages = [name for name in PACKAGES if (root / name / "__init__.py").exists()]
        self._graph = grimp.build_graph(*packages, cache_dir=None)
        self._commands = commands(root)
        self._satellites = {
            module
            for satellite in satellites(root)
            if satellite in self._graph.modules
            for module in (satellite, *self._graph.find_descendants(satellite))
        }

    def reached_from(self, *modules: str) -> set[str]:
        """Returns these modules and all that is imported with them; nothing for a module that is not there.

        The commands are not followed from the module that collects them, nor is that module from the fixtures of all
        tests: a test starts one or two commands, or none.
        """
        reached, waiting = set[str](), [module for module in modules if module in self._graph.modules]
        not_followed = {ENTRY: set(self._commands.values()), "tests.conftest": {ENTRY, SERVER}}
        while waiting:
            if (module := waiting.pop()) not in reached:
                reached.add(module)
                imported = self._graph.find_modules_directly_imported_by(module)
                waiting += imported - not_followed.get(module, set())
                # Python runs the `__init__` of each package on the way to a module.
                if package := module.rpartition(".")[0]:
                    waiting.append(package)
        return reached

    def package(self, name: str) -> set[str]:
        """Returns all modules of a package and all that they import; satellites only where it is one."""
        if name not in self._graph.modules:
            return set()
        modules = {name, *self._graph.find_descendants(name)}
        return self.reached_from(*(modules if name in self._satellites else modules - self._satellites))

    def modules_behind(self, test: str) -> set[str]:
        """Returns every module that the test file of that path depends on."""
        path = Path(test)
        shared = [parent / "conftest.py" for parent in path.parents if (self._root / parent / "conftest.py").exists()]
        modules = self.reached_from(*(module_of(str(file)) for file in (path, *shared)))
        if len(path.parts) > 2:
            modules |= self.package(f"lm_trainer.{path.parts[1]}")
        text = self.text_of(modules, "tests")
        modules |= self.reached_from(*MODULE.findall(text))
        if STARTS_LMT.search(text):
            modules |= self._started(text)
        if STARTS_BENCHMARK.search(text):
            modules |= self.package("benchmarks")
        return modules

    def text_of(self, modules: set[str], *packages: str) -> str:
        """Returns the source of the modules of these packages, but for what all tests share."""
        names = {name for name in modules if name.split(".")[0] in packages} - {"tests.conftest", "tests.selection"}
        return SCRIPT.sub(r"benchmarks.\1", "".join(self._source(name) for name in sorted(names)))

    def reads_documents(self, test: str) -> bool:
        return bool(READS_DOCUMENTS.search(self._source(module_of(test))))

    def _started(self, text: str) -> set[str]:
        """Returns the modules of the commands that a text names, and those that these start in turn."""
        started, named = set[str](), self._named(text)
        while named - started:
            started |= named
            named = set[str]().union(*(self._named(self._source(module)) for module in started))
        return self.reached_from(ENTRY, SERVER, *(started or self._commands.values()))

    def _named(self, text: str) -> set[str]:
        # A key of a mapping, such as the section `data` of a configuration, is none.
        words = {name: rf"[\"'`]{name}(?:[\"'`](?!\s*:)|\s)|\blmt {name}\b" for name in self._commands}
        return {module for name, module in self._commands.items() if re.search(words[name], text)}

    def _source(self, module: str) -> str:
        file = self._root / module.replace(".", "/")
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        return file.read_text(encoding="utf-8")


def commands(root: Path) -> dict[str, str]:
    """Returns the module of each command of `lmt` by the command's name, as `cli/main.py` registers them."""
    modules = dict[str, str]()
    for node in ast.walk(ast.parse((root / "cli/main.py").read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Call(args=[ast.Constant(value=str(name)), *_]), args=[ast.Attribute(value=module)]):
                modules[name] = f"cli.{ast.unparse(module)}"
            case ast.Call(func=ast.Call(), args=[ast.Attribute(value=module, attr=name)]):
                modules[name.replace("_", "-")] = f"cli.{ast.unparse(module)}"
            case ast.Call(
                args=[ast.Attribute(value=module)], keywords=[ast.keyword("name", ast.Constant(value=str(name)))]
            ):
                modules[name] = f"cli.{ast.unparse(module)}"
            case _:
                pass
    return modules


def satellites(root: Path) -> set[str]:
    """Returns the modules that the contracts of imports protect: nothing imports them but what these contracts name."""
    file = root / "pyproject.toml"
    tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}) if file.exists() else {}
    contracts = tools.get("importlinter", {}).get("contracts", [])
    return {module for contract in contracts for module in contract.get("protected_modules", [])}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def affects(path: str, test: str, graph: ImportGraph, modules: set[str]) -> bool:
    """Tells whether a changed file, known to be relevant, can affect a test file that depends on these modules."""
    if path.endswith(".py") and path.split("/")[0] in PACKAGES:
        return module_of(path) in modules
    if path.startswith("tests/"):
        return Path(path).parts[:2] == Path(test).parts[:2]  # golden numbers, samples
    if path.endswith(".md") or path.startswith("docs/"):
        return graph.reads_documents(test)
    if path.startswith("configs/"):
        if graph.reads_documents(test) or STARTS_BENCHMARK.search(graph.text_of(modules, "tests")):
            return True
        named = rf"\b{re.escape(Path(path).stem)}\b"
        return bool(re.search(f"{named}|{READS_CONFIGS.pattern}", graph.text_of(modules, "tests", "benchmarks")))
    if path.startswith("benchmarks/"):
        return any(name.startswith("benchmarks.") for name in modules)
    return True  # constraints.txt, pyproject.toml, data of the package, a kind of file that is new


def select(root: Path, tests: Iterable[str], changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Splits test files into those that any of the changed files can affect and all others."""
    graph, relevant = ImportGraph(root), [path for path in changed if not IRRELEVANT.fullmatch(path)]
    selected, left_out = [], []
    for test in tests:
        modules = graph.modules_behind(test)
        hit = any(affects(path, test, graph, modules) for path in relevant)
        (selected if hit else left_out).append(test)
    return selected, left_out


def changed_since(root: Path, commit: str) -> list[str] | None:
    """Returns the paths that differ from that commit, under their old and new names; None where git does not know it.

    A clone without history does not know it.
    """
    command = ["git", "diff", "--name-only", "--no-renames", "-z", commit, "HEAD", "--"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return [path for path in done.stdout.split("\0") if path] if done.returncode == 0 else None


def recorded_commit(root: Path) -> str | None:
    """Returns the commit of the last full run on file; None for the record of a part."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        commit, full = record["commit"], record["all"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if full is True and isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit) else None


def marked_files(root: Path, marker: str) -> list[str]:
    """Returns the test files that name this marker, themselves or in the fixtures of their directory."""
    word = re.compile(rf"mark\.{marker}\b")

    def named(file: Path) -> bool:
        return file.exists() and bool(word.search(file.read_text(encoding="utf-8")))

    files = sorted((root / "tests").rglob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in files if named(file) or named(file.parent / "conftest.py")]


def selection(root: Path, marker: str, everything: bool = False) -> Selection:
    """Returns which files of tests with this marker a run of them needs, and the reason."""
    tests = marked_files(root, marker)
    if everything:
        return Selection(tests, [], "all were asked for")
    commit = recorded_commit(root)
    if commit is None:
        return Selection(tests, [], f"{RECORD} names no commit of a full run")
    changed = changed_since(root, commit)
    if changed is None:
        return Selection(tests, [], f"git does not know {commit[:8]}, the commit of the last full run")
    selected, left_out = select(root, tests, changed)
    return Selection(selected, left_out, f"changed since {commit[:8]}, the commit of the last full run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marker", help="the marker of the tests: slow, aot")
    parser.add_argument("--all", action="store_true", help="select every file")
    parser.add_argument("--shard", default="1/1", help="the part of the files to print: 2/3 is the second of three")
    options = parser.parse_args()
    index, count = map(int, options.shard.split("/"))
    chosen = selection(ROOT, options.marker, options.all)
    print(
        f"tests marked {options.marker}: {len(chosen.selected)} files are selected ({chosen.reason})", file=sys.stderr
    )
    for test in chosen.left_out:
        print(f"  left out, nothing that it depends on has changed: {test}", file=sys.stderr)
    if not chosen.selected:
        print("  nothing to run", file=sys.stderr)
    print("\n".join(chosen.selected[index - 1 :: count]))


if __name__ == "__main__":
    main()
