"""Decoding with backbones that read the target's tokens in every way: the tokens are plain decoding's."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder
from ecospec_jax.config import RoutingShape, SpecConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.models.predictor import Evidence
from tests import tiny, tiny_predictors
from tests.parity.compare import causal_rows
from tests.tiny import PROMPTS, quick_compilation
from tests.tiny_predictors import (
    BRIDGES,
    ROUTING,
    TARGET,
    answers_of,
    helpful,
    make_plan,
    make_weights,
    observe,
    plain_answers,
    prefilled,
    sets_of,
)

__all__ = ["quick_compilation"]
SPEC = SpecConfig(depth=3, branch=2, budget=5)


@pytest.mark.parametrize("bridge", BRIDGES)
def test_after_each_step(bridge: str) -> None:
    """The forecast of the root and of accepted nodes is that of the committed text, read anew as a plain sequence."""
    model = tiny_predictors.make_backbone(BRIDGES[bridge])
    graph, weights_of_model = nnx.split(model)
    plan, weights = make_plan(SPEC, predictor=graph), make_weights(script=helpful(), predictor=weights_of_model)
    state, seen = prefilled(plan, weights), []
    while not state.finished_B.all():
        seen.append((np.asarray(state.length_B), observe(plan, weights, state)))
        state = seen[-1][1].after
    assert answers_of(state) == plain_answers()
    assert max(int(max(np.asarray(one.after.length_B) - before)) for before, one in seen) > 2

    texts = np.asarray(state.tokens_BS)
    rows = causal_rows(texts)
    evidence = Evidence(jnp.zeros((3, ROUTING.layers, 2), jnp.uint32), lambda _: None)
    read = nnx.jit(lambda model, rows: model(rows, model.empty_cache(*texts.shape), evidence)[0])
    plain_BTLW = np.asarray(read(model, rows))
    compared = 0
    for before, one in seen:
        for b, (first, last) in enumerate(zip(before, np.asarray(one.after.length_B), strict=True)):
            if first == last:
                continue
            assert sets_of(one.forecast.root_BLW[b]) == sets_of(plain_BTLW[b, first])
            node, tree = -1, one.tree
            for place in range(first + 1, last):  # down the accepted path
                children = np.flatnonzero(np.asarray(tree.parents_BN[b]) == node)
                node = next(int(n) for n in children if tree.tokens_BN[b, n] == texts[b, place])
                assert sets_of(one.forecast.nodes_BNLW[b, node]) == sets_of(plain_BTLW[b, place])
                compared += 1
    assert compared > 10


def test_adaptive_trees() -> None:
    """Through the front door: the predictor is reminded of the tokens of plain steps, several at once."""
    small, bridge = replace(tiny.TARGET, num_layers=1), BRIDGES["retokenise"]
    config = replace(bridge, routing=RoutingShape.of(small), backbone=replace(bridge.backbone, num_layers=1))
    drafter = tiny.make_drafter(replace(tiny.DRAFTER, boundaries=(0, 1, 1)))
    predictors = {"backbone": tiny_predictors.make_backbone(config)}
    decoder = Decoder(tiny.make_target(small), drafter, eos_ids=(), predictors=predictors)
    generate = partial(decoder.generate, PROMPTS, seed=3, max_new_tokens=12, batch_size=3)
    plain = generate(method="ar")
    adaptive = generate(method="rate", spec=SpecConfig(depth=2, budget=4, probe_every=2))
    assert [one.tokens for one in adaptive.generations] == [one.tokens for one in plain.generations]


def test_bytes_of_a_pass() -> None:
    """Rows of tables are not counted; every bridge reads the same layers and heads, one a projection too."""
    predict = {name: byte_model(TARGET, 2, predictor=config).predict for name, config in BRIDGES.items()}
    assert predict["shared"] == predict["retokenise"]
    projection = TARGET.hidden_size * BRIDGES["shared"].backbone.hidden_size
    assert predict["target_embedding"] == predict["shared"] + 2 * projection
