"""Bit words against Python sets."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax import expert_bits
from tests.tiny import quick_compilation
from tests.tiny_predictors import sets_of

__all__ = ["quick_compilation"]
EXPERTS = [1, 7, 31, 32, 33, 64, 70, 128]
SHAPE = (3, 2, 5)  # rows, layers, ids of each
from_ids = jax.jit(expert_bits.from_ids, static_argnums=1)


@st.composite
def many_ids(draw) -> tuple[int, np.ndarray]:
    """Ids in and outside the range, often the same, often at the edges of words."""
    experts = draw(st.sampled_from(EXPERTS))
    edges = [-33, -32, -1, 0, 31, 32, 63, 64, experts - 1, experts, experts + 1, 127, 128, 2**31 - 1, -(2**31)]
    one = st.sampled_from(edges) | st.integers(-experts, 2 * experts)
    ids = draw(st.lists(one, min_size=math.prod(SHAPE), max_size=math.prod(SHAPE)))
    return experts, np.array(ids, np.int32).reshape(SHAPE)


def python_sets(ids: np.ndarray, experts: int) -> np.ndarray:
    """A Python set for every row and layer."""
    sets = np.empty(ids.shape[:-1], object)
    for at in np.ndindex(sets.shape):
        sets[at] = {int(expert) for expert in ids[at] if 0 <= expert < experts}
    return sets


@settings(deadline=None)
@given(many_ids())
def test_equals_python_sets(case) -> None:
    experts, ids = case
    sets = python_sets(ids, experts)
    bits = from_ids(jnp.asarray(ids), experts)
    assert bits.shape == (*SHAPE[:2], expert_bits.words(experts)) and bits.dtype == jnp.uint32
    for row in range(SHAPE[0]):
        assert sets_of(bits[row]) == {(layer, e) for layer in range(SHAPE[1]) for e in sets[row, layer]}
    np.testing.assert_array_equal(expert_bits.count(bits), np.vectorize(len)(sets))

    by_layer = [set.union(*column) for column in sets.T]
    assert sets_of(expert_bits.union(bits, axis=0)) == {(layer, e) for layer, s in enumerate(by_layer) for e in s}
    everything = set.union(*by_layer)
    for axes in ((0, 1), (-3, 1), [1, -3]):
        assert sets_of(expert_bits.union(bits, axis=axes)[None]) == {(0, e) for e in everything}
    np.testing.assert_array_equal(
        expert_bits.count(bits[0] & ~bits[1]), [len(a - b) for a, b in zip(sets[0], sets[1], strict=True)]
    )


@pytest.mark.parametrize(("experts", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 4)])
def test_words(experts: int, words: int) -> None:
    """Every expert has its own bit, and a full set has no other."""
    assert expert_bits.words(experts) == words
    full = from_ids(jnp.arange(-3, experts + 40), experts)
    assert full.shape == (words,) and int(expert_bits.count(full)) == experts
    alone = from_ids(jnp.arange(experts)[:, None], experts)
    np.testing.assert_array_equal(expert_bits.count(alone), 1)
    np.testing.assert_array_equal(expert_bits.union(alone, axis=0), full)


def test_no_ids_are_the_empty_set() -> None:
    bits = from_ids(jnp.zeros((2, 0), jnp.int32), 40)
    assert bits.shape == (2, 2) and not bits.any()
