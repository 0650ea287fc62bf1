"""Parity is about the mathematics: everything here compiles quickly, and PyTorch leaves the other cores alone."""

from collections.abc import Iterator

import pytest
import torch

from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Threads that wait for busy cores make small models many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
