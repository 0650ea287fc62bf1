"""Models of random weights on a mesh, and acceptance that is rigged so that their steps can be timed."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax import Decoder
from ecospec_jax.checkpoint import parameters
from ecospec_jax.errors import UserError
from ecospec_jax.sharding import Placement
from ecospec_jax.tree import ROOT, Selection, build_tree, verify_tree
from ecospec_jax.verification import rigged_draws, sequence_keys
from tests import tiny
from tests.processes import start_python

CONFIG = replace(tiny.TARGET, num_heads=4, num_experts=8)
POSITIONS = 3000


def compare() -> None:
    """Prints tau and an answer of the same weights on one device and on four."""
    alone, apart = (
        Decoder.with_random_weights(CONFIG, tiny.DRAFTER, dtype="float32", seed=3, placement=placement, acceptance=0.8)
        for placement in (None, Placement.create("tp2ep2"))
    )
    ours = parameters(apart.target)
    for path, variable in parameters(alone.target).items():
        np.testing.assert_allclose(ours[path][...], variable[...], rtol=0, atol=1e-6, err_msg=path)
    split = ours["layers.0.moe.experts.gate.weight"].get_value()
    assert [shard.data.shape[:2] for shard in split.addressable_shards] == [(4, split.shape[1] // 2)] * 4
    for decoder in (alone, apart):
        result = decoder.generate([[3, 1, 2]], max_new_tokens=40)
        print(result.stats.tau, *result.generations[0].tokens)


def test_random_weights_are_the_same_on_a_mesh() -> None:
    process = start_python("-m", "tests.test_random_weights", devices=4)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    alone, apart = out.splitlines()
    assert alone == apart
    assert float(alone.split()[0]) > 1.5  # the drafter of random weights alone makes 1


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_rigged_draws_follow_the_likeliest_child_as_often_as_asked(rate: float) -> None:
    """A root with children 3 and 1, node 3 with child 4, and a node that is not verified."""
    batch, draw = POSITIONS, 2
    parents = jnp.array([ROOT, ROOT, 0, 1], jnp.int32)
    tokens = jnp.array([3, 1, 4, 0], jnp.int32)
    tree = build_tree(
        jnp.tile(tokens, (batch, 1)),
        jnp.tile(parents, (batch, 1)),
        jnp.array([1, 1, 2, 2]),
        jnp.tile(jnp.array([-0.1, -0.5, -0.9, -1.5]), (batch, 1)),
    )
    selection = Selection(jnp.tile(jnp.array([0, 1, 2, 3]), (batch, 1)), jnp.full(batch, 3, jnp.int32))
    verified = verify_tree(tree, selection, jnp.zeros(batch, jnp.int32), jnp.arange(batch), jnp.zeros(batch, bool))
    keys = sequence_keys(jnp.full(batch, 7), jnp.zeros(batch, jnp.int32))  # one sequence, position after position
    drawn = np.asarray(rigged_draws(verified, jnp.full((batch, 5), draw, jnp.int32), keys, rate))
    for row, child in ((0, 3), (1, 4)):
        assert set(drawn[:, row]) <= {draw, child}
        share = float(np.mean(drawn[:, row] == child))
        assert share == rate if rate in (0, 1) else abs(share - rate) < 4 * (rate * (1 - rate) / batch) ** 0.5
    assert (drawn[:, 2:] == draw).all()  # its only child is dead; and leaves


@pytest.mark.parametrize("acceptance", [-0.1, 1.5])
def test_an_acceptance_is_a_probability(acceptance: float) -> None:
    with pytest.raises(UserError, match=f"between 0 and 1, not {acceptance}"):
        Decoder.with_random_weights(CONFIG, tiny.DRAFTER, acceptance=acceptance)


def test_a_layout_that_cannot_serve_is_refused() -> None:
    with pytest.raises(UserError, match="7 experts do not divide among 2 devices"):
        Decoder.with_random_weights(
            tiny.TARGET, tiny.DRAFTER, placement=Placement.create("ep2", devices=[object(), object()])
        )


if __name__ == "__main__":
    compare()
