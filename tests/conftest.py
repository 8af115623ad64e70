"""Fixtures of every test: JAX on 8 emulated CPU devices, no network, `lmt` in a subprocess, tiny reference checkpoints.

The environment is set before anything imports jax, which reads it only once.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lm_trainer.core.runtime import available_cores
from lm_trainer.core.xla_flags import set_cpu_flags
from tests.compile_cache import open_cache, seal_cache
from tests.compiling import compile_quickly, flags_of_processes, free_memory, free_programs
from tests.warm_lmt import IGNORED, WarmLmt, WarmProcess

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8
OPTIMISED = ("optimised", "gpu", "tpu", "aot")
"""Markers of tests whose programs XLA optimises, as it does in a run."""
SET_BY_RUNS = ("NPROC", "WANDB_SERVICE", "CRC32C_SW_MODE", "GOOGLE_AUTH_TOKEN_FOR_TESTING")
"""Variables that a run in this process leaves behind, for itself: the number of threads, W&B's service, TensorBoard."""
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


def _xla_flags(devices: int, *more: str) -> str:
    other_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_FLAG)]
    return " ".join([*other_flags, f"{_DEVICE_FLAG}={devices}", *more])


_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_COMPILE_CACHE: Path | None = None
if not _IS_WORKER:
    # Workers and the processes of tests inherit both: what one of them has compiled is compiled for all, and for later
    # sessions.
    _SESSION = tempfile.TemporaryDirectory(prefix="lmt-test-")
    _CACHES = os.environ.get("LMT_TEST_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    _COMPILE_CACHE = open_cache(Path(_CACHES) / "lm_trainer" / "tests")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_COMPILE_CACHE or f"{_SESSION.name}/compiled")
    os.environ["LMT_TEST_SESSION"] = _SESSION.name
_WORKER_DIRECTORY = f"{os.environ['LMT_TEST_SESSION']}/{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"

os.environ.update(
    {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": _xla_flags(DEVICES),
        # Thousands of programs of tests compile within milliseconds each, which are a third of the time of all.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Of GPUs alone. Their directory would be a part of the key of each program, so that those which are compiled
        # past the cache, and those of a cache that has moved, would have other keys.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        # The Python lines of each operation, which no test reads, would be a third of the time of lowering.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        # Arrays of different ranks in one operation are mostly a forgotten axis, which broadcasting would hide.
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        # There is a worker for each core: threads of NumPy and torch would wait for one another.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": f"{_WORKER_DIRECTORY}/wandb",
        "TRACKIO_DIR": f"{_WORKER_DIRECTORY}/trackio",
    }
)
# As every `lmt` on a CPU does, so that the processes of tests find what this one compiles.
set_cpu_flags()
for _secret in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(_secret, None)


SLOW_FILES = pytest.StashKey[set[str]]()
"""Files below the root in which this session has collected slow tests, whichever it runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "compile the programs of all tests as a run does, not only those of tests that are marked `optimised`"
    parser.addoption("--optimised", action="store_true", help=help_text)


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores for `-n auto`, because tests wait for disks, clocks and other processes."""
    return available_cores() + 1


@pytest.hookimpl(tryfirst=True)  # before the marker expression deselects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = (item.path for item in items if item.get_closest_marker("slow"))
    config.stash[SLOW_FILES] = {path.relative_to(ROOT).as_posix() for path in slow}


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spares the garbage collector all that was imported, and most of its visits while JAX traces programs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    if not _IS_WORKER and _COMPILE_CACHE:
        seal_cache(_COMPILE_CACHE)


def pytest_report_header() -> str:
    return f"compiled programs: {os.environ['JAX_COMPILATION_CACHE_DIR']}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets LLVM optimise what tests that are marked `optimised` compile, and saves the time in all others."""
    optimised = item.config.getoption("--optimised") or any(item.get_closest_marker(name) for name in OPTIMISED)
    compile_quickly(not optimised)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    free_memory()
    if nextitem is None or nextitem.path != item.path:
        free_programs()


@pytest.fixture(autouse=True, scope="session")
def _eight_devices() -> None:
    """Fails at once where jax was imported too early to see the settings above."""
    jax = sys.modules.get("jax")
    if jax is not None:
        assert jax.device_count() == DEVICES, "jax was imported before tests/conftest.py set the number of devices"


@pytest.fixture(autouse=True)
def _environment_is_kept() -> Iterator[None]:
    """Takes back what libraries set in the environment: what later tests start would depend on the order of tests."""
    initial = dict(os.environ)
    yield
    changed = {name for name, _ in os.environ.items() ^ initial.items()}
    for name in changed.difference(SET_BY_RUNS, IGNORED):
        os.environ.pop(name, None)
        if name in initial:
            os.environ[name] = initial[name]


@pytest.fixture(autouse=True)
def _only_loopback(_environment_is_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails here, on every machine alike."""
    import socket

    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address[0]}; tests use no network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


RunLmt = Callable[..., subprocess.CompletedProcess[str]]


def lmt_command(*args: str | Path) -> list[str]:
    """The `lmt` command line for this checkout, whether or not it is installed."""
    return [sys.executable, "-c", "from cli.main import main; main()", *map(str, args)]


def lmt_environment(*, devices: int = 1, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with `devices` emulated devices, the checkout on the path and `env` on top."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = _xla_flags(devices, *flags_of_processes())
    inherited = {name: value for name, value in os.environ.items() if name not in SET_BY_RUNS}
    return {**inherited, "XLA_FLAGS": flags, "PYTHONPATH": path, "COLUMNS": "120", **(env or {})}


def users_environment() -> dict[str, str]:
    """As `lmt_environment`, for a program of a user or a peer, which may broadcast as JAX does by default."""
    return {name: value for name, value in lmt_environment().items() if name != "JAX_NUMPY_RANK_PROMOTION"}


@pytest.fixture(scope="session")
def warm_lmt() -> Iterator[WarmLmt]:
    """The server of this process, from which processes of `lmt` fork."""
    server = WarmLmt(lmt_environment())
    yield server
    server.close()


@pytest.fixture
def run_lmt(warm_lmt: WarmLmt, tmp_path: Path) -> RunLmt:
    """`run_lmt("train", "c.yaml", cwd=..., env=..., devices=1, timeout=300)`: runs `lmt` to its end in a subprocess.

    The working directory is `tmp_path` unless given. The exit code is for the test to look at. The process has
    imported JAX already, unless the test has changed environment variables: see `tests/warm_lmt.py`. A test of what
    happens at the start runs `lmt_command`.
    """

    def run(
        *args: str | Path,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
        devices: int = 1,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        environment = lmt_environment(devices=devices, env=env)
        if warm_lmt.takes(environment):
            return warm_lmt.run([*map(str, args)], cwd=cwd, env=environment, timeout=timeout)
        return subprocess.run(
            lmt_command(*args),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


Running = WarmProcess | subprocess.Popen[bytes]
StartLmt = Callable[..., Running]


@pytest.fixture
def start_lmt(warm_lmt: WarmLmt, tmp_path: Path) -> Iterator[StartLmt]:
    """`start_lmt("train", "c.yaml", output=..., cwd=..., env=..., devices=1)`: starts `lmt` as `run_lmt` does.

    All that it prints is appended to the file `output`. What still runs at the end of the test is killed.
    """
    started: list[Running] = []

    def start(
        *args: str | Path,
        output: Path,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
        devices: int = 1,
    ) -> Running:
        environment = lmt_environment(devices=devices, env=env)
        with output.open("ab") as stream:
            if warm_lmt.takes(environment):
                process = warm_lmt.start([*map(str, args)], cwd=cwd, env=environment, stdout=stream, stderr=stream)
            else:
                process = subprocess.Popen(
                    lmt_command(*args),
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Outcome(NamedTuple):
    """The outcome of a command, with the fields of a finished process."""

    returncode: int
    stdout: str
    stderr: str


Lmt = Callable[..., Outcome]


def run_here(*args: str | Path) -> Outcome:
    """Runs `lmt` in this process; a crash is raised."""
    from typer.testing import CliRunner

    from cli.main import app

    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def lmt(in_tmp_path: Path) -> Lmt:
    """`lmt("export-hf", ...)`: runs a command in this process, in an empty directory; a crash is raised.

    What depends on the environment, on signals or on a fresh process needs `run_lmt` instead.
    """
    return run_here


def refused(result: Outcome | subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, an explanation, and no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


MakeHfModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_hf_model(tmp_path_factory: pytest.TempPathFactory) -> MakeHfModel:
    """`make_hf_model("GPT2", **config)`: a tiny random transformers checkpoint and what it computes.

    The directory holds config.json, model.safetensors and reference.npz with input_ids [2, 48] and the float32
    logits [2, 48, vocab] of the torch model. Norm gains, biases and saved buffers are random: a fresh initialisation
    has ones and zeros there, which hides mistakes. Equal arguments give the same directory, built once in a session.
    """
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    built: dict[str, Path] = {}

    def make(family: str, *, seed: int = 0, model_class: str | None = None, **config: Any) -> Path:
        name = model_class or {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
        key = repr((family, name, seed, sorted(config.items())))
        if key not in built:
            built[key] = tmp_path_factory.mktemp(family.lower())
            _write_hf_model(built[key], f"{family}Config", name, seed, config)
        return built[key]

    return make


def _write_hf_model(out: Path, config_class: str, model_class: str, seed: int, config: Mapping[str, Any]) -> None:
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(seed)
    hf_config = getattr(transformers, config_class)(**config)
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(hf_config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.ndim == 1:
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
        input_ids = torch.randint(0, hf_config.get_text_config(decoder=True).vocab_size, (2, 48), generator=generator)
        logits = model(input_ids=input_ids).logits.float()
    model.save_pretrained(out)
    np.savez(out / "reference.npz", input_ids=input_ids.numpy(), logits=logits.numpy())


TINY_GPT2 = {
    "vocab_size": 257,
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Odd sizes on purpose: a vocabulary that no power of two divides, more positions than the reference input has."""


@pytest.fixture(scope="session")
def tiny_gpt2(make_hf_model: MakeHfModel) -> Path:
    """The checkpoint that most comparisons with transformers use."""
    return make_hf_model("GPT2", **TINY_GPT2)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs the test in an empty working directory, where relative paths of a configuration do no harm."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
