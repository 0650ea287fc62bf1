"""Fixtures that several test folders share."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from convert import convert
from tests.hf_models import DRAFTER, drafter_tensors, write_drafter, write_target

# The same examples in every run, so that a failure is a change's; `--hypothesis-profile default` draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

MOST_MAPS = 25_000  # of memory; Linux allows a process 65530
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
CHECKPOINT = CHECKPOINTS / "tiny-qwen3-moe"


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Compiled programs hold some ten maps of memory each; a process that runs out of them crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a shipped checkpoint with its drafter, once; for reading only."""
    parent = tmp_path_factory.mktemp("converted")

    def find(name: str) -> Path:
        if not (parent / name).exists():
            target, drafter = CHECKPOINTS / name / "target", CHECKPOINTS / name / "drafter"
            convert(target, parent / name, drafter=drafter if drafter.exists() else target)  # else an MTP module
        return parent / name

    return find


@pytest.fixture(scope="session")
def converted_tiny(converted: Callable[[str], Path]) -> Path:
    """The shipped Qwen3-MoE."""
    return converted(CHECKPOINT.name)


@pytest.fixture
def target_source(tmp_path: Path) -> Path:
    """A random Qwen3-MoE in Hugging Face layout, for the test to edit."""
    write_target(tmp_path / "target-source")
    return tmp_path / "target-source"


@pytest.fixture
def drafter_source(tmp_path: Path) -> Path:
    """A random EAGLE-3 head for it in SpecForge layout, with default boundaries."""
    return write_drafter(tmp_path / "drafter-source", drafter_tensors(), DRAFTER)
