"""Programs of this directory, which take ten seconds each to compile, are kept for later sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from jax._src import compiler

from tests.compiled.kept import Compile, keep_described


@pytest.fixture(autouse=True, scope="session")
def compile_anew() -> Iterator[Compile]:
    """JAX's function that compiles, which is replaced by one that looks for kept programs first."""
    compile_program = compiler.backend_compile_and_load
    directory = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    with mock.patch.object(compiler, "backend_compile_and_load", keep_described(compile_program, directory)):
        yield compile_program
