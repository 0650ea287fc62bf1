"""Whole steps of full-width targets on eight devices: they compile, weights stay where and as they are."""

from collections.abc import Callable

import pytest

from ecospec_jax.ahead_of_time import Target
from experiments.mesh_layouts import Case, Compiled, compile_case

MOST_TEMPORARIES = 64_000_000  # far below the experts of a layer: none is copied or widened
MOST_MOVED = 1_000_000  # far below any weight: only activations, scores and tokens travel


@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_of_gpt_oss_moves_no_weights(absent: Callable[[str], Target], rows: int) -> None:
    absent("h200")
    done = compile_case(Case("gpt-oss-120b", "ep8", "h200", rows=rows, capacity=4096, layers=2))
    assert isinstance(done, Compiled)
    assert done.temporaries < MOST_TEMPORARIES
    assert done.collective_bytes < MOST_MOVED
    assert done.collectives["all-reduce"] >= 4  # attention and experts of two layers
    others = 0.02e9  # replicated: norms, routers
    assert 0 <= done.weights - done.checkpoint / 8 < others
