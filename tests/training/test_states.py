"""The drafter's states along a text against drafting it, and predictors that learn a router they can represent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.cache import Rows
from ecospec_jax.checkpoint import borrow
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.state_predictors import DrafterFeatures, TargetGates
from ecospec_jax.predictor_config import DrafterFeaturesConfig, TargetGatesConfig
from ecospec_jax.training.overlap import top_k_overlap
from ecospec_jax.training.predictor import live_tokens, optimiser, pack
from ecospec_jax.training.states import TOO_EARLY, choice_loss, states_of
from ecospec_jax.training.traces import Trace
from ecospec_jax.training.trainer import Trainer
from tests import tiny
from tests.parity.compare import assert_close, causal_rows
from tests.tiny import TARGET, quick_compilation

__all__ = ["quick_compilation"]
F32 = jnp.dtype("float32")
TEXTS = [tiny.prompt(length, seed) for length, seed in ((9, 3), (14, 4))]


def test_states_are_those_that_drafting_has() -> None:
    """Of every token: the prefix is processed with the target's features, the tokens behind it are drafted."""
    target, drafter = tiny.make_target(), tiny.make_drafter()
    found = states_of(target, drafter, TEXTS)
    for text, states_TSH in zip(TEXTS, found, strict=True):
        output, _ = jax.jit(target, static_argnums=2)(
            causal_rows([text]), target.empty_cache(1, len(text), 1), drafter.boundaries
        )
        for place, step in ((2, 0), (5, 0), (5, 2), (8, 1), (len(text) - 1, 2)):
            known = place - step  # tokens of the prefix
            rows = causal_rows([text[1:known]])
            states, cache = drafter.catch_up(rows, output.features_BRF[:, : known - 1], drafter.empty_cache(1, 20))
            state = states[:, -1:]
            for drafted in range(step):
                ahead = Rows(
                    tokens_BR=jnp.array([[text[known + drafted]]]),
                    positions_BR=jnp.array([[known - 1 + drafted]]),
                    live_BR=jnp.ones((1, 1), bool),
                    context_B=jnp.array([known - 1]),
                    mask_BRW=jnp.ones((1, 1, drafted + 1), bool),
                    offset=drafted,
                )
                state, cache = drafter.extend(ahead, state, cache)
            assert states_TSH.dtype == np.float16 and states_TSH.shape[0] == len(text)
            np.testing.assert_allclose(states_TSH[place, step], state[0, 0], rtol=2e-3, atol=2e-3)
        for step in range(states_TSH.shape[1]):
            assert (states_TSH[: TOO_EARLY + step, step] == 0).all()


def test_loss_by_hand() -> None:
    """Every draft step counts where a state was there to propose the token; padding never."""
    random = np.random.default_rng(0)
    model = make("drafter_features")
    traces = [made_up_trace(random, length) for length in (5, 8)]
    examples = pack(traces, 9, ROUTING)
    total, tokens = 0.0, 0
    for trace in traces:
        tokens += len(trace.tokens_T)
        for step in range(3):
            logits = np.asarray(model.logits(trace.tokens_T, trace.states_TSH[:, step].astype(np.float32)), np.float64)
            chance = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
            for place in range(TOO_EARLY + step, len(trace.tokens_T)):
                chosen = np.take_along_axis(chance[place], trace.experts_TLK[place].astype(int), axis=-1)
                total -= np.log(chosen).mean()
    assert float(choice_loss(model, examples)) == pytest.approx(total / (3 * tokens), rel=1e-4)


ROUTING = RoutingShape.of(TARGET)
SIZE = 6


def made_up_trace(random: np.random.Generator, length: int) -> Trace:
    tokens = random.integers(0, TARGET.vocab_size, length)
    states = random.normal(size=(length, 3, SIZE)).astype(np.float16)
    scores = random.random((length, ROUTING.layers, ROUTING.experts))
    experts = np.argsort(-scores)[..., : ROUTING.k]
    return Trace("made up", "p", 1, tokens.astype(np.int32), experts.astype(np.uint16), states)


def make(kind: str) -> DrafterFeatures | TargetGates:
    if kind == "drafter_features":
        config = DrafterFeaturesConfig(TARGET.vocab_size, TARGET.hidden_size, SIZE, 16, "", ROUTING)
        model = tiny.randomised(lambda: DrafterFeatures(config, dtype=F32, rngs=nnx.Rngs(0)), 7)
    else:
        config = TargetGatesConfig(TARGET, SIZE, 16, "")
        model = tiny.randomised(lambda: TargetGates(config, dtype=F32, rngs=nnx.Rngs(0)), 7)
    borrow(model, config, tiny.make_target())
    return model


@pytest.mark.parametrize("kind", ["drafter_features", "target_gates"])
def test_learns_a_router_that_it_can_represent(kind: str) -> None:
    """Experts that a fixed map of state and token chooses; borrowed parameters stay as they are."""
    random, model = np.random.default_rng(1), make(kind)
    embedding = np.asarray(tiny.make_target().embedding.weight[...])
    from_state = random.normal(size=(TARGET.hidden_size, SIZE)) * 1.5
    gates = [np.asarray(layer.moe.router.gate.weight[...]) for layer in tiny.make_target().layers]
    traces = []
    for _ in range(24):
        trace = made_up_trace(random, 16)
        hidden = embedding[trace.tokens_T][:, None] + trace.states_TSH.astype(float) @ from_state.T
        scores = np.einsum("th,leh->tle", hidden[:, 0], np.stack(gates))
        experts = np.argsort(-scores)[..., : ROUTING.k].astype(np.uint16)
        same = np.repeat(trace.states_TSH[:, :1], 3, axis=1)  # whatever the draft step
        traces.append(replace(trace, experts_TLK=experts, states_TSH=same))
    examples = pack(traces[:20], 16, ROUTING)
    trainer = Trainer(model, optimiser(2e-2, 300, 10, 0.0), choice_loss, weigh=live_tokens)
    before = top_k_overlap(trainer.model, traces[20:], 4, 16, first=TOO_EARLY).mean()
    for _ in range(300):
        trainer.step(examples)
    after = top_k_overlap(trainer.model, traces[20:], 4, 16, first=TOO_EARLY).mean()
    assert before < 0.6 < 0.8 < after
    assert_close(trainer.model.features.embedding.weight[...], embedding, what="embedding")
