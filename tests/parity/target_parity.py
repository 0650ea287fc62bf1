"""What every target family must pass against transformers, float32: logits, residual stream, routing."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.parity.compare import Tree, assert_close, causal_rows, tree_rows
from tests.parity.torch_targets import TorchOutput, run

BATCH, LONGEST, CAPACITY = 2, 13, 33  # shared by the tests, so that each model compiles few shapes
MIN_GAP = 1e-4  # between the probabilities of ranks k and k + 1: rounding must not decide the routing

forward = nnx.jit(lambda model, rows, cache, boundaries: model(rows, cache, boundaries), static_argnums=3)


def _draw(
    model, lengths: list[int], cut: Callable[[int, np.ndarray], list[np.ndarray]] = lambda _, tokens: [tokens]
) -> tuple[list[np.ndarray], list[list[TorchOutput]]]:
    """Random sequences, and transformers' evaluation of the parts that `cut` makes of each; no near-tie in any."""
    for seed in range(100):
        random = np.random.default_rng(seed)
        sequences = [random.integers(0, model.config.vocab_size, length) for length in lengths]
        parts = [[run(model, part) for part in cut(index, tokens)] for index, tokens in enumerate(sequences)]
        if min(part.gap_LR.min() for group in parts for part in group) > MIN_GAP:
            return sequences, parts
    raise AssertionError("near-ties decide the routing of every sequence tried")


def _pad(sequences: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.pad(tokens, (0, LONGEST - len(tokens)), constant_values=1) for tokens in sequences])


def _evaluate(model, rows, cache):
    """Logits, boundaries 0..L as a list of [B, R, D], expert ids, and the cache."""
    layers = model.config.num_layers
    output, cache = forward(model, rows, cache, tuple(range(layers + 1)))
    boundaries = np.split(np.asarray(output.features_BRF), layers + 1, axis=-1)
    return np.asarray(model.logits(output.hidden_BRD)), boundaries, np.asarray(output.expert_ids_LBRK), cache


def _assert_rows_match(ours, sequence: int, rows: list[int], reference: TorchOutput, positions: list[int]) -> None:
    """Our `rows` of a batch entry against `positions` of a plain evaluation."""
    logits, boundaries, expert_ids_LBRK, _ = ours
    assert_close(logits[sequence, rows], reference.logits_RV[positions], what="logits")
    for index, (mine, theirs) in enumerate(zip(boundaries, reference.boundaries, strict=True)):
        assert_close(mine[sequence, rows], theirs[positions], what=f"boundary {index}")
    np.testing.assert_array_equal(
        np.sort(expert_ids_LBRK[:, sequence, rows]), np.sort(reference.expert_ids_LRK[:, positions])
    )


class TargetParity:
    """A subclass' module has a fixture `models`: a transformers model (`torch`), and ours with its weights (`jax`)."""

    rows: int | None = None  # of `empty_cache`

    def test_prefill_of_unequal_lengths(self, models) -> None:
        """Right-padded sequences; padding changes nothing and routes nowhere."""
        lengths = [LONGEST, 7]
        sequences, references = _draw(models.torch, lengths)
        ours = _evaluate(
            models.jax, causal_rows(_pad(sequences), lengths), models.jax.empty_cache(BATCH, CAPACITY, self.rows)
        )
        for sequence, length in enumerate(lengths):
            rows = list(range(length))
            _assert_rows_match(ours, sequence, rows, references[sequence][0], rows)
            assert (ours[2][:, sequence, length:] == models.jax.config.num_experts).all()

    def test_decoding_row_by_row(self, models) -> None:
        """Prefill, then one row per call through the cache, for two sequences of unequal length."""
        starts, steps = np.array([4, 9]), 4
        sequences, references = _draw(models.torch, list(starts + steps))
        cache = models.jax.empty_cache(BATCH, CAPACITY, self.rows)
        *_, cache = _evaluate(models.jax, causal_rows(_pad(sequences), starts), cache)
        for at_B in (starts + step for step in range(steps)):
            tokens_B1 = [[tokens[at]] for tokens, at in zip(sequences, at_B, strict=True)]
            ours = _evaluate(models.jax, causal_rows(tokens_B1, context_B=at_B), cache)
            cache = ours[3]
            for sequence, at in enumerate(at_B):
                _assert_rows_match(ours, sequence, [0], references[sequence][0], [at])

    def test_tree_rows_equal_every_path_alone(self, models) -> None:
        """A branching tree behind unequal prefixes: each root-to-leaf path as if it were the only continuation."""
        trees = [Tree([-1, 0, 0, 1, 1, 2, 3]), Tree([-1, 0, 1, 1, 0, 4, 4])]
        contexts = [5, 11]

        def paths(index: int, tokens: np.ndarray) -> list[np.ndarray]:
            prefix, nodes = tokens[: contexts[index]], tokens[contexts[index] :]
            return [np.concatenate([prefix, nodes[trees[index].paths[leaf]]]) for leaf in trees[index].leaves]

        sequences, references = _draw(models.torch, [context + 7 for context in contexts], paths)
        prefixes = [tokens[:context] for tokens, context in zip(sequences, contexts, strict=True)]
        nodes_BR = [tokens[context:] for tokens, context in zip(sequences, contexts, strict=True)]
        cache = models.jax.empty_cache(BATCH, CAPACITY, self.rows)
        *_, cache = _evaluate(models.jax, causal_rows(_pad(prefixes), contexts), cache)
        ours = _evaluate(models.jax, tree_rows(nodes_BR, trees, contexts), cache)
        for sequence, (tree, context) in enumerate(zip(trees, contexts, strict=True)):
            for leaf, reference in zip(tree.leaves, references[sequence], strict=True):
                path = tree.paths[leaf]
                _assert_rows_match(ours, sequence, path, reference, list(range(context, context + len(path))))

    def test_router_choices_and_combine_weights(self, models) -> None:
        """Each router on the inputs that transformers' router saw."""
        _, [[reference]] = _draw(models.torch, [LONGEST])
        routers = [layer.moe.router for layer in models.jax.layers if layer.moe is not None]
        assert len(routers) == len(reference.expert_ids_LRK) == len(models.jax.config.moe_layers)
        for index, router in enumerate(routers):
            ids_RK, weights_RK = router(jnp.asarray(reference.router_inputs_LRD[index]))
            order, their_order = np.argsort(ids_RK), np.argsort(reference.expert_ids_LRK[index])
            np.testing.assert_array_equal(
                np.take_along_axis(np.asarray(ids_RK), order, 1),
                np.take_along_axis(reference.expert_ids_LRK[index], their_order, 1),
            )
            assert_close(
                np.take_along_axis(np.asarray(weights_RK), order, 1),
                np.take_along_axis(reference.combine_weights_LRK[index], their_order, 1),
                what=f"combine weights of router {index}",
            )
