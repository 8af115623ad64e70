"""Stand-ins for jax and what needs it, for commands that read a configuration and compute nothing.

A configuration's classes stand in the files of what they build, which import jax: two seconds of CPU time, of which a
check of a file uses nothing. While the stand-ins are installed, `import jax` and the like succeed at once. Whoever then
uses something of them in earnest ends the process's first attempt: the command starts again with the real packages.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = (
    "flax",
    "jax",
    "jaxlib",
    "ml_dtypes",
    "numpy",
    "optax",
    "orbax",
    "pyarrow",
    "rich",
    "safetensors",
    "scipy",
    "tensorstore",
)
PACKAGES += ("tokenizers",)
_FULL = "LMT_FULL_IMPORTS"
"""Set in the environment of the second attempt."""
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
"""Keeps pydantic from reading the metadata of every installed package in search of plug-ins."""


class NeededError(BaseException):
    """Something of a package is needed that is only stood in for; no `except Exception` may take it for a failure."""


class _StandIn:
    """Anything of a package: while modules are imported it can be called, subscripted and derived from."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        # Asked for by Python itself to find out what an object can do.
        if name.startswith("__"):
            raise AttributeError(name)
        return _use(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        del arguments, options
        return _use(f"{self.__name__}()")

    def __getitem__(self, key: Any) -> Any:
        return _use(f"{self.__name__}[]")

    def __setitem__(self, key: Any, value: Any) -> None:
        _use(f"{self.__name__}[] =")

    def __or__(self, other: Any) -> Any:
        return _use(f"{self.__name__}|")

    # Else Python would take items by number until one is missing, and none ever is.
    __iter__ = None
    __contains__ = None

    def __bool__(self) -> bool:
        # A class is true; of anything else the answer might be wrong, and nobody would notice.
        last = self.__name__.rpartition(".")[2]
        if last.isidentifier() and last[0].isupper() and not last.isupper():
            return True
        raise NeededError(f"bool {self.__name__}")

    def __eq__(self, other: object) -> bool:
        if self is other or _is_import():
            return self is other
        raise NeededError(f"{self.__name__} ==")

    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return _use(f"-{self.__name__}")

    __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __or__
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Derived,)

    def __instancecheck__(self, instance: Any) -> bool:
        raise NeededError(f"isinstance {self.__name__}")


class _Derived:
    """The base of classes whose own base is stood in for."""

    def __init_subclass__(cls, **options: Any) -> None:
        del options

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        del arguments, options
        return _use(cls.__qualname__)


class _Package(ModuleType):
    """A module of such a package."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _use(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def _use(name: str) -> Any:
    if not _is_import():
        raise NeededError(name)
    return _StandIn(name)


def _is_import() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


class _Held:
    """A stream whose text waits until no second attempt can write it again."""

    def __init__(self, stream: Any, texts: list[tuple[Any, str]]):
        self._stream, self._texts = stream, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # As any stream of text does: that is how typer tells it from one of bytes.
        if not isinstance(text, str):
            raise TypeError(f"expected text, got {type(text).__name__}")
        self._texts.append((self._stream, text))
        return len(text)

    def flush(self) -> None:
        pass


def _write(texts: list[tuple[Any, str]]) -> None:
    try:
        for stream, text in texts:
            stream.write(text)
            stream.flush()
    except BrokenPipeError:  # whoever read has gone
        os._exit(1)


def _is_kept(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


@contextmanager
def light_imports(arguments: Sequence[str]) -> Iterator[None]:
    """Installs the stand-ins around a command that may do without the packages; starts it anew where it needs them."""
    # Help is drawn by rich.
    able = arguments[1:2] == ["config"] and len(arguments) > 2 and "--help" not in arguments
    # What can be read only once, such as /dev/stdin, would be empty for a second attempt.
    able = able and not any(os.path.exists(each) and not _is_kept(each) for each in arguments[2:])
    if not able or _FULL in os.environ or {*PACKAGES} & sys.modules.keys():
        yield
        return
    sys.meta_path.insert(0, _Finder())
    # Making classes leaves little garbage, and looking for it takes a fifth of the time.
    gc.disable()
    if without_plugins := _PLUGINS not in os.environ:
        os.environ[_PLUGINS] = "__all__"
    streams, texts = (sys.stdout, sys.stderr), list[tuple[Any, str]]()
    sys.stdout, sys.stderr = (_Held(stream, texts) for stream in streams)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    # Also for what fails in another way on a stand-in.
    except (NeededError, Exception):
        texts.clear()
        os.environ[_FULL] = "1"
        if without_plugins:
            del os.environ[_PLUGINS]
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    finally:
        sys.stdout, sys.stderr = streams
        _write(texts)
