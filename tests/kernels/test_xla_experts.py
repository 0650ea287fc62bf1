"""The xla backend's memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import grouped_experts
from tests.kernels.expert_cases import STORAGES, random_experts


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("storage", STORAGES)
def test_no_copy_of_expert_weights(storage: str, rows: int) -> None:
    """Nothing is widened, transposed or gathered outside the loop: a copy of one projection would be a third."""
    hidden, ffn, count, k = 256, 96, 64, 4
    experts = random_experts(np.random.default_rng(0), storage, hidden, ffn, experts=count)
    arguments = jnp.ones((rows, hidden)), jnp.zeros((rows, k), jnp.int32), jnp.ones((rows, k)), experts
    compiled = jax.jit(functools.partial(grouped_experts, backend="xla")).lower(*arguments).compile()
    weight_bytes = sum(part.nbytes for part in jax.tree.leaves(experts))
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes / 5
