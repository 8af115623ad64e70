"""Rules of the project as a whole: its structure, its packaging and its safety rules."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

import lm_trainer
from tests.conftest import lmt_environment

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450


def tracked_files() -> list[Path]:
    """The files under version control, or in an unpacked archive all but hidden ones."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        files = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


def python_files(*folders: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, with those inside of others."""
    return [*ast.walk(parse(path))]


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, the empty string of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def unsafe_constructs(nodes: list[ast.AST]) -> Iterator[str]:
    """Everything through which a file that is only data could run code."""
    banned_modules = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    banned_calls = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
    yield from (f"imports {m}" for m in imported_modules(nodes) if m.split(".")[0] in banned_modules)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in banned_calls:
            yield f"line {node.lineno}: calls {dotted(node.func)}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and value is not False:
                yield f"line {node.lineno}: passes {keyword.arg}"


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "eval('1')", "torch.load(f)", "np.load(f, allow_pickle=True)"],
)
def test_unsafe_constructs_are_noticed(source: str):
    assert list(unsafe_constructs([*ast.walk(ast.parse(source))]))


def test_nothing_reads_code_from_data():
    problems_by_file = {
        name_of(path): problems
        for path in python_files("lm_trainer", "cli")
        if (problems := [*unsafe_constructs(nodes(path))])
    }
    assert problems_by_file == {}


PROCESS_STATE = {
    "lm_trainer/core/hub.py": {"_answers"},
    "lm_trainer/data/tokenize/lock.py": {"_held"},
    "lm_trainer/data/tokenize/process_pool.py": {"_stop"},
}
"""Variables of modules that change while a process runs; docs/explanation/architecture.md gives the reason of each."""


CONTAINERS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "WeakKeyDictionary", "WeakValueDictionary"}


def is_empty_container(value: ast.expr | None) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=function):
            name = dotted(function.value if isinstance(function, ast.Subscript) else function)
            return name.rpartition(".")[2] in CONTAINERS and (not value.args or name.endswith("defaultdict"))
        case _:
            return False


def mutable_state(module: ast.Module) -> Iterator[str]:
    """Names of a module that are filled later: empty containers at its top, and those of `global`."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_container(node.value):
            yield from map(dotted, node.targets if isinstance(node, ast.Assign) else [node.target])
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names


@pytest.mark.parametrize(
    "source",
    [
        "a: list[int] = []",
        "a = {}",
        "a = dict[str, int]()",
        "a = collections.deque()",
        "a = defaultdict(list)",
        "def f():\n  global a\n  a = 1",
    ],
)
def test_mutable_state_is_noticed(source: str):
    assert [*mutable_state(ast.parse(source))] == ["a"]


def test_modules_hold_no_state_but_what_the_architecture_lists():
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    assert [file for file in PROCESS_STATE if file.removeprefix("lm_trainer/") not in page] == []
    state_by_file = {name_of(path): {*mutable_state(parse(path))} for path in python_files("lm_trainer", "cli")}
    assert {
        file: extra for file, names in state_by_file.items() if (extra := names - PROCESS_STATE.get(file, set()))
    } == {}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file: of the module, its classes, functions and attributes."""
    for node in nodes(path):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield node.body[0].lineno, text
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from attribute_docstrings(node.body)


def attribute_docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands directly below an assignment."""
    for assignment, below in itertools.pairwise(body):
        match assignment, below:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield below.lineno, text


def help_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each `help=` of a file."""
    for node in nodes(path):
        match node:
            case ast.keyword(arg="help", value=ast.Constant(value=str(text)) as value):
                yield value.lineno, text
            case ast.keyword(arg="help", value=ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) as value):
                yield value.lineno, text


PRONOUNS = re.compile(
    "found|each|whole|wanted|known|given|rest|ours|theirs|said|most|kept|taken|told|asked|here|there|own|mine"
)
"""Names that say nothing about the value of a variable."""
PRONOUNS_THAT_STAY = {"log.py: each"}
"""The public argument of `log`."""


def test_variables_say_what_they_hold():
    offenders = [
        f"{name_of(path)}:{line}: {name}"
        for path in python_files("lm_trainer", "cli", "benchmarks")
        for line, name in bound_names(path)
        if PRONOUNS.fullmatch(name.strip("_")) and f"{path.name}: {name}" not in PRONOUNS_THAT_STAY
    ]
    assert not offenders, "name these after their values, such as metrics, shards or entries:\n" + "\n".join(offenders)


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each variable and parameter of a file."""
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name


MANNERISMS = re.compile(r"\b(those of|that of|anew|likeliest|foretells?|in (the )?place of)\b", re.IGNORECASE)
"""Phrases that occur nowhere in comparable projects; see "Names and prose" in CONTRIBUTING.md."""


def test_docstrings_and_help_texts_are_in_plain_english():
    offenders = [
        f"{name_of(path)}:{line}: {match[0]}"
        for path in python_files("lm_trainer", "cli", "benchmarks")
        for line, text in (*docstrings(path), *help_texts(path))
        for match in MANNERISMS.finditer(text)
    ]
    assert not offenders, "say these in plain words:\n" + "\n".join(offenders)


OPENING = re.compile(r"(What|Where|How|Which|Whether|Why|When|Who|Whose|That|If|Of)\b")
"""A question word or `Of`, which leaves the reader to guess the subject of the sentence."""


def test_docstrings_open_with_a_noun_or_a_verb():
    """Help texts of keys and options count too: the reference, `lmt config schema` and `--help` show them."""
    wrong_openings = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in python_files("lm_trainer", "cli", "benchmarks", "tests")
        for line, text in (*docstrings(path), *help_texts(path))
        if OPENING.match(text)
    ]
    assert not wrong_openings, "open these docstrings with a noun or a verb:\n" + "\n".join(wrong_openings)


def test_docstrings_of_every_place_are_read(tmp_path: Path):
    source = tmp_path / "example.py"
    source.write_text(
        """'Of a module.'
LIMIT = 1
'How many.'
class Settings:
    'What it is.'
    size: int = 3
    'Whether it fits.'
    def build(self):
        'Where it is.'
option('--size', help='Which size.')
option('--name', help=f'Who {LIMIT} is.')
"""
    )
    opened = [text for _, text in (*docstrings(source), *help_texts(source)) if OPENING.match(text)]
    assert sorted(opened) == sorted(
        ["Of a module.", "How many.", "What it is.", "Whether it fits.", "Where it is.", "Which size.", "Who "]
    )


def test_files_stay_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in tracked_files() if path.suffix == ".py"}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_file_names_a_machine_or_a_package_host():
    pattern = re.compile(
        # The hosts' names are put together here, so that this file names none either.
        r"pypi[.]"
        r"org|python"
        r"hosted|npm"
        r"js|(extra-)?index-url|find-links|download\.pytorch"
        r"|/(work|root|opt|envs)/\w|/home/\w|\.pyenv|proxy\.golang"
    )
    problems = []
    for path in tracked_files():
        if path != Path(__file__).resolve():
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if match := pattern.search(line):
                    problems.append(f"{name_of(path)}:{number}: {match[0]}")
    assert problems == []


def test_the_command_line_starts_light():
    """Command modules import the heavy parts inside the command, so that `lmt --help` answers at once."""
    allowed = {"typer", "cli", *sys.stdlib_module_names}
    light = {"lm_trainer", "lm_trainer.core.errors", "lm_trainer.core.files", "lm_trainer.core.terminal"}
    heavy_imports = {
        name_of(path): heavy
        for path in python_files("cli")
        if (
            heavy := [
                module
                for module in imported_modules(parse(path).body)
                if module.split(".")[0] not in allowed and module not in light
            ]
        )
    }
    assert heavy_imports == {}


def configs() -> list[Path]:
    """Those of one family each are read by tests/run/test_configs.py, recipes by tests/run/test_recipes.py, and ladders
    by tests/ladder, without processes.
    """
    paths = sorted((ROOT / "configs").glob("**/*.yaml"))
    recipes = [path for path in paths if path.read_text(encoding="utf-8").count("# Tried here: ")]
    elsewhere = [path for path in paths if path.stem.endswith("_nano") or path.stem.startswith("ladder_")]
    return [path for path in paths if path.name == "gpt2_nano.yaml" or path not in [*elsewhere, *recipes]]


@pytest.mark.parametrize("config", configs(), ids=name_of)
def test_every_config_is_valid(config: Path, run_lmt):
    result = run_lmt("config", "check", config, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def declared_packages(*extras: str) -> set[str]:
    project = pyproject()["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {requirement_name(requirement) for group in groups for requirement in group}


def test_every_import_is_a_declared_dependency():
    distributions = importlib.metadata.packages_distributions()
    provided = {"lm_trainer", "cli", *sys.stdlib_module_names}
    declared = declared_packages("gpu", "tpu", "fast", "ray", "test")
    # These belong to jax and pydantic, which fix their versions.
    declared |= {"jaxlib", "ml-dtypes", "pydantic-core"}
    missing = {}
    for path in python_files("lm_trainer", "cli"):
        for module in imported_modules(nodes(path)):
            package = module.split(".")[0]
            providers = {requirement_name(name) for name in distributions.get(package, [package])}
            if package not in provided and not providers & declared:
                missing.setdefault(package, name_of(path))
    assert missing == {}


def test_the_constraints_pin_every_direct_dependency():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.match(r"[a-z0-9._-]+==[^ ]+( ; .+)?$", line)] == []
    extras = set(pyproject()["project"]["optional-dependencies"]) - {"gpu", "tpu"}
    assert declared_packages(*extras) - {"lm-trainer"} <= {requirement_name(line) for line in lines}


def test_the_version_stands_in_one_place():
    assert "version" in pyproject()["project"]["dynamic"]
    places = [
        name_of(path)
        for path in tracked_files()
        if path.suffix in (".py", ".toml", ".md", ".yml") and f'"{lm_trainer.__version__}"' in path.read_text()
    ]
    assert places == ["lm_trainer/__init__.py"]


def test_the_changelog_takes_entries():
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_marks_the_commands_that_ci_runs():
    commands = re.findall(r"<!-- command: (\w+) -->\n```bash\n(.+)\n```", (ROOT / "README.md").read_text())
    assert [name for name, _ in commands] == ["train", "test"]
    for _, command in commands:
        assert "-c constraints.txt" in command


def test_links_between_documents_lead_somewhere():
    broken = [
        f"{name_of(path)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists()
    ]
    assert broken == []


def test_ci_is_runnable():
    for script in ("run", "compile-constraints"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / ".ci" / script], check=True)


def test_an_installed_package_opens_its_own_command_line(tmp_path: Path) -> None:
    """As pyproject.toml lays out the wheel: `cli` below lm_trainer, and another package of that name beside it."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["lm_trainer"]
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lm_trainer", tmp_path / "lm_trainer", ignore=skip)
    for source, target in wheel["force-include"].items():
        assert target.startswith("lm_trainer/_")
        shutil.copytree(ROOT / source, tmp_path / target, ignore=skip)
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("raise SystemExit('somebody else')")
    done = subprocess.run(
        [sys.executable, "-m", "lm_trainer", "config", "check", "gpt2_nano"],
        cwd=tmp_path,
        env=lmt_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip().endswith("lm_trainer/_configs/gpt2_nano.yaml: ok")


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lm_trainer.__version__
