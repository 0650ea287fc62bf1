"""Training of the backbone predictor: loss, batches, overlap, learning, exact resume."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import SpecConfig
from ecospec_jax.decoding import examine
from ecospec_jax.errors import UserError
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.training.overlap import top_k_overlap
from ecospec_jax.training.predictor import (
    Examples,
    live_tokens,
    multi_label_loss,
    optimiser,
    pack,
    sequence_logits,
)
from ecospec_jax.training.sequences import batches
from ecospec_jax.training.traces import Trace
from ecospec_jax.training.trainer import Trainer
from tests import tiny, tiny_predictors
from tests.tiny import quick_compilation
from tests.tiny_predictors import PREDICTOR, ROUTING, TARGET, decode, make_plan, make_weights

__all__ = ["quick_compilation"]
ROOT = Path(__file__).parents[2]
LENGTH, BATCH, STEPS = 16, 8, 300
loss_of = nnx.jit(multi_label_loss)
logits_of = nnx.jit(sequence_logits)


@cache
def token_routed_target():
    return tiny_predictors.token_routed(tiny_predictors.make_target())


@cache
def token_routed_traces() -> tuple[list[Trace], list[Trace]]:
    """What a target whose routing depends on the token id alone does on random texts; training and held-out part."""
    random = np.random.default_rng(0)
    lengths = random.integers(LENGTH - 8, LENGTH + 1, 48)
    tokens_BT = random.integers(0, TARGET.vocab_size, (48, LENGTH))
    graph, state = nnx.split(token_routed_target())
    _, ids_LBTK = jax.device_get(jax.jit(partial(examine, graph))(state, jnp.asarray(tokens_BT), jnp.asarray(lengths)))
    traces = [
        Trace(
            "texts",
            str(b // 2),
            1,
            tokens_BT[b, :n].astype(np.int32),
            ids_LBTK[:, b, :n].swapaxes(0, 1).astype(np.uint16),
        )
        for b, n in enumerate(lengths)
    ]
    return traces[:36], traces[36:]


def make_trainer(steps: int = STEPS, seed: int = 2, dtype: str = "float32", **how: Any) -> Trainer:
    model = tiny_predictors.make_backbone(seed=seed)
    if dtype != "float32":
        narrow = BackbonePredictor(PREDICTOR, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        nnx.update(narrow, jax.tree.map(lambda value: value.astype(dtype), nnx.state(model)))
        model = narrow
    model.embedding.weight.set_value(token_routed_target().embedding.weight.get_value().astype(dtype))
    transformation = optimiser(learning_rate=2e-2, steps=steps, warmup=10, weight_decay=0.01)
    return Trainer(model, transformation, multi_label_loss, **({"weigh": live_tokens} | how))


def test_pack() -> None:
    """Right-padded with expert id E, cut after `length` tokens."""
    train, _ = token_routed_traces()
    short, long = (next(t for t in train if len(t.tokens_T) == n) for n in (9, LENGTH))
    block = jax.device_get(pack([short, long], 12, ROUTING))
    assert block.live_BT.sum(axis=1).tolist() == [9, 12]
    np.testing.assert_array_equal(block.tokens_BT[0, :9], short.tokens_T)
    np.testing.assert_array_equal(block.tokens_BT[1], long.tokens_T[:12])
    np.testing.assert_array_equal(block.experts_BTLK[0, :9], short.experts_TLK)
    np.testing.assert_array_equal(block.experts_BTLK[1], long.experts_TLK[:12])
    assert (block.experts_BTLK[0, 9:] == ROUTING.experts).all()


def test_batches_continue_where_they_were() -> None:
    """From any step on, the same batches; each trace at most once an epoch; the order changes."""
    train, _ = token_routed_traces()
    per_epoch = len(train) // BATCH
    assert per_epoch > 2
    index = {id(trace): i for i, trace in enumerate(train)}

    def numbers(first: int, count: int) -> list[list[int]]:
        return [[index[id(t)] for t in part] for part in itertools.islice(batches(train, BATCH, 7, first), count)]

    seen = numbers(0, 3 * per_epoch)
    assert all(len(part) == BATCH for part in seen)
    epochs = [sum(seen[i * per_epoch : (i + 1) * per_epoch], []) for i in range(3)]
    assert all(len(set(epoch)) == per_epoch * BATCH for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for first in (1, per_epoch - 1, per_epoch, 2 * per_epoch + 1):
        assert numbers(first, len(seen) - first) == seen[first:]
    assert len(next(batches(train[:3], BATCH, 7, 0))) == 3  # fewer traces than a batch holds: all of them


def test_loss_is_that_of_independent_labels_on_live_tokens() -> None:
    """The mean over live tokens and layers of the cross-entropies of all experts; padding changes nothing."""
    train, _ = token_routed_traces()
    model = tiny_predictors.make_backbone()
    block = pack(train[:BATCH], LENGTH, ROUTING)
    assert not block.live_BT.all()
    logits_BTLE = np.asarray(logits_of(model, block), np.float64)
    losses = []
    for b, trace in enumerate(train[:BATCH]):
        for t, experts_LK in enumerate(trace.experts_TLK):
            for layer, experts in enumerate(experts_LK):
                wanted = np.isin(np.arange(ROUTING.experts), experts)
                probability = 1 / (1 + np.exp(-logits_BTLE[b, t, layer]))
                losses.append(-np.log(np.where(wanted, probability, 1 - probability)).sum())
    loss = float(loss_of(model, block))
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    noise = np.random.default_rng(1).integers(0, TARGET.vocab_size, block.tokens_BT.shape)
    block.tokens_BT = jnp.where(block.live_BT, block.tokens_BT, noise)
    assert float(loss_of(model, block)) == pytest.approx(loss, rel=1e-6)


def test_overlap_counts_sets() -> None:
    """Also in a last batch that is smaller, and with nothing from padding."""
    train, _ = token_routed_traces()
    model, traces = tiny_predictors.make_backbone(), train[: BATCH + 3]
    hits, tokens = np.zeros(ROUTING.layers), 0
    for part in (traces[:BATCH], traces[BATCH:]):
        logits_BTLE = np.asarray(logits_of(model, pack([*part, *part][:BATCH], LENGTH, ROUTING)))
        for trace, logits_TLE in zip(part, logits_BTLE, strict=False):
            for experts_LK, logits_LE in zip(trace.experts_TLK, logits_TLE, strict=False):
                best_LK = np.argsort(-logits_LE, axis=-1)[:, : ROUTING.k]
                hits += [len(set(a) & set(b)) for a, b in zip(experts_LK.tolist(), best_LK.tolist(), strict=True)]
                tokens += 1
    np.testing.assert_allclose(top_k_overlap(model, traces, BATCH, LENGTH), hits / (tokens * ROUTING.k), rtol=1e-6)


def test_learns_a_router_it_can_represent() -> None:
    """From a tenth to over 99 % of held-out experts; every parameter moves but the target's embedding.

    Decoding with it predicts the live routing too, at positions beyond those of training: labels are aligned.
    """
    train, held_out = token_routed_traces()
    trainer = make_trainer()
    before = {path: np.asarray(v.get_value()) for path, v in parameters(trainer.model).items()}
    assert top_k_overlap(trainer.model, held_out, BATCH, LENGTH).max() < 0.3
    feed = batches(train, BATCH, 0, 0)
    losses = [trainer.step(pack(next(feed), LENGTH, ROUTING)) for _ in range(STEPS)]
    first, last = np.mean(jax.device_get(losses[:10])), np.mean(jax.device_get(losses[-10:]))
    assert last < 0.1 * first
    overlap_L = top_k_overlap(trainer.model, held_out, BATCH, LENGTH)
    assert overlap_L.shape == (ROUTING.layers,) and (overlap_L > 0.99).all(), overlap_L

    after = {path: np.asarray(v.get_value()) for path, v in parameters(trainer.model).items()}
    assert {path for path in before if np.array_equal(before[path], after[path])} == {"embedding.weight"}
    np.testing.assert_array_equal(after["embedding.weight"], token_routed_target().embedding.weight.get_value())

    graph, state = nnx.split(trainer.model)
    target_def, target_state = nnx.split(token_routed_target())
    plan = make_plan(SpecConfig(depth=2), predictor=graph, target=target_def)
    _, stats = decode(plan, make_weights(predictor=state, target=target_state))
    assert stats.overlap > 0.9 and stats.live_rows > 50


def test_resumed_training_equals_an_uninterrupted_one() -> None:
    """Bit for bit, from what a checkpoint holds, in a trainer that was set up anew and has done other things."""
    train, _ = token_routed_traces()

    def steps(trainer: Trainer, first: int, count: int) -> list[float]:
        feed = batches(train, BATCH, 3, first)
        return [float(trainer.step(pack(next(feed), LENGTH, ROUTING))) for _ in range(count)]

    whole = make_trainer()
    losses = steps(whole, 0, 4)
    kept = jax.tree.map(np.array, whole.state)
    losses += steps(whole, 4, 3)

    other = make_trainer(seed=9)
    steps(other, 2, 1)
    other.restore(jax.tree.map(jnp.asarray, kept))
    assert steps(other, 4, 3) == losses[4:]
    assert jax.tree.structure(other.state) == jax.tree.structure(whole.state)
    for ours, theirs in zip(jax.tree.leaves(other.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len({*losses}) == 7


CUTS = [1, 16, 2, 9, 16, 16, 3, 1, 5, 12, 1, 1] * 3


def block(first: int) -> Examples:
    """Sequences of very different lengths, so that a mean of means would be another one."""
    train, _ = token_routed_traces()
    cut = [replace(t, tokens_T=t.tokens_T[:n], experts_TLK=t.experts_TLK[:n]) for t, n in zip(train, CUTS, strict=True)]
    return pack(cut[first : first + BATCH], LENGTH, ROUTING)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    """Losses and parameters, to rounding."""
    whole, in_parts = make_trainer(), make_trainer(parts=parts)
    for first in (0, 8, 16):
        assert float(in_parts.step(block(first))) == pytest.approx(float(whole.step(block(first))), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(in_parts.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def test_parts_are_weighed_by_their_tokens() -> None:
    """Without weights the result would be another one: the test above can fail."""
    unweighed = make_trainer(parts=4, weigh=lambda examples: 1.0)
    assert abs(float(unweighed.step(block(0))) / float(make_trainer().step(block(0))) - 1) > 1e-3


def test_narrow_computation_has_wide_master_weights() -> None:
    """The model computes in bfloat16; its weights add up steps too small for that, as the optimiser's moments do."""
    wide, narrow = make_trainer(), make_trainer(dtype="bfloat16")
    assert {value.dtype for value in jax.tree.leaves(nnx.state(narrow.model))} == {jnp.dtype("bfloat16")}
    assert logits_of(narrow.model, block(0)).dtype == jnp.float32
    losses = [(float(narrow.step(block(first))), float(wide.step(block(first)))) for first in (0, 8, 16)]
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=0.02) and ours != theirs
    wide_dtypes = {value.dtype for value in jax.tree.leaves(narrow.state) if value.dtype != jnp.int32}
    assert wide_dtypes == {jnp.dtype("float32")}
    unrounded = [x for x in jax.tree.leaves(narrow.state["trained"]) if (x != x.astype(jnp.bfloat16)).any()]
    assert len(unrounded) > 5


def test_two_devices_learn_what_one_does() -> None:
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.training.test_predictor_training"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


@tiny.compiling_quickly()
def train_on_two_devices() -> None:
    """Each has half of every part and all parameters; a `state` can be taken up; judging works on both."""
    one, two = make_trainer(), make_trainer(devices=2, parts=2)
    kept = jax.tree.map(np.array, two.state)
    losses = [(float(one.step(block(first))), float(two.step(block(first)))) for first in (0, 8, 16)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(two.state), jax.tree.leaves(one.state), strict=True):
        assert len(ours.sharding.device_set) == 2 and ours.sharding.is_fully_replicated
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)
    blocks = {shard.data.shape for shard in jax.device_put(block(0), two._split).tokens_BT.addressable_shards}
    assert blocks == {(BATCH // 2, LENGTH)}
    _, held_out = token_routed_traces()
    found, wanted = (top_k_overlap(trainer.model, held_out, BATCH, LENGTH) for trainer in (two, one))
    np.testing.assert_allclose(found, wanted, atol=0.02)
    two.restore(kept)
    assert [float(two.step(block(first))) for first in (0, 8, 16)] == [loss for _, loss in losses]
    with pytest.raises(UserError, match="3 devices are asked for; there are 2"):
        make_trainer(devices=3)
    print("equal")


def test_checkpoints_hold_no_embedding() -> None:
    """It is the target's."""
    model = tiny_predictors.make_backbone()
    assert isinstance(model, BackbonePredictor) and model.config == PREDICTOR
    trained = make_trainer().state["trained"]
    assert "embedding" not in trained and set(trained) == {"projection", "backbone", "heads"}


if __name__ == "__main__":
    train_on_two_devices()
