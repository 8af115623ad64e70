"""Python code of the user that a configuration names, such as `my_model.py:build`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home, path_problem

_REFERENCE = re.compile(r"[^:]+(\.py|\w):[A-Za-z_]\w*")
_FILE_REFERENCE = re.compile(r"[^:]+\.py:[A-Za-z_]\w*")


def check_reference(value: str) -> str:
    """Returns the name of code in a file or an installed package.

    Raises:
        ValueError: if it has another form.
    """
    if not _REFERENCE.fullmatch(value):
        raise ValueError(f"expected package.module:function or file.py:function, got {value!r}")
    _check_path(value)
    return value


def check_file_reference(value: str) -> str:
    """Returns the name of code in a file, `path/to/file.py:name`.

    Raises:
        ValueError: if it has another form.
    """
    if not _FILE_REFERENCE.fullmatch(value):
        raise ValueError(f"expected file.py:name, got {value!r}")
    _check_path(value)
    return value


def _check_path(reference: str) -> None:
    path = reference.rpartition(":")[0]
    if path.endswith(".py") and (problem := path_problem(path)):
        raise ValueError(problem)


def code_file(reference: str) -> Path:
    """Returns the file that a reference `path/to/file.py:name` names. Its path is relative to the working directory."""
    return Path(expand_home(reference.rpartition(":")[0])).absolute()


def digest_of_files(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of a file, or of the digests of several files, in hexadecimal. Reads the files, and runs
    none of them.

    Raises:
        OSError: if a file cannot be read.
    """
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def import_object(key: str, reference: str) -> object:
    """Runs the file or imports the module of a reference, and returns the object that it names.

    Args:
        key: configuration key of the reference, for messages.
        reference: `package.module:name`, or `path/to/file.py:name`.

    Raises:
        UserError: if there is no such file, module or object.
    """
    module_name, _, name = reference.rpartition(":")
    try:
        module = _load_file(key, reference) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{key}: cannot import {module_name}: {error}; install it, or name its file: path/to/file.py:{name}"
        ) from None
    if not hasattr(module, name):
        raise UserError(f"{key}: there is no function or class {name} in {module_name}")
    return getattr(module, name)


def _load_file(key: str, reference: str) -> ModuleType:
    file = code_file(reference)
    if not file.is_file():
        raise UserError(f"{key}: there is no file {file}")
    # A changed file is another module, because this process may have run the earlier one.
    name = f"lmt_code_{hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs, like any module, since classes are looked up in their module.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
