"""Predictors: which experts of which layers the target would use for each row, known before it runs.

The prediction for a token is the routing the target makes while processing that token. Sets are bit words
`uint32[batch, rows, layers, words]` (see `expert_bits`). Predictors that need no memory have no cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ecospec_jax import expert_bits
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import RoutingShape
from ecospec_jax.predictor_config import FrequencyConfig, TokenPairsConfig, TokenTableConfig

ExpertSets = UInt32[Array, "batch rows layers words"]


@dataclass(frozen=True)
class Evidence:
    """What a predictor may look at besides the rows.

    Attributes:
        last_BLW: true experts of the last token the target has processed.
        route: the target's true routing of given rows, by an extra pass: for experiments only.
        before_BR: the token before each row's on its path; None if only a cache is to be caught up.
        states_BRH: the drafter's state that each row's token was proposed from; None as well.
    """

    last_BLW: UInt32[Array, "batch layers words"]
    route: Callable[[Rows], ExpertSets]
    before_BR: Int[Array, "batch rows"] | None = None
    states_BRH: Float[Array, "batch rows state"] | None = None


class Predictor(Protocol):
    """Anything that names experts for rows."""

    def empty_cache(self, batch: int, capacity: int) -> KVCache | None:
        """A cache of `capacity` slots a sequence, or None."""
        ...

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """Expert sets of each row, and the cache with the rows written behind the committed ones."""
        ...


@runtime_checkable
class ProbabilisticPredictor(Predictor, Protocol):
    """One that also says how sure it is; sets are all that decoding needs, so this is for judging alone."""

    def probabilities(
        self, rows: Rows, cache: KVCache | None, evidence: Evidence
    ) -> Float[Array, "batch rows layers experts"]:
        """Of each expert to be among the k that the target chooses; float32."""
        ...


class Stateless(nnx.Module):
    """A predictor without memory."""

    def empty_cache(self, batch: int, capacity: int) -> None:
        """There is none."""
        return None


class TokenTable(Stateless):
    """Top-k experts counted per token id on traces: a lookup, so it costs nothing."""

    def __init__(self, config: TokenTableConfig) -> None:
        """An empty table; checkpoints fill it."""
        routing = config.routing
        shape = (config.vocab_size, routing.layers, expert_bits.words(routing.experts))
        self.bits_VLW = nnx.Variable(jnp.zeros(shape, jnp.uint32), logical_axes=("vocab", "layers", "words"))

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The table's rows."""
        return self.bits_VLW[...][rows.tokens_BR], cache


class TokenPairs(Stateless):
    """Top-k experts counted per token and the token before it; tokens behind others are looked up alone."""

    def __init__(self, config: TokenPairsConfig) -> None:
        """Empty tables; checkpoints fill them."""
        routing, self.pairs = config.routing, config.pairs
        sets = (routing.layers, expert_bits.words(routing.experts))
        axes = ("layers", "words")
        self.alone_VLW = nnx.Variable(jnp.zeros((config.vocab_size, *sets), jnp.uint32), logical_axes=("vocab", *axes))
        # The known tokens before token v, ascending, are `before[first[v] : first[v + 1]]`.
        self.first_U = nnx.Variable(jnp.zeros(config.vocab_size + 1, jnp.int32), logical_axes=("vocab",))
        self.before_P = nnx.Variable(jnp.zeros(config.pairs, jnp.int32), logical_axes=("pairs",))
        self.bits_PLW = nnx.Variable(jnp.zeros((config.pairs, *sets), jnp.uint32), logical_axes=("pairs", *axes))

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The pair's row where it is known, else the token's."""
        assert evidence.before_BR is not None
        tokens_BR, before_BR = rows.tokens_BR, evidence.before_BR
        first_U, before_P = self.first_U[...], self.before_P[...]

        def halve(_: int, span: tuple[Array, Array]) -> tuple[Array, Array]:
            low_BR, high_BR = span
            middle_BR = (low_BR + high_BR) // 2
            right_BR = (low_BR < high_BR) & (before_P[middle_BR] < before_BR)
            return jnp.where(right_BR, middle_BR + 1, low_BR), jnp.where(right_BR, high_BR, middle_BR)

        end_BR = first_U[tokens_BR + 1]
        place_BR, _ = lax.fori_loop(0, self.pairs.bit_length(), halve, (first_U[tokens_BR], end_BR))
        known_BR = (place_BR < end_BR) & (before_P[place_BR] == before_BR)
        sets_BRLW = jnp.where(known_BR[..., None, None], self.bits_PLW[...][place_BR], self.alone_VLW[...][tokens_BR])
        return sets_BRLW, cache


class Frequency(Stateless):
    """The k most frequent experts of each layer, whatever the token: a baseline."""

    def __init__(self, config: FrequencyConfig) -> None:
        """Empty sets; checkpoints fill them."""
        shape = (config.routing.layers, expert_bits.words(config.routing.experts))
        self.bits_LW = nnx.Variable(jnp.zeros(shape, jnp.uint32), logical_axes=("layers", "words"))

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The same sets for every row."""
        return jnp.broadcast_to(self.bits_LW[...], (*rows.tokens_BR.shape, *self.bits_LW[...].shape)), cache


class Previous(Stateless):
    """The true experts of the last token that the target has processed: a baseline."""

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The same sets for every row of a sequence."""
        last_BLW = evidence.last_BLW
        batch, count = rows.tokens_BR.shape
        return jnp.broadcast_to(last_BLW[:, None], (batch, count, *last_BLW.shape[1:])), cache


class Oracle(Stateless):
    """The target's true routing, by an extra target pass over all candidates: an experiment, never a method to use."""

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """What the target would do."""
        return evidence.route(rows), cache


def top_experts(scores: Float[Array, "... experts"], routing: RoutingShape) -> UInt32[Array, "... words"]:
    """The k best-scored experts as bit words."""
    ids: Int[Array, "... k"] = lax.top_k(scores, routing.k)[1]
    return expert_bits.from_ids(ids, routing.experts)
