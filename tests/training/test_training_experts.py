"""The expert layer of training against the reference op: values, gradients, both layouts, rows beyond the capacity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.kernels import Activation, ClampedSwiglu, ExpertWeights, Plain, Swiglu, grouped_experts
from ecospec_jax.models.moe import MoELayer
from ecospec_jax.training.experts import TrainingMoE, balance, bias_pull, capacity_experts, prepare
from ecospec_jax.training.quantise import published, straight_through
from tests.tiny import quick_compilation
from tests.training.models import GPT_OSS, make_gpt_oss, stored

__all__ = ["quick_compilation"]
ROWS, K, EXPERTS, HIDDEN, FFN = 11, 3, 5, 6, 4
AMPLE = float(EXPERTS)  # room for every row in every expert
random = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape), jnp.float32)


LAYOUTS: dict[str, tuple[ExpertWeights, Activation]] = {
    "split": (
        ExpertWeights(
            (Plain(normal(EXPERTS, FFN, HIDDEN)), Plain(normal(EXPERTS, FFN, HIDDEN))),
            Plain(normal(EXPERTS, HIDDEN, FFN)),
        ),
        Swiglu(),
    ),
    "interleaved": (
        ExpertWeights(
            Plain(normal(EXPERTS, 2 * FFN, HIDDEN)),
            Plain(normal(EXPERTS, HIDDEN, FFN)),
            normal(EXPERTS, 2 * FFN),
            normal(EXPERTS, HIDDEN),
        ),
        ClampedSwiglu(limit=1.5),
    ),
}
X, WEIGHTS, SLOPE = normal(ROWS, HIDDEN), jnp.abs(normal(ROWS, K)), normal(ROWS, HIDDEN)
IDS = np.array([random.permutation(EXPERTS)[:K] for _ in range(ROWS)])
IDS[4], IDS[7, 1] = EXPERTS, -1  # a dead row and a skipped choice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_the_reference_op(layout: str) -> None:
    """With room for all rows, of rows, combine weights, matrices and biases."""
    experts, activation = LAYOUTS[layout]

    def through(op) -> tuple[jax.Array, tuple]:
        def total(x, weights, experts):
            y = op(x, jnp.asarray(IDS), weights, experts)
            return jnp.sum(y * SLOPE), y

        (_, y), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(X, WEIGHTS, experts)
        return y, gradients

    ours = through(lambda *a: capacity_experts(*a, activation=activation, capacity=AMPLE))
    theirs = through(lambda *a: grouped_experts(*a, activation=activation, backend="reference"))
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity", [0.4, 1.0])
def test_rows_beyond_the_capacity_skip_the_expert(capacity: float) -> None:
    """An expert serves its first rows; other rows keep what their other experts say, and dropped ones no gradient."""
    experts, activation = LAYOUTS["interleaved"]
    crowded = np.where(IDS == EXPERTS, EXPERTS, np.where(IDS < 2, 0, IDS))  # many choose expert 0, some twice
    room = int(np.ceil(capacity * ROWS * K / EXPERTS))
    kept, served = np.full_like(crowded, EXPERTS), dict.fromkeys(range(EXPERTS), 0)
    for row, choice in np.ndindex(*crowded.shape):
        expert = crowded[row, choice]
        if 0 <= expert < EXPERTS and served[expert] < room:
            served[expert] += 1
            kept[row, choice] = expert
    assert served[0] == room and (kept == EXPERTS).sum() > (crowded == EXPERTS).sum()

    def ours(x, weights):
        y = capacity_experts(x, jnp.asarray(crowded), weights, experts, activation=activation, capacity=capacity)
        return jnp.sum(y * SLOPE), y

    def expected(x, weights):
        y = grouped_experts(x, jnp.asarray(kept), weights, experts, activation=activation, backend="reference")
        return jnp.sum(y * SLOPE), y

    mine = jax.value_and_grad(ours, (0, 1), has_aux=True)(X, WEIGHTS)
    other = jax.value_and_grad(expected, (0, 1), has_aux=True)(X, WEIGHTS)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_balance() -> None:
    """1 for an even router, more for an uneven one, by its definition over live rows only."""
    even_ids = jnp.asarray([[i % EXPERTS, (i + 1) % EXPERTS] for i in range(2 * EXPERTS)])
    assert float(balance(jnp.zeros((2 * EXPERTS, EXPERTS)), even_ids)) == pytest.approx(1)
    logits = normal(ROWS, EXPERTS)
    live = [row for row in range(ROWS) if IDS[row, 0] < EXPERTS]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    valid = np.where(IDS < 0, 0, IDS)
    share = np.bincount(valid[live].reshape(-1), minlength=EXPERTS) / (len(live) * K)
    expected = EXPERTS * (share * probabilities[live].mean(axis=0)).sum()
    assert float(balance(logits, jnp.asarray(valid))) == pytest.approx(expected, rel=1e-5)
    alone = jnp.zeros((ROWS, K), jnp.int32)
    assert float(balance(jnp.zeros((ROWS, EXPERTS)).at[:, 0].set(50.0), alone)) == pytest.approx(EXPERTS)


def test_bias_pull() -> None:
    """No value; its derivative is by how much more than the fair share an expert is chosen. Dead rows do not count."""
    ids, live = jnp.asarray(np.where(IDS < 0, 0, IDS)), [row for row in range(ROWS) if IDS[row, 0] < EXPERTS]
    value, slope = jax.value_and_grad(bias_pull)(normal(EXPERTS), ids)
    share = np.bincount(np.asarray(ids)[live].reshape(-1), minlength=EXPERTS) / (len(live) * K)
    assert float(value) == 0 and np.abs(share - 1 / EXPERTS).max() > 0.01
    np.testing.assert_allclose(slope, share - 1 / EXPERTS, atol=1e-6)


def test_layers_keep_their_parameters_and_function() -> None:
    """Prepared layers do what the model's own do, quantised ones what the published model's do."""
    x = normal(2, 5, GPT_OSS.hidden_size)
    live = jnp.ones((2, 5), bool).at[1, 3].set(False)
    plain, model = make_gpt_oss(), make_gpt_oss()
    rounded = published(plain, stored(GPT_OSS))
    own = plain.layers[1].moe
    call = nnx.jit(lambda layer: layer(x, live))
    assert isinstance(own, MoELayer)
    for quantised, like in ((False, own), (True, rounded.layers[1].moe)):
        layer = prepare(model, quantised=quantised).layers[1].moe
        assert type(layer) is TrainingMoE and layer.experts is model.layers[1].moe.experts
        layer.capacity = float(GPT_OSS.num_experts)
        y, ids = call(layer)
        # Only the experts are rounded here; the published model's other numbers are rounded too.
        like.router, like.experts.gate_up_bias, like.experts.down_bias = (
            own.router,
            own.experts.gate_up_bias,
            own.experts.down_bias,
        )
        expected, expected_ids = call(like)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        assert (np.asarray(y)[1, 3] == 0).all()
    assert not np.allclose(straight_through(own.experts.down.weight[...]), own.experts.down.weight[...])
