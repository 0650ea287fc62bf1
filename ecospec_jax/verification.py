"""From the target's logits to tokens, and from tokens to the accepted path.

Siblings in the tree are a deterministic function of the context, so the lossless rule is: draw y from the target's
processed distribution at the node; if y is a child, descend, else emit y and stop (docs/formats.md C.7). Draws are
keyed by (seed, sequence, absolute position), so plain and speculative decoding give the same tokens, not only the
same law.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from ecospec_jax.config import SamplingConfig
from ecospec_jax.tree import VerifyTree


def sequence_keys(seeds_B: Int[Array, " batch"], sequences_B: Int[Array, " batch"]) -> Key[Array, " batch"]:
    """One random key a sequence, from its seed and its index among the prompts."""
    return jax.vmap(lambda seed, sequence: jax.random.fold_in(jax.random.key(seed), sequence))(seeds_B, sequences_B)


def processed_logits(logits: Float[Array, "... vocab"], sampling: SamplingConfig) -> Float[Array, "... vocab"]:
    """Logits of the distribution that tokens are drawn from: temperature, then top-k, then top-p; dropped ones -inf.

    Tokens tied with the last one kept are kept too. Defined for temperature > 0.
    """
    logits = logits / sampling.temperature
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        threshold = lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(logits, axis=-1)
        descending = jnp.sort(probabilities, axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        threshold = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(probabilities >= threshold, logits, -jnp.inf)
    return logits


def draw_tokens(
    logits_BRV: Float[Array, "batch rows vocab"],
    positions_BR: Int[Array, "batch rows"],
    keys_B: Key[Array, " batch"],
    sampling: SamplingConfig,
) -> Int[Array, "batch rows"]:
    """The token that follows each row; `positions_BR` are the absolute positions of the drawn tokens."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BRV, axis=-1).astype(jnp.int32)

    def draw(key: Array, position: Array, logits_V: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(key, position), logits_V)

    draw_rows = jax.vmap(jax.vmap(draw, in_axes=(None, 0, 0)))
    return draw_rows(keys_B, positions_BR, processed_logits(logits_BRV, sampling)).astype(jnp.int32)


_RIGGED = (1 << 31) - 1  # no position, which keys the draws of tokens


def rigged_draws(
    tree: VerifyTree, drawn_BR: Int[Array, "batch rows"], keys_B: Key[Array, " batch"], rate: float
) -> Int[Array, "batch rows"]:
    """Draws that agree with the drafter as often as asked, whatever the target says: for timing random weights.

    A row that has children in the tree goes on to the likeliest of them with probability `rate`; else its draw stands.
    """
    rows, index_R = tree.rows, jnp.arange(drawn_BR.shape[1])
    child_BRC = (tree.parent_rows_BR[:, None, :] == index_R[:, None]) & rows.live_BR[:, None, :] & (index_R > 0)

    def lucky(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, _RIGGED), position)) < rate

    lucky_BR = jax.vmap(jax.vmap(lucky, in_axes=(None, 0)))(keys_B, rows.positions_BR)
    likeliest_BR = jnp.take_along_axis(rows.tokens_BR, jnp.argmax(child_BRC, axis=-1), axis=1)
    return jnp.where(jnp.any(child_BRC, axis=-1) & lucky_BR, likeliest_BR, drawn_BR)


@jax.tree_util.register_dataclass
@dataclass
class AcceptedPath:
    """Outcome of one verification.

    Attributes:
        rows_BP: rows along the accepted path, the root's 0 first; entries past the path repeat its last row.
        tokens_BP: tokens to emit; entry j follows row `rows_BP[j]`. The last one meant is the bonus token.
        count_B: tokens to emit, at least 1: accepted nodes + 1.
    """

    rows_BP: Int[Array, "batch path"]
    tokens_BP: Int[Array, "batch path"]
    count_B: Int[Array, " batch"]


def accept_path(tree: VerifyTree, drawn_BR: Int[Array, "batch rows"], longest: int) -> AcceptedPath:
    """Walks from the root along the drawn tokens; `longest` is the most rows a path can have."""
    rows = tree.rows
    index_R = jnp.arange(drawn_BR.shape[1])
    at_B = jnp.zeros(drawn_BR.shape[0], jnp.int32)
    walking_B: Bool[Array, " batch"] = jnp.ones_like(at_B, bool)
    path, count_B = [at_B], jnp.ones_like(at_B)
    for _ in range(longest - 1):
        wanted_B = jnp.take_along_axis(drawn_BR, at_B[:, None], axis=1)
        match_BR = (tree.parent_rows_BR == at_B[:, None]) & (rows.tokens_BR == wanted_B) & rows.live_BR & (index_R > 0)
        walking_B &= jnp.any(match_BR, axis=1)
        at_B = jnp.where(walking_B, jnp.argmax(match_BR, axis=1), at_B)
        count_B = count_B + walking_B
        path.append(at_B)
    rows_BP = jnp.stack(path, axis=1)
    return AcceptedPath(rows_BP, jnp.take_along_axis(drawn_BR, rows_BP, axis=1), count_B)
