"""How parity tests compare arrays, and the row blocks they feed the models."""

import jax.numpy as jnp
import numpy as np

from ecospec_jax.cache import Rows

BOUND = 2e-5  # largest difference over largest reference value, in float32


def relative_error(ours, reference) -> float:
    """Largest difference over the reference's largest magnitude; infinite where either is not finite."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert ours.shape == reference.shape, f"{ours.shape} against {reference.shape}"
    difference = np.abs(ours - reference)
    return float(difference.max() / np.abs(reference).max()) if np.isfinite(difference).all() else float("inf")


def assert_close(ours, reference, bound: float = BOUND, what: str = "") -> None:
    error = relative_error(ours, reference)
    assert error <= bound, f"{what}: relative error {error:.3g} exceeds {bound:g}"


def causal_rows(tokens_BR, lengths_B=None, context_B=None) -> Rows:
    """Right-padded sequences behind `context_B` committed slots (none by default); rows past a length are dead."""
    tokens_BR = np.asarray(tokens_BR, np.int32)
    batch, rows = tokens_BR.shape
    context_B = np.zeros(batch, np.int32) if context_B is None else np.asarray(context_B, np.int32)
    lengths_B = np.full(batch, rows) if lengths_B is None else np.asarray(lengths_B)
    return Rows(
        tokens_BR=jnp.asarray(tokens_BR),
        positions_BR=jnp.asarray(context_B[:, None] + np.arange(rows, dtype=np.int32)),
        live_BR=jnp.asarray(np.arange(rows) < lengths_B[:, None]),
        context_B=jnp.asarray(context_B),
        mask_BRW=jnp.asarray(np.broadcast_to(np.tril(np.ones((rows, rows), bool)), (batch, rows, rows))),
    )


class Tree:
    """A draft tree as parent indices (-1 for the root, parents before children)."""

    def __init__(self, parents: list[int]) -> None:
        self.parents = parents
        self.paths = [self._path(node) for node in range(len(parents))]
        self.leaves = [node for node in range(len(parents)) if node not in parents]

    def _path(self, node: int) -> list[int]:
        return ([] if self.parents[node] < 0 else self._path(self.parents[node])) + [node]

    @property
    def depths(self) -> np.ndarray:
        return np.array([len(path) - 1 for path in self.paths], np.int32)

    @property
    def ancestors_RR(self) -> np.ndarray:
        """Row i: itself and its ancestors."""
        return np.array([[other in path for other in range(len(self.parents))] for path in self.paths])


def tree_rows(tokens_BR, trees: list[Tree], context_B) -> Rows:
    """One tree per sequence, all of the same size, behind `context_B` committed slots."""
    tokens_BR, context_B = np.asarray(tokens_BR, np.int32), np.asarray(context_B, np.int32)
    return Rows(
        tokens_BR=jnp.asarray(tokens_BR),
        positions_BR=jnp.asarray(context_B[:, None] + np.stack([tree.depths for tree in trees])),
        live_BR=jnp.ones(tokens_BR.shape, bool),
        context_B=jnp.asarray(context_B),
        mask_BRW=jnp.asarray(np.stack([tree.ancestors_RR for tree in trees])),
    )
