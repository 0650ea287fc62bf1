"""Fixtures that several test folders share."""

from pathlib import Path

import pytest

from convert import convert
from tests.hf_models import DRAFTER, drafter_tensors, write_drafter, write_target

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tiny-qwen3-moe"


@pytest.fixture(scope="session")
def converted_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint with its drafter, converted; for reading only."""
    folder = tmp_path_factory.mktemp("converted") / CHECKPOINT.name
    convert(CHECKPOINT / "target", folder, drafter=CHECKPOINT / "drafter")
    return folder


@pytest.fixture
def target_source(tmp_path: Path) -> Path:
    """A random Qwen3-MoE in Hugging Face layout, for the test to edit."""
    write_target(tmp_path / "target-source")
    return tmp_path / "target-source"


@pytest.fixture
def drafter_source(tmp_path: Path) -> Path:
    """A random EAGLE-3 head for it in SpecForge layout, with default boundaries."""
    return write_drafter(tmp_path / "drafter-source", drafter_tensors(), DRAFTER)
