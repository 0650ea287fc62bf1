"""Training of the backbone predictor: loss, batches, overlap, learning, exact resume."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import SpecConfig
from ecospec_jax.decoding import examine
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.training.predictor import multi_label_loss, optimiser, pack, sequence_logits, top_k_overlap
from ecospec_jax.training.sequences import batches
from ecospec_jax.training.traces import Trace, split_by_prompt
from ecospec_jax.training.trainer import Trainer
from tests import tiny_predictors
from tests.tiny import quick_compilation
from tests.tiny_predictors import PREDICTOR, ROUTING, TARGET, decode, make_plan, make_weights

__all__ = ["quick_compilation"]
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
        Trace(str(b // 2), 1, tokens_BT[b, :n].astype(np.int32), ids_LBTK[:, b, :n].swapaxes(0, 1).astype(np.uint16))
        for b, n in enumerate(lengths)
    ]
    return split_by_prompt(traces, 0.25, 0)


def make_trainer(steps: int = STEPS, seed: int = 2) -> Trainer:
    model = tiny_predictors.make_backbone(seed=seed)
    model.embedding.weight.set_value(token_routed_target().embedding.weight.get_value())
    transformation = optimiser(learning_rate=2e-2, steps=steps, warmup=10, weight_decay=0.01)
    return Trainer(model, transformation, multi_label_loss)


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


def test_checkpoints_hold_no_embedding() -> None:
    """It is the target's."""
    model = tiny_predictors.make_backbone()
    assert isinstance(model, BackbonePredictor) and model.config == PREDICTOR
    trained = make_trainer().state["trained"]
    assert "embedding" not in trained and set(trained) == {"projection", "backbone", "heads"}
