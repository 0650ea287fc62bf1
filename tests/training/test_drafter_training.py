"""Unrolled drafter training: masks against a definition, steps against drafting itself, learning a made-up target."""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.cache import Rows
from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import Eagle3Config
from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.training.drafter import (
    DECAY,
    STEPS,
    Lessons,
    agreement,
    drafter_loss,
    lessons,
    most_frequent,
    unrolled_logits,
    unrolled_rows,
)
from ecospec_jax.training.language_model import optimiser, run_target
from ecospec_jax.training.sequences import PADDING, Packed, pack_documents
from ecospec_jax.training.trainer import Trainer, evaluate
from tests import tiny
from tests.tiny import quick_compilation
from tests.training.models import GPT_OSS, make_gpt_oss

__all__ = ["quick_compilation"]
LENGTH = 13
DRAFTER = Eagle3Config(
    hidden_size=GPT_OSS.hidden_size,
    target_hidden_size=GPT_OSS.hidden_size,
    intermediate_size=18,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=GPT_OSS.vocab_size,
    draft_vocab_size=21,
    rms_norm_eps=1e-5,
    rope=tiny.DRAFTER.rope,
    boundaries=(0, 2),
    norm_before_fc=True,
)
random = np.random.default_rng(0)
PACKED = pack_documents([random.integers(0, GPT_OSS.vocab_size, n).tolist() for n in (9, 13, 4, 1, 6)], LENGTH)
BATCH = len(PACKED.tokens_BT)


@cache
def drafter() -> Eagle3:
    return tiny.make_drafter(DRAFTER)


@cache
def taught() -> Lessons:
    return evaluate(lessons, make_gpt_oss(), PACKED, DRAFTER.boundaries)


def test_lessons_are_what_the_target_says() -> None:
    """Features are the residual stream at the boundaries, the first of which is the embedding."""
    target = make_gpt_oss()
    output = evaluate(run_target, target, PACKED, (2,))
    embedded = np.asarray(target.embedding.weight[...])[np.asarray(PACKED.tokens_BT)]
    width = GPT_OSS.hidden_size
    np.testing.assert_array_equal(taught().features_BTF[..., :width], embedded)
    np.testing.assert_allclose(taught().features_BTF[..., width:], output.features_BRF, rtol=1e-6)
    np.testing.assert_allclose(taught().logits_BTV, target.logits(output.hidden_BRD), rtol=1e-6)


@pytest.mark.parametrize("step", range(STEPS))
def test_rows_of_a_step_by_definition(step: int) -> None:
    """Token t + 1 + step at position t + step; sees step 0 up to t and itself in later steps, within its document."""
    rows = unrolled_rows(PACKED, step)
    tokens_BT, documents_BT = np.asarray(PACKED.tokens_BT), np.asarray(PACKED.documents_BT)
    assert rows.offset == step * LENGTH and rows.mask_BRW.shape == (BATCH, LENGTH, (step + 1) * LENGTH)
    for b, t in np.ndindex(BATCH, LENGTH):
        ahead = t + 1 + step
        live = ahead < LENGTH and documents_BT[b, t] == documents_BT[b, ahead] != PADDING
        assert bool(rows.live_BR[b, t]) == live
        if live:
            begin = int(np.argmax(documents_BT[b] == documents_BT[b, t]))
            assert int(rows.tokens_BR[b, t]) == tokens_BT[b, ahead]
            assert int(rows.positions_BR[b, t]) == t - begin + step
            seen = {*range(begin, t + 1), *(later * LENGTH + t for later in range(1, step + 1))}
            assert set(np.flatnonzero(rows.mask_BRW[b, t]).tolist()) == seen


def test_steps_equal_drafting_row_by_row() -> None:
    """What `catch_up` and then `extend`, one drafted token at a time on the document alone, make of the same tokens."""
    model = drafter()
    logits, live = evaluate(unrolled_logits, model, taught())
    tokens_BT, documents_BT = np.asarray(PACKED.tokens_BT), np.asarray(PACKED.documents_BT)

    def rows(tokens: np.ndarray, first: int, context: int, offset: int, window: np.ndarray) -> Rows:
        return Rows(
            jnp.asarray(tokens)[None],
            jnp.arange(first, first + len(tokens))[None],
            jnp.ones((1, len(tokens)), bool),
            jnp.array([context]),
            jnp.asarray(window)[None],
            offset,
        )

    catch_up, extend = jax.jit(model.catch_up), jax.jit(model.extend)
    compared = 0
    starts = [(b, begin) for b in range(BATCH) for begin in np.flatnonzero(np.diff(documents_BT[b], prepend=-2))]
    for count, (b, begin) in itertools.product((3, 5), starts):  # rows of the context
        t = begin + count - 1
        for step in range(STEPS):
            if t >= LENGTH or not live[step][b, t] or documents_BT[b, t] != documents_BT[b, begin]:
                continue
            if step == 0:
                block = rows(tokens_BT[b, begin + 1 : t + 2], 0, 0, 0, np.tril(np.ones((count, count), bool)))
                features = taught().features_BTF[b : b + 1, begin : t + 1]
                state, cache_ = catch_up(block, features, model.empty_cache(1, LENGTH + STEPS))
                state = state[:, -1:]
            else:  # behind the entries of the context, after its own ancestors
                token = tokens_BT[b, t + 1 + step : t + 2 + step]
                block = rows(token, count - 1 + step, count, step - 1, np.ones((1, step), bool))
                state, cache_ = extend(block, state, cache_)
            np.testing.assert_allclose(logits[step][b, t], model.logits(state)[0, 0], rtol=2e-4, atol=2e-5)
            compared += 1
    assert compared > 6


def test_loss_and_agreement_by_definition() -> None:
    """Cross-entropy with the target renormalised over the draft vocabulary; rows it cannot get right do not count."""
    vocabulary = np.asarray(drafter().vocabulary)
    target_BTV = np.asarray(taught().logits_BTV, np.float64)
    logits, live = evaluate(unrolled_logits, drafter(), taught())
    total, shares, left_out = 0.0, [], 0
    for step in range(STEPS):
        losses, same = [], []
        for b, t in np.argwhere(np.asarray(live[step])):
            wanted = target_BTV[b, t + 1 + step]
            mine = np.asarray(logits[step][b, t], np.float64)
            same.append(vocabulary[mine.argmax()] == wanted.argmax())
            if wanted.argmax() not in vocabulary:
                left_out += 1
                continue
            probabilities = np.exp(wanted[vocabulary]) / np.exp(wanted[vocabulary]).sum()
            losses.append(-(probabilities * (mine - np.log(np.exp(mine).sum()))).sum())
        total += DECAY**step * np.mean(losses)
        shares.append(np.mean(same))
    assert left_out > 0
    weight = sum(DECAY**step for step in range(STEPS))
    assert float(evaluate(drafter_loss, drafter(), taught())) == pytest.approx(total / weight, rel=1e-5)
    np.testing.assert_allclose(evaluate(agreement, drafter(), taught()), shares, rtol=1e-6)


def test_learns_a_target_it_can_represent() -> None:
    """A made-up target whose next token is the last one plus one: agreement at every depth, from a few per cent.

    What is borrowed does not move, the rest does.
    """
    vocab, length = DRAFTER.vocab_size, 12
    config = replace(DRAFTER, draft_vocab_size=vocab)
    learner = Trainer(tiny.make_drafter(config), optimiser(steps=200, muon_rate=0.03, adam_rate=2e-2), drafter_loss)
    before = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    texts = np.random.default_rng(5)

    def block() -> Lessons:
        tokens_BT = jnp.asarray(texts.integers(0, vocab, (16, length)))
        features_BTF = jnp.asarray(texts.normal(size=(16, length, 2 * DRAFTER.target_hidden_size)), jnp.float32)
        logits_BTV = 8.0 * jax.nn.one_hot((tokens_BT + 1) % vocab, vocab)
        return Lessons(Packed(tokens_BT, jnp.zeros_like(tokens_BT)), features_BTF, logits_BTV)

    assert evaluate(agreement, learner.model, block()).max() < 0.3
    for _ in range(200):
        learner.step(block())
    assert (evaluate(agreement, learner.model, block()) > 0.95).all()
    after = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    still = {path for path in before if np.array_equal(before[path], after[path])}
    assert still == {"embedding.weight", "target_ids"}


def test_most_frequent_tokens() -> None:
    """Ascending, counted without padding."""
    packed = pack_documents([[5, 5, 5, 2], [2, 9], [9, 9, 9, 0, 0, 0, 0]], 8)
    assert (np.asarray(packed.documents_BT) == PADDING).any()
    assert most_frequent(packed, 11, 3) == [0, 5, 9]
