"""The predictor's backbone against transformers' dense Qwen3, float32: heads, cache and tree."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3Config, Qwen3ForCausalLM

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import RopeConfig, RoutingShape
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.predictor_config import BackboneConfig, BackbonePredictorConfig
from tests import tiny_predictors
from tests.parity.compare import Tree, assert_close, causal_rows, relative_error, tree_rows

VOCAB, EMBEDDING, LAYERS, EXPERTS = 47, 22, 3, 41
BASE = BackboneConfig(
    hidden_size=26,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    intermediate_size=34,
    rms_norm_eps=1e-2,  # large, so that it counts
    rope=RopeConfig(theta=300.0),
)
CONFIGS = {
    "grouped heads": {},
    "one kv head": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 14},
    "no grouping, wide heads": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 18, "rms_norm_eps": 1e-6},
}
BATCH, ROWS, CAPACITY = 2, 8, 24  # every block has these shapes, so each model is compiled once
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}

_predict = nnx.jit(lambda model, rows, cache: model.logits(rows, cache))


def predict(model: BackbonePredictor, rows: Rows, cache: KVCache) -> tuple[np.ndarray, KVCache]:
    logits_BRLE, cache = _predict(model, rows, cache)
    return np.asarray(logits_BRLE), cache


@functools.cache
def models(name: str) -> SimpleNamespace:
    """A random Qwen3 of transformers, and a predictor whose backbone and first head are its own."""
    backbone = BackboneConfig(**(vars(BASE) | CONFIGS[name]))
    torch.manual_seed(list(CONFIGS).index(name))
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=EXPERTS,
            hidden_size=backbone.hidden_size,
            num_hidden_layers=backbone.num_layers,
            num_attention_heads=backbone.num_heads,
            num_key_value_heads=backbone.num_kv_heads,
            head_dim=backbone.head_dim,
            intermediate_size=backbone.intermediate_size,
            rms_norm_eps=backbone.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": backbone.rope.theta},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in path:
                parameter.add_(1.0)
    tensors = {path: value.numpy() for path, value in theirs.state_dict().items()}

    config = BackbonePredictorConfig(VOCAB, EMBEDDING, backbone, RoutingShape(LAYERS, EXPERTS, 4))
    ours = tiny_predictors.make_backbone(config)
    for path, variable in parameters(ours).items():
        if path == "backbone.norm.weight":
            source = "model.norm.weight"
        elif path.startswith("backbone.layers."):
            _, _, layer, *middle, last = path.split(".")
            source = f"model.layers.{layer}.{NAMES['.'.join(middle)]}.{last}"
        elif path == "heads.0.weight":
            source = "lm_head.weight"
        else:
            continue
        assert variable.get_value().shape == tensors[source].shape, path
        variable.set_value(jnp.asarray(tensors.pop(source)))
    assert set(tensors) == {"model.embed_tokens.weight"}  # ours is the target's, behind a projection
    return SimpleNamespace(torch=theirs, jax=ours)


def reference(pair: SimpleNamespace, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Their hidden states after the final norm and logits, for our embedded tokens."""
    weight, projection = (
        torch.tensor(np.asarray(m.weight.get_value())) for m in (pair.jax.embedding, pair.jax.projection)
    )
    with torch.no_grad():
        embedded = (weight[torch.as_tensor(tokens)] @ projection.T)[None]
        return (
            pair.torch.model(inputs_embeds=embedded).last_hidden_state[0].numpy(),
            pair.torch(inputs_embeds=embedded).logits[0].numpy(),
        )


@pytest.fixture(params=CONFIGS)
def pair(request) -> SimpleNamespace:
    return models(request.param)


def test_heads(pair) -> None:
    """Right-padded sequences of unequal lengths; every head is its own matrix over the same hidden state.

    A head has more outputs than the hidden state has channels, so equal logits mean equal hidden states.
    """
    random = np.random.default_rng(0)
    lengths = [ROWS, 5]
    tokens_BR = random.integers(0, VOCAB, (BATCH, ROWS))
    rows = causal_rows(tokens_BR, lengths)
    logits_BRLE, _ = predict(pair.jax, rows, pair.jax.empty_cache(BATCH, CAPACITY))
    assert logits_BRLE.shape == (BATCH, ROWS, LAYERS, EXPERTS) and logits_BRLE.dtype == np.float32
    for b, length in enumerate(lengths):
        their_hidden, their_logits = reference(pair, tokens_BR[b, :length])
        assert_close(logits_BRLE[b, :length, 0], their_logits, what="first head")
        for layer in range(1, LAYERS):
            head = np.asarray(pair.jax.heads[layer].weight.get_value())
            assert_close(logits_BRLE[b, :length, layer], their_hidden @ head.T, what=f"head {layer}")
        assert relative_error(logits_BRLE[b, 1:length, 0], their_logits[:-1]) > 0.1


def test_cache_and_tree(pair) -> None:
    """Committed rows in two calls, then a tree behind them: every path as transformers evaluates it whole."""
    random = np.random.default_rng(1)
    trees, context, first = [Tree([-1, 0, 0, 1, 2, 3, 3, 0]), Tree([-1, 0, 1, 1, 0, 4, 5, 6])], [5, 8], [3, 2]
    before = [random.integers(0, VOCAB, length) for length in context]
    nodes_BN = random.integers(0, VOCAB, (BATCH, ROWS))

    def padded(parts: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(part, (0, ROWS - len(part))) for part in parts])

    cache = pair.jax.empty_cache(BATCH, CAPACITY)
    starts = padded([tokens[:cut] for tokens, cut in zip(before, first, strict=True)])
    ends = padded([tokens[cut:] for tokens, cut in zip(before, first, strict=True)])
    _, cache = predict(pair.jax, causal_rows(starts, first), cache)
    _, cache = predict(pair.jax, causal_rows(ends, np.subtract(context, first), first), cache)
    logits_BNLE, _ = predict(pair.jax, tree_rows(nodes_BN, trees, context), cache)
    for b, tree in enumerate(trees):
        for leaf in tree.leaves:
            path = tree.paths[leaf]
            _, their_logits = reference(pair, np.concatenate([before[b], nodes_BN[b, path]]))
            assert_close(logits_BNLE[b, path, 0], their_logits[context[b] :], what=f"sequence {b}, path to {leaf}")
