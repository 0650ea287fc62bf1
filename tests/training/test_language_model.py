"""Next-token training: packing, masks, the loss, where gradients go, learning, exact resume."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.checkpoint import parameters
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.training.experts import BALANCE_WEIGHT, BalanceLoss, prepare
from ecospec_jax.training.language_model import (
    next_token_loss,
    optimiser,
    run_target,
    training_loss,
)
from ecospec_jax.training.sequences import PADDING, Packed, document_rows, pack_documents
from ecospec_jax.training.trainer import Trainer
from tests.parity.compare import causal_rows
from tests.tiny import quick_compilation
from tests.training.models import GPT_OSS, make_gpt_oss

__all__ = ["quick_compilation"]
LENGTH, STEPS = 24, 60
random = np.random.default_rng(0)
DOCUMENTS = [random.integers(0, GPT_OSS.vocab_size, n).tolist() for n in (9, 24, 5, 31, 11, 2, 14, 1)]


@cache
def packed() -> Packed:
    return pack_documents(DOCUMENTS, LENGTH)


def pieces(packed: Packed) -> list[list[int]]:
    tokens_BT, documents_BT = np.asarray(packed.tokens_BT), np.asarray(packed.documents_BT)
    return [
        tokens_BT[b, documents_BT[b] == number].tolist()
        for b in range(len(tokens_BT))
        for number in range(documents_BT[b].max() + 1)
    ]


def test_packing_keeps_every_document_whole() -> None:
    """Those that are too long are cut; sequences are few, and padding is behind the documents."""
    cut = [document[at : at + LENGTH] for document in DOCUMENTS for at in range(0, len(document), LENGTH)]
    assert sorted(pieces(packed())) == sorted(cut)
    total = sum(len(document) for document in DOCUMENTS)
    assert packed().tokens_BT.shape == (-(-total // LENGTH), LENGTH)
    for numbers in np.asarray(packed().documents_BT):
        inside = numbers[numbers != PADDING]
        assert (np.diff(inside) >= 0).all() and (numbers[len(inside) :] == PADDING).all()


def test_documents_do_not_see_each_other() -> None:
    """Each packed document has the target's hidden states of that document alone, sliding layers included."""
    model = make_gpt_oss()
    hidden_BTD = np.asarray(jax.jit(lambda block: run_target(model, block).hidden_BRD)(packed()))

    @jax.jit
    def alone(rows):
        return model(rows, model.empty_cache(1, LENGTH), ())[0].hidden_BRD

    documents_BT = np.asarray(packed().documents_BT)
    for b in range(len(documents_BT)):
        for number in range(documents_BT[b].max() + 1):
            inside = documents_BT[b] == number
            tokens = np.asarray(packed().tokens_BT)[b, inside]
            rows = causal_rows(np.pad(tokens, (0, LENGTH - len(tokens)))[None], [len(tokens)])
            expected = np.asarray(alone(rows))[0, : len(tokens)]
            np.testing.assert_allclose(hidden_BTD[b, inside], expected, rtol=1e-4, atol=1e-5)


def test_loss_is_the_mean_cross_entropy_of_following_tokens() -> None:
    """And the training loss adds the layers' mean balance; what padding holds changes nothing."""
    model = make_gpt_oss()
    logits_BTV = jax.jit(lambda block: model.logits(run_target(model, block).hidden_BRD))(packed())
    logits_BTV = np.asarray(logits_BTV, np.float64)
    log_probs_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(axis=-1, keepdims=True))
    tokens_BT, documents_BT = np.asarray(packed().tokens_BT), np.asarray(packed().documents_BT)
    losses = [
        -log_probs_BTV[b, t, tokens_BT[b, t + 1]]
        for b, t in np.ndindex(len(tokens_BT), LENGTH - 1)
        if documents_BT[b, t] == documents_BT[b, t + 1] != PADDING
    ]
    noisy = Packed(jnp.where(packed().documents_BT == PADDING, 7, packed().tokens_BT), packed().documents_BT)
    loss = jax.jit(partial(next_token_loss, model))
    for block in (packed(), noisy):
        assert float(loss(block)) == pytest.approx(np.mean(losses), rel=1e-5)

    prepared = prepare(make_gpt_oss(), quantised=False)
    for layer in prepared.layers:
        layer.moe.capacity = float(GPT_OSS.num_experts)
    graph, state = nnx.split(prepared)

    @jax.jit
    def whole_and_balances(block: Packed):
        model = nnx.merge(graph, state)
        run_target(model, block)
        return training_loss(nnx.merge(graph, state), block), jax.tree.leaves(nnx.pop(model, BalanceLoss))

    whole, balances = whole_and_balances(packed())
    assert len(balances) == GPT_OSS.num_layers
    assert float(whole) == pytest.approx(np.mean(losses) + BALANCE_WEIGHT * np.mean(balances), rel=1e-5)


def trainer(seed: int = 3) -> Trainer[GptOss, Packed]:
    model = prepare(make_gpt_oss(seed), quantised=False)
    return Trainer(model, optimiser(steps=STEPS, muon_rate=0.02, adam_rate=1e-2), training_loss)


@cache
def counting_texts() -> list[Packed]:
    """Texts in which each token is the last one plus a step that the first two tokens show."""
    texts = np.random.default_rng(4)
    blocks = []
    for _ in range(STEPS):
        starts, steps = texts.integers(0, GPT_OSS.vocab_size, (12, 1)), texts.integers(1, 4, (12, 1))
        counted = (starts + steps * np.arange(LENGTH // 2)) % GPT_OSS.vocab_size
        blocks.append(pack_documents(counted.tolist(), LENGTH))
    return blocks


def test_learns_to_count() -> None:
    """The loss falls far below that of knowing token frequencies, and every parameter moves, routers and sinks too."""
    learner = trainer()
    before = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    losses = [float(learner.step(block)) for block in counting_texts()]
    assert losses[0] > 3 and np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5]), losses
    after = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    assert not [path for path in before if np.array_equal(before[path], after[path])]
    assert any("sinks" in path for path in before) and any("router" in path for path in before)


def test_learning_rates_are_flat_then_fall_to_zero() -> None:
    """Matrices move by orthogonal steps of the Muon rate; everything else by Adam's."""
    model = prepare(make_gpt_oss(), quantised=False)
    params = nnx.state(model, nnx.Param)
    transformation = optimiser(steps=10, muon_rate=0.02, adam_rate=1e-3)
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    gradients = jax.tree.map(lambda value: jnp.asarray(random.normal(size=value.shape), jnp.float32), params)
    sizes = []
    for _ in range(11):
        changes, state = update(gradients, state, params)
        by_path = {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(changes)}
        sizes.append(np.linalg.svd(by_path["layers.1.moe.experts.down.weight"], compute_uv=False))
        if len(sizes) == 1:
            for path in ("layers.0.attention.sinks", "layers.0.moe.router.gate.weight", "embedding.weight"):
                assert (np.abs(by_path[path]) > 0.9e-3).all() and (np.abs(by_path[path]) < 1.6e-3).all()
    assert sizes[0].shape == (GPT_OSS.num_experts, GPT_OSS.hidden_size)
    assert 0.3 * 0.02 < sizes[0].min() and sizes[0].max() < 1.5 * 0.02  # singular values near 1, times the rate
    rates = np.array([size.sum() for size in sizes]) / sizes[0].sum()
    np.testing.assert_allclose(rates, [1, 1, 1, *np.linspace(1, 0, 8)], atol=2e-3)


def test_resumed_training_equals_an_uninterrupted_one() -> None:
    """Bit for bit, in a trainer that was set up anew."""
    blocks = counting_texts()
    whole = trainer()
    losses = [float(whole.step(block)) for block in blocks[:3]]
    kept = jax.tree.map(np.array, whole.state)
    losses += [float(whole.step(block)) for block in blocks[3:5]]
    other = trainer(seed=8)
    other.restore(jax.tree.map(jnp.asarray, kept))
    assert [float(other.step(block)) for block in blocks[3:5]] == losses[3:]
    for ours, theirs in zip(jax.tree.leaves(other.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_number_positions_within_documents() -> None:
    rows = document_rows(packed())
    for numbers, positions in zip(np.asarray(packed().documents_BT), np.asarray(rows.positions_BR), strict=True):
        for number in range(numbers.max() + 1):
            assert positions[numbers == number].tolist() == list(range((numbers == number).sum()))
