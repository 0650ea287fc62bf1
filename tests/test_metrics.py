"""What is counted on the device, and the figures made of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax import expert_bits
from ecospec_jax.metrics import Counters, DecodeStats, ExpertUse, expert_use

EXPERTS = 9


@jax.jit
def distinct(ids_LBRK: jax.Array) -> jax.Array:
    sets_BRLW = jnp.moveaxis(expert_bits.from_ids(ids_LBRK, EXPERTS), 0, 2)
    return expert_use(sets_BRLW, jnp.zeros_like(sets_BRLW), jnp.ones(sets_BRLW.shape[:2], bool)).distinct_L


def use(*distinct_by_layer: int) -> ExpertUse:
    """Only the true experts of each layer."""
    none_L, zero = jnp.zeros(len(distinct_by_layer), jnp.int32), jnp.int32(0)
    return ExpertUse(jnp.array(distinct_by_layer), none_L, none_L, zero, zero)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), used=st.integers(0, EXPERTS), dead=st.sampled_from([0.0, 0.4, 1.0]))
def test_distinct_experts_equal_sets(seed: int, used: int, dead: float) -> None:
    """Over the union of all rows; dead rows hold the id `EXPERTS`."""
    random = np.random.default_rng(seed)
    ids_LBRK = random.choice([*random.permutation(EXPERTS)[:used], EXPERTS], (4, 3, 5, 2))
    ids_LBRK[:, random.random((3, 5)) < dead] = EXPERTS
    expected = [len(set(layer.ravel().tolist()) - {EXPERTS}) for layer in ids_LBRK]
    assert distinct(ids_LBRK).tolist() == expected


def test_distinct_experts_without_moe_layers() -> None:
    assert distinct(jnp.zeros((0, 2, 3, 0), jnp.int32)).shape == (0,)


def test_counters_add_up() -> None:
    """Finished sequences emit 0; a pass without a live row is none."""
    counters = Counters.zeros(batch=3, longest=4, moe_layers=2)
    live = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
    counters = counters.add(jnp.array([2, 1, 0]), use(5, 6), live)
    counters = counters.add(jnp.array([4, 0, 0]), use(7, 1), live.at[1].set(False))
    counters = counters.add(jnp.array([0, 0, 0]), use(0, 0), live & False)
    assert int(counters.verifications) == 2
    assert counters.emitted_BP.tolist() == [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert counters.use.distinct_L.tolist() == [12, 7]
    assert int(counters.live_rows) == 5


def stats(**changes: object) -> DecodeStats:
    values = {
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "verifications": 4,
        "emitted_histograms": ((1, 2, 0), (0, 1, 3)),
        "distinct_by_layer": (20, 10, 12),
        "predicted_by_layer": (0, 0, 0),
        "hits_by_layer": (0, 0, 0),
        "uses": 90,
        "added_error": 0,
        "live_rows": 30,
    }
    return DecodeStats(**(values | changes))  # pyright: ignore[reportArgumentType]


def test_figures() -> None:
    one = stats()
    assert one.emitted == 1 + 2 * 2 + 2 + 3 * 3
    assert one.tau == pytest.approx(16 / 7)  # passes of a sequence, not of the batch
    assert one.u == pytest.approx(14 / 4)
    assert one.rows == pytest.approx(7.5)
    assert one.tokens_per_second == pytest.approx(8)  # prefill apart


def test_sum_of_batches() -> None:
    both = stats() + stats(decode_seconds=1.0, verifications=1, emitted_histograms=((0, 0, 1),), live_rows=2)
    assert both.prefill_seconds == 1 and both.decode_seconds == 3 and both.verifications == 5
    assert both.emitted_histograms == ((1, 2, 0), (0, 1, 3), (0, 0, 1))
    assert both.emitted == 19 and both.tau == pytest.approx(19 / 8)
    assert both.distinct_by_layer == (40, 20, 24) and both.u == pytest.approx(28 / 5)
    assert both.live_rows == 32 and both.tokens_per_second == pytest.approx(19 / 3)


def test_figures_of_nothing_are_nan() -> None:
    none = stats(verifications=0, emitted_histograms=((0, 0, 0),), distinct_by_layer=(0, 0, 0), live_rows=0)
    assert none.emitted == 0
    assert all(math.isnan(value) for value in (none.tau, none.u, none.rows, none.tokens_per_second))
    assert math.isnan(stats(distinct_by_layer=()).u)


def test_only_real_sequences_are_reported() -> None:
    counters = Counters.zeros(batch=3, longest=2, moe_layers=1)
    live = jnp.array([[True], [True], [False]])
    counters = counters.add(jnp.array([1, 2, 0]), use(3), live)
    figures = DecodeStats.create(counters, sequences=2, prefill_seconds=1.0, decode_seconds=2.0)
    assert figures.emitted_histograms == ((1, 0), (0, 1))
    assert figures.verifications == 1 and figures.distinct_by_layer == (3,) and figures.live_rows == 2
    assert figures.draft_experts == 0


def test_the_drafters_own_experts_are_kept_apart() -> None:
    """They change no figure of the target's, and there is none without such a drafter."""
    assert math.isnan(stats().draft_u)
    drafted = DecodeStats.create(Counters.zeros(2, 3, 1), 2, 1.0, 2.0, draft_experts=jnp.int32(7))
    assert drafted.draft_experts == 7 and drafted.distinct_by_layer == (0,)
    both = stats(draft_experts=10) + stats(draft_experts=30, verifications=6)
    assert both.draft_experts == 40 and both.draft_u == pytest.approx(4)
    assert stats(draft_experts=10).u == stats().u
