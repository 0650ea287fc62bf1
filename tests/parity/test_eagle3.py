"""The EAGLE-3 drafter against an independent PyTorch formulation, and the traps of docs/formats.md F.16 to F.19."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from ecospec_jax.config import FINAL, Eagle3Config, Qwen3MoeConfig, RopeConfig, SamplingConfig, SpecConfig
from ecospec_jax.decoding import StepPlan, Weights, draft
from ecospec_jax.program import Program
from ecospec_jax.selection import likelihood
from tests import tiny
from tests.parity.compare import assert_close, causal_rows, relative_error
from tests.parity.drafting import BRANCH, FULL_TREE, DraftCase, states_of
from tests.parity.torch_eagle3 import Mistakes, TorchEagle3

BASE = Eagle3Config(
    hidden_size=26,
    target_hidden_size=14,
    intermediate_size=34,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=89,
    draft_vocab_size=37,
    rms_norm_eps=1e-3,
    rope=RopeConfig(theta=300.0),
    boundaries=(0, 2, 5),
    own_embedding=True,
)
LLAMA3 = RopeConfig(
    theta=300.0, kind="llama3", factor=4.0, original_max_positions=32, low_freq_factor=1.0, high_freq_factor=4.0
)
VARIANTS = {
    "default": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each boundary": {"norm_each_boundary": True},
    "norm output": {"norm_output": True},
    "last hidden state": {"boundaries": (FINAL,), "fc": False, "target_hidden_size": 26},
    "all of speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "llama3 rope": {"rope": LLAMA3},
    "full vocabulary": {"draft_vocab_size": 89},
    "one kv head, two boundaries": {"num_heads": 5, "num_kv_heads": 1, "boundaries": (1, 3)},
}


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Straight from the published formulas (`test_rope.py` checks ours against transformers)."""
    inverse = rope.theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "default":
        return inverse
    assert rope.kind == "llama3"
    result = []
    for frequency in inverse.tolist():
        rotations = rope.original_max_positions * frequency / (2 * torch.pi)
        if rotations > rope.high_freq_factor:
            result.append(frequency)
        elif rotations < rope.low_freq_factor:
            result.append(frequency / rope.factor)
        else:
            smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            result.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return torch.tensor(result)


forward = nnx.jit(lambda target, rows, cache, boundaries: target(rows, cache, boundaries), static_argnums=3)


def _case(config: Eagle3Config, seed: int) -> DraftCase:
    return DraftCase.random(config.vocab_size, len(config.boundaries) * config.target_hidden_size, seed)


def _expected(reference: TorchEagle3, case: DraftCase) -> np.ndarray:
    """The reference's states in the same order."""
    result = []
    with torch.no_grad():
        for features, tokens, nodes in zip(case.features, case.tokens, case.nodes_BN, strict=True):
            states, memory = reference.context(torch.tensor(features), tokens.tolist())
            done = {-1: (states[-1], memory)}
            for node, parent in enumerate(FULL_TREE.parents):
                position = len(tokens) + int(FULL_TREE.depths[node])
                done[node] = reference.draft(done[parent][0], int(nodes[node]), position, done[parent][1])
            result.append(torch.stack([state for state, _ in done.values()]).numpy())
    return np.stack(result)


def _reference(config: Eagle3Config, **mistakes: bool) -> TorchEagle3:
    return TorchEagle3(config, _inverse_frequencies(config.rope, config.head_dim), Mistakes(**mistakes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_recurrent_steps_of_a_branching_tree(variant: str) -> None:
    """States of every node, and what is proposed there: target ids through the offset map, log-probabilities."""
    config = dataclasses.replace(BASE, **VARIANTS[variant])
    reference = _reference(config)
    for seed in range(50):
        case = _case(config, seed)
        expected = _expected(reference, case)
        log_probs_BNd = reference.log_probs(torch.tensor(expected)).numpy()
        best_BNk = -np.sort(-log_probs_BNd)[..., : BRANCH + 1]
        if (-np.diff(best_BNk)).min() > 1e-4:
            break
    else:
        raise AssertionError("near-ties decide the proposals of every case tried")

    drafter = reference.to_jax()
    states = states_of(drafter, case)
    assert_close(states, expected, what="states")
    tokens_BNk, proposed_BNk = drafter.propose(jnp.asarray(states), BRANCH)
    assert_close(proposed_BNk, best_BNk[..., :BRANCH], what="log-probabilities")
    draft_ids = np.argsort(-log_probs_BNd)[..., :BRANCH]
    np.testing.assert_array_equal(tokens_BNk, draft_ids + reference.d2t.numpy()[draft_ids])


@pytest.fixture(scope="module")
def square():
    """A drafter whose features are as wide as its state, where deciding on `fc` by comparing widths goes wrong."""
    config = dataclasses.replace(BASE, hidden_size=42)
    case = _case(config, 0)
    return config, case, states_of(_reference(config).to_jax(), case)


def test_features_as_wide_as_the_state(square) -> None:
    config, case, states = square
    assert_close(states, _expected(_reference(config), case))


@pytest.mark.parametrize("mistake", [field.name for field in dataclasses.fields(Mistakes)])
def test_each_known_mistake_would_be_seen(square, mistake: str) -> None:
    """F.16: every drafted node would differ."""
    config, case, states = square
    wrong = _expected(_reference(config, **{mistake: True}), case)
    for node in range(1, states.shape[1]):
        assert relative_error(states[:, node], wrong[:, node]) > 1e-3


def test_captured_features_identify_the_boundaries() -> None:
    """F.17: layer i adds 10**i to the residual stream, so boundary b is the embedding plus 0, 1, 11, 111, 1111.

    The last of them is taken before the final norm, and `FINAL` after it.
    """
    layers, hidden = 4, 14
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=20,
        moe_intermediate_size=10,
        num_experts=5,
        experts_per_token=2,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=100.0),
        max_positions=64,
        dense_layers=(2,),
        attention_bias=True,
    )
    target = tiny.make_target(config)
    for index, layer in enumerate(target.layers):
        layer.attention.o.weight.set_value(jnp.zeros_like(layer.attention.o.weight[...]))
        layer.attention.o.bias.set_value(jnp.full(hidden, 10.0**index))
        silent = layer.mlp.down.weight if layer.moe is None else layer.moe.experts.down.weight
        silent.set_value(jnp.zeros_like(silent[...]))
    tokens = np.arange(6).reshape(2, 3)
    embedded = np.asarray(target.embedding(tokens))
    states = {boundary: embedded + (10.0**boundary - 1) / 9 for boundary in range(layers + 1)}
    last = states[layers]
    states[FINAL] = (
        last / np.sqrt(np.mean(last**2, axis=-1, keepdims=True) + 1e-6) * np.asarray(target.norm.weight[...])
    )
    for boundaries in [tuple(range(layers + 1)), (1, 3), (FINAL,)]:
        output, _ = forward(target, causal_rows(tokens), target.empty_cache(2, 5), boundaries)
        expected = [states[boundary] for boundary in boundaries]
        np.testing.assert_allclose(output.features_BRF, np.concatenate(expected, axis=-1), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kind", [{"boundaries": (0, 1, 2)}, {"boundaries": (FINAL,), "fc": False, "hidden_size": 12}])
def test_entry_t_pairs_the_features_of_position_t_with_token_t_plus_1(kind) -> None:
    """F.18: prefill and the first draft of prompts of unequal length, against committed rows fed by hand."""
    target = tiny.make_target()
    config = dataclasses.replace(BASE, target_hidden_size=12, vocab_size=29, draft_vocab_size=17, **kind)
    reference = _reference(config)
    target_def, target_state = nnx.split(target)
    drafter_def, drafter_state = nnx.split(reference.to_jax())
    plan = StepPlan(target_def, drafter_def, likelihood, SpecConfig(), SamplingConfig(), eos_ids=())
    weights = Weights(target_state, drafter_state)
    tree, state = jax.jit(draft, static_argnums=0)(plan, weights, tiny.prefilled(Program(plan), weights))
    keys_BKSH, values_BKSH = state.draft_cache.keys[0], state.draft_cache.values[0]
    for sequence, prompt in enumerate(tiny.PROMPTS):
        output, _ = forward(target, causal_rows([prompt]), target.empty_cache(1, len(prompt)), config.boundaries)
        root = int(state.tokens_BS[sequence, len(prompt)])
        with torch.no_grad():
            states, memory = reference.context(torch.tensor(np.array(output.features_BRF[0])), [*prompt[1:], root])
            best = reference.log_probs(states[-1]).topk(2)
        for ours, theirs in ((keys_BKSH, memory[0]), (values_BKSH, memory[1])):
            assert_close(ours[sequence, :, : len(prompt)], torch.stack(theirs, dim=1).numpy())
        assert tree.tokens_BN[sequence, :2].tolist() == [reference.target_id(int(i)) for i in best.indices]
        assert_close(tree.log_probs_BN[sequence, :2], best.values.numpy())
