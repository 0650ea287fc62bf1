"""The MTP module: its first step against transformers, further ones against its definition (docs/formats.md D)."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.modeling_layers import MtpModel

from ecospec_jax.config import MtpConfig
from ecospec_jax.models import abstract
from ecospec_jax.models.moe import GroupedSigmoidRouter
from ecospec_jax.models.mtp import Mtp
from tests.parity.compare import assert_close, causal_rows, relative_error
from tests.parity.drafting import BRANCH, CONTEXT, FULL_TREE, DraftCase, caught_up, states_of
from tests.parity.fp8 import CONFIG as FP8_CONFIG
from tests.parity.fp8 import random_fp8, widened
from tests.parity.target_parity import forward
from tests.parity.torch_deepseek_v3 import config_of, put_layer, random_model, randomise, to_jax
from tests.parity.torch_targets import TorchWeights

F32 = jnp.dtype(jnp.float32)
Recycle = Literal["normed", "raw"]


@cache
def _main() -> transformers.DeepseekV3ForCausalLM:
    """The target, of which the module takes embedding and head."""
    return random_model(seed=20)


@cache
def _torch() -> MtpModel:
    """transformers' module on a small model, in memory, all weights random."""
    mtp = MtpModel(_main(), 1).eval()
    randomise(mtp.layers, seed=21)
    return mtp


def _jax(recycle: Recycle = "normed") -> Mtp:
    """Ours with the same weights."""
    ours = abstract(MtpConfig(config_of(_main().config), recycle=recycle), F32)
    weights = TorchWeights(_torch())
    weights.put(ours.embedding.weight, "embed_tokens.weight")
    weights.put(ours.head.weight, "shared_head.weight")
    for mine, name in (
        (ours.embedding_norm, "enorm"),
        (ours.hidden_norm, "hnorm"),
        (ours.join, "eh_proj"),
        (ours.norm, "post_norm"),
    ):
        weights.put(mine.weight, f"layers.0.{name}.weight")
    put_layer(weights, ours.layer, "layers.0.mtp_block.")
    assert not weights.unused, sorted(weights.unused)
    return ours


@dataclass(frozen=True)
class _Definition:
    """The module row by row, of transformers' parts; each field but the first is a mistake that is known."""

    recycle: Recycle = "normed"
    hidden_half_first: bool = False
    embedding_not_normed: bool = False
    hidden_not_normed: bool = False

    def layer(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder layer's output for a whole sequence, each row seeing those before it."""
        mtp, parts = _torch(), _torch().layers[0]
        embedded = mtp.embed_tokens(tokens)
        embedded = embedded if self.embedding_not_normed else parts.enorm(embedded)
        hidden = hidden if self.hidden_not_normed else parts.hnorm(hidden)
        halves = [hidden, embedded] if self.hidden_half_first else [embedded, hidden]
        length = len(tokens)
        positions = torch.arange(length)[None]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        x = parts.eh_proj(torch.cat(halves, dim=-1))[None]
        angles = mtp.rotary_emb(x, position_ids=positions)
        return parts.mtp_block(x, attention_mask=mask, position_embeddings=angles, position_ids=positions)[0]

    def states(self, case: DraftCase) -> np.ndarray:
        """Of the root and every node: each path drafted alone, one token after the other."""
        norm = _torch().layers[0].post_norm
        result = []
        with torch.no_grad():
            for features, tokens, nodes in zip(case.features, case.tokens, case.nodes_BN, strict=True):
                committed = torch.tensor(tokens), torch.tensor(features)
                done = {-1: (committed, self.layer(*committed)[-1])}
                for node, parent in enumerate(FULL_TREE.parents):
                    (seen, hidden), state = done[parent]
                    recycled = norm(state) if self.recycle == "normed" else state
                    grown = torch.cat([seen, torch.tensor(nodes[node : node + 1])]), torch.cat([hidden, recycled[None]])
                    done[node] = grown, self.layer(*grown)[-1]
                result.append(torch.stack([state for _, state in done.values()]).numpy())
        return np.stack(result)

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Of the next token."""
        with torch.no_grad():
            return _torch().shared_head(_torch().layers[0].post_norm(torch.tensor(states))).numpy()


def _case(seed: int) -> DraftCase:
    return DraftCase.random(97, 40, seed)


def test_first_step_equals_transformers() -> None:
    """All committed rows, and the token they draft; transformers counts positions from 1 there."""
    case, ours = _case(0), _jax()
    states, _ = caught_up(ours, case)
    for sequence, (features, tokens) in enumerate(zip(case.features, case.tokens, strict=True)):
        inputs, positions = torch.tensor(tokens)[None], 1 + torch.arange(len(tokens))[None]
        with torch.no_grad():
            hidden = torch.tensor(features)[None]
            normed = _torch().forward_layer(0, hidden, positions, None, input_ids=inputs)
            expected = _torch().shared_head(normed)[0].numpy()
            drafted, _, _ = _torch()(inputs, hidden, None, positions, None)
        logits = np.asarray(ours.logits(states[sequence, : len(tokens)]))
        assert_close(logits, expected, what="logits")
        best, log_probs = ours.propose(states[sequence, len(tokens) - 1], 3)
        assert int(best[0]) == int(drafted[0, 0])
        ranked = torch.log_softmax(torch.tensor(expected[-1]), -1).topk(3)
        assert best.tolist() == ranked.indices.tolist()
        assert_close(log_probs, ranked.values.numpy())


@pytest.mark.parametrize("recycle", ["normed", "raw"])
def test_further_steps_of_a_branching_tree(recycle: Recycle) -> None:
    """Each node sees the committed rows, its ancestors and itself in the module's own cache."""
    case = _case(1)
    states, expected = states_of(_jax(recycle), case), _Definition(recycle).states(case)
    assert states.shape == (2, 1 + sum(BRANCH**level for level in (1, 2, 3)), 40)
    assert_close(states, expected, what="states")
    assert_close(_jax(recycle).logits(jnp.asarray(states)), _Definition().logits(expected), what="logits")


@pytest.mark.parametrize(
    "mistake",
    [
        {"recycle": "raw"},
        {"hidden_half_first": True},
        {"embedding_not_normed": True},
        {"hidden_not_normed": True},
    ],
    ids=str,
)
def test_each_known_mistake_would_be_seen(mistake: dict) -> None:
    """F.26: every drafted node would differ."""
    case = _case(1)
    right, wrong = _Definition().states(case), _Definition(**mistake).states(case)
    for node in range(1, right.shape[1]):
        assert relative_error(right[:, node], wrong[:, node]) > 1e-3


def test_head_without_its_norm_would_be_seen() -> None:
    case = _case(1)
    states = states_of(_jax(), case)
    with torch.no_grad():
        unnormed = _torch().shared_head(torch.tensor(states)).numpy()
    assert relative_error(_jax().logits(jnp.asarray(states)), unnormed) > 1e-3


def test_features_are_taken_after_the_targets_final_norm() -> None:
    """What the module asks for is what transformers hands to it: `last_hidden_state`."""
    tokens = np.random.default_rng(4).integers(0, 97, (2, 9))
    with torch.no_grad():
        expected = _main().model(torch.tensor(tokens)).last_hidden_state.numpy()
    target = to_jax(_main())
    output, _ = forward(target, causal_rows(tokens), target.empty_cache(2, 9), _jax().boundaries)
    assert_close(output.features_BRF, expected)


def test_fp8_equals_its_widened_weights() -> None:
    """The projection of the two halves, embedding and head stay plain."""
    quantised = random_fp8(lambda: Mtp(MtpConfig(FP8_CONFIG), dtype=F32, rngs=nnx.Rngs(0)))
    assert quantised.join.scales is None and quantised.layer.attention.o.scales is not None
    case = DraftCase.random(61, 160, seed=3)
    (states, _), (expected, _) = caught_up(quantised, case), caught_up(widened(quantised), case)
    for sequence, length in enumerate(CONTEXT):
        assert_close(states[sequence, :length], expected[sequence, :length])


class _Listening(nnx.Module):
    """A router that keeps what it chose."""

    def __init__(self, inner: GroupedSigmoidRouter) -> None:
        self.inner, self.chosen_TK = inner, np.zeros(0)

    def __call__(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_TK, weights_TK = self.inner(x_TD)
        self.chosen_TK = np.asarray(ids_TK)
        return ids_TK, weights_TK


def test_own_experts_are_counted_pass_by_pass() -> None:
    """Distinct ones of the live rows; dead rows route nowhere."""
    module, case, longest = _jax(), _case(2), max(CONTEXT)
    router = module.layer.moe.router = _Listening(module.layer.moe.router)
    tokens_BR = np.stack([np.resize(tokens, longest) for tokens in case.tokens])
    features_BRF = jnp.asarray(np.stack([np.resize(rows, (longest, 40)) for rows in case.features]))
    cache, expected = module.empty_cache(2, longest), 0
    for lengths in (CONTEXT, [0, 2], [0, 0]):
        _, cache = module.catch_up(causal_rows(tokens_BR, lengths), features_BRF, cache)
        ids_BRK = router.chosen_TK.reshape(2, longest, -1)
        expected += len({int(e) for b, length in enumerate(lengths) for e in ids_BRK[b, :length].ravel()})
        assert int(cache.experts_read) == expected
    assert 4 < expected < 2 * 12
