"""Compilation for devices that are absent; `make test-aot` installs what it needs."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from ecospec_jax.ahead_of_time import Target, target


def pytest_configure(config: pytest.Config) -> None:
    """Runs on CPU, unless these tests are part of a run with others, which may want an accelerator.

    The compilers' packages are plugins of JAX; they would look for their devices.
    """
    if all(Path(arg.split("::")[0]).resolve().is_relative_to(Path(__file__).parent) for arg in config.args):
        jax.config.update("jax_platforms", "cpu")


@functools.cache
def described(name: str) -> Target | str:
    try:
        return target(name)
    except ModuleNotFoundError as error:
        return str(error)


@pytest.fixture
def absent() -> Callable[[str], Target]:
    """Describes a device by name; skips the test where its compiler is missing."""

    def find(name: str) -> Target:
        found = described(name)
        if isinstance(found, str):
            pytest.skip(found)
        return found

    return find
