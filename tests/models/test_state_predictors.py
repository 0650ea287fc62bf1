"""Predictors from the drafter's states and from token pairs: what they are shown, and what they say of it."""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import SpecConfig, decoding
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.checkpoint import borrow, borrowed_parameters, parameters
from ecospec_jax.config import RoutingShape
from ecospec_jax.models import TARGETS
from ecospec_jax.models.predictor import Evidence, TokenPairs
from ecospec_jax.models.state_predictors import DrafterFeatures, TargetGates
from ecospec_jax.predictor_config import DrafterFeaturesConfig, TargetGatesConfig, TokenPairsConfig
from ecospec_jax.selection import likelihood
from ecospec_jax.tree import Selection, empty_tree
from tests import tiny, tiny_predictors
from tests.parity.compare import assert_close, causal_rows
from tests.tiny import quick_compilation
from tests.tiny_predictors import ROUTING, TARGET, make_plan, make_weights, prefilled, sets_of

__all__ = ["quick_compilation"]
NOTHING = jnp.zeros((1, 1, 1, 1), jnp.uint32)
STATE = 14  # of the scripted drafter: 12 channels, position, sequence
F32 = jnp.dtype("float32")
random = np.random.default_rng(0)


class Listener(nnx.Module):
    """Keeps what it is shown; calls must not be compiled."""

    heard: ClassVar[list[tuple[Rows, Evidence]]] = []

    def empty_cache(self, batch: int, capacity: int) -> None:
        return None

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[jax.Array, None]:
        self.heard.append((rows, evidence))
        return jnp.zeros((*rows.tokens_BR.shape, *evidence.last_BLW.shape[1:]), jnp.uint32), None


_draft = jax.jit(decoding.draft, static_argnames="plan")


def _commit(plan, weights, state, tree, selection):
    verified, state = decoding.verify(plan, weights, state, tree, selection)
    return decoding.commit(plan, state, verified, None)


_committed = jax.jit(_commit, static_argnames="plan")


@pytest.mark.parametrize("idle", [0, 6], ids=["drafts every step", "after plain steps"])
def test_evidence_shows_the_state_and_the_token_before_each_row(idle: int, monkeypatch) -> None:
    """Of every row's position and sequence, in every step; the first ones are those of the committed text alone."""
    monkeypatch.setattr(decoding, "CATCH_UP", 4)  # fewer than wait after plain steps
    spec = SpecConfig(depth=3, branch=2, budget=4, probe_every=8)
    plan = replace(make_plan(spec, predictor=nnx.graphdef(Listener())), adaptive=idle > 0)
    weights = make_weights(script=tiny_predictors.helpful(), predictor=nnx.state(Listener()))
    state = prefilled(plan, weights)
    accepted = []
    for _ in range(3 if idle else 5):
        for _ in range(idle):
            nothing = Selection(jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32))
            state = _committed(plan, weights, state, empty_tree(3), nothing)
        tree, drafted = _draft(plan, weights, state)
        Listener.heard.clear()
        decoding.predict(plan, weights, drafted, tree)
        ((rows, evidence),) = Listener.heard
        states_BRH, before_BR, length_B = (
            np.asarray(part) for part in (evidence.states_BRH, evidence.before_BR, state.length_B)
        )
        for b in np.flatnonzero(~np.asarray(state.finished_B)):
            np.testing.assert_array_equal(states_BRH[b, :, -2], np.asarray(rows.positions_BR)[b] - 2)
            assert (states_BRH[b, :, -1] == b).all()
            text = np.asarray(state.tokens_BS)[b, : length_B[b] + 1]
            for row, parent in enumerate(np.asarray(tree.parents_BN)[b], start=1):
                assert before_BR[b, row] == (text[-1] if parent < 0 else np.asarray(tree.tokens_BN)[b, parent])
            assert before_BR[b, 0] == text[-2]
            assert_close(states_BRH[b, :2, :-2], expected_states(tuple(text.tolist())), what="states")
        after = _committed(plan, weights, drafted, tree, likelihood(tree, None, spec))
        accepted += (np.asarray(after.length_B) - length_B).tolist()
        state = after
    assert {2, 3} <= set(accepted)


_forward = nnx.jit(lambda target, rows, cache, boundaries: target(rows, cache, boundaries), static_argnums=3)
_catch_up = nnx.jit(lambda drafter, rows, features, cache: drafter.catch_up(rows, features, cache))


def expected_states(text: tuple[int, ...]) -> np.ndarray:
    """The states that propose the root and its children, from the text alone; padded, so as to compile once."""
    target, drafter, length = tiny_predictors.make_target(), tiny.make_drafter(), tiny_predictors.LONGEST + 4
    ids = np.pad(text, (0, length - len(text)))[None]
    rows = causal_rows(ids, [len(text)])
    output, _ = _forward(target, rows, target.empty_cache(1, length, 1), drafter.boundaries)
    entries = replace(rows, tokens_BR=jnp.roll(rows.tokens_BR, -1, axis=1))
    states, _ = _catch_up(drafter, entries, output.features_BRF, drafter.empty_cache(1, length))
    return np.asarray(states[0, len(text) - 3 : len(text) - 1])


TOKENS = jnp.asarray(random.integers(0, TARGET.vocab_size, (2, 5)))
STATES = jnp.asarray(random.normal(size=(2, 5, STATE)), jnp.float32)


def judged(model, tokens=TOKENS, states=STATES) -> np.ndarray:
    """A predictor's bit words, through its public call."""
    rows = causal_rows(np.asarray(tokens))
    evidence = Evidence(jnp.zeros((2, 1, 1), jnp.uint32), lambda rows: NOTHING, tokens, states)
    call = nnx.jit(lambda model, rows, states: model(rows, None, replace(evidence, states_BRH=states))[0])
    return np.asarray(call(model, rows, states))


def probabilities(model) -> np.ndarray:
    """The probabilities that a predictor gives."""
    evidence = Evidence(jnp.zeros((2, 1, 1), jnp.uint32), lambda rows: NOTHING, TOKENS, STATES)
    return np.asarray(model.probabilities(causal_rows(np.asarray(TOKENS)), None, evidence))


def features_by_hand(model, token: int, state: np.ndarray) -> np.ndarray:
    """The vector of one node, in float64."""
    values = {path: np.asarray(v.get_value(), np.float64) for path, v in parameters(model).items()}

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-6) * scale

    joined = np.concatenate(
        [
            normed(values["features.embedding.weight"][token], values["features.embedding_norm.weight"]),
            normed(state.astype(np.float64), values["features.state_norm.weight"]),
        ]
    )
    x = values["features.join.weight"] @ joined
    return x / (1 + np.exp(-x))


def test_drafter_features() -> None:
    """The best k of each layer by the formula."""
    config = DrafterFeaturesConfig(TARGET.vocab_size, TARGET.hidden_size, STATE, 9, "", ROUTING)
    model = tiny.randomised(lambda: DrafterFeatures(config, dtype=F32, rngs=nnx.Rngs(0)), 1)
    model.heads.weight.set_value(4 * model.heads.weight[...])  # so that some probabilities reach 1
    weight, bias = np.asarray(model.heads.weight[...]), np.asarray(model.heads.bias[...])
    sets, chances = judged(model), probabilities(model)
    for b, row in np.ndindex(*TOKENS.shape):
        scores = weight @ features_by_hand(model, int(TOKENS[b, row]), np.asarray(STATES[b, row])) + bias
        best = np.argsort(-scores.reshape(ROUTING.layers, ROUTING.experts))[:, : ROUTING.k]
        assert sets_of(sets[b, row]) == {(layer, int(e)) for layer in range(ROUTING.layers) for e in best[layer]}
        powers = np.exp(scores).reshape(ROUTING.layers, ROUTING.experts)
        wanted = np.minimum(ROUTING.k * powers / powers.sum(axis=1, keepdims=True), 1)
        assert_close(chances[b, row], wanted, what="probabilities")
    assert chances.max() == 1 > chances.min()


@pytest.mark.parametrize("target_config", [tiny.TARGET, tiny.GPT_OSS, tiny.DEEPSEEK], ids=lambda c: c.family)
def test_target_gates_ask_the_targets_own_routers(target_config) -> None:
    """Of the right layers, with their rules: sets are what each of the target's routers chooses for the guess."""
    target = tiny.randomised(lambda: TARGETS[target_config.family](target_config, dtype=F32, rngs=nnx.Rngs(0)), 2)
    config = TargetGatesConfig(target_config, STATE, 9, "")
    model = tiny.randomised(lambda: TargetGates(config, dtype=F32, rngs=nnx.Rngs(0)), 1)
    borrow(model, config, target)
    lent = parameters(target)
    assert {lender for path, lender in borrowed_parameters(config).items()} == {"embedding.weight"} | {
        path for path in lent if ".router." in path
    }
    sets = judged(model)
    routing, guess_LDR = RoutingShape.of(target_config), np.asarray(model.guess_LDR[...])
    routers = [target.layers[layer].moe.router for layer in target_config.moe_layers]
    for b, row in np.ndindex(*TOKENS.shape):
        features = features_by_hand(model, int(TOKENS[b, row]), np.asarray(STATES[b, row]))
        chosen = [
            np.asarray(router(jnp.asarray((guess_LDR[layer] @ features)[None], jnp.float32))[0])[0]
            for layer, router in enumerate(routers)
        ]
        assert sets_of(sets[b, row]) == {(layer, int(e)) for layer, ids in enumerate(chosen) for e in ids}
    assert len(routers) == routing.layers


def test_token_pairs() -> None:
    """Every known pair by its own row, every other token by itself, at both ends of the list too."""
    vocabulary, known = 6, [(0, 3), (0, 5), (2, 0), (2, 1), (2, 5), (5, 4)]  # (token, the one before)
    bits = random.integers(1, 2**32, (len(known), ROUTING.layers, 2), dtype=np.uint32)
    alone = random.integers(1, 2**32, (vocabulary, ROUTING.layers, 2), dtype=np.uint32)
    model = TokenPairs(TokenPairsConfig(vocabulary, len(known), ROUTING))
    model.alone_VLW.set_value(jnp.asarray(alone))
    model.bits_PLW.set_value(jnp.asarray(bits))
    model.before_P.set_value(jnp.asarray([before for _, before in known], jnp.int32))
    first = [sum(token < v for token, _ in known) for v in range(vocabulary + 1)]
    model.first_U.set_value(jnp.asarray(first, jnp.int32))
    tokens, before = (jnp.asarray(part.reshape(1, -1)) for part in np.indices((vocabulary, vocabulary)))
    evidence = Evidence(jnp.zeros((1, 1, 1), jnp.uint32), lambda rows: NOTHING, before, None)
    sets = np.asarray(jax.jit(lambda rows: model(rows, None, evidence)[0])(causal_rows(np.asarray(tokens))))[0]
    for row, pair in enumerate(np.ndindex(vocabulary, vocabulary)):
        np.testing.assert_array_equal(sets[row], bits[known.index(pair)] if pair in known else alone[pair[0]])
