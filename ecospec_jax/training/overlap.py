"""How predictors are judged: which share of the true top-k experts they name, over all live tokens of many traces."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from ecospec_jax import expert_bits
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.predictor import Evidence, ExpertSets
from ecospec_jax.training.predictor import Examples, pack, rows_of
from ecospec_jax.training.traces import Trace

Counts = tuple[Int[Array, " layers"], Int[Array, ""]]  # chosen experts that were predicted; the tokens they belong to
Judge = Callable[[Examples], Counts]
ItemT = TypeVar("ItemT")


@dataclass
class Overlap:
    """What a predictor got right.

    Attributes:
        hits_L: int64, chosen experts that were predicted, of each layer.
        tokens: how many were predicted.
    """

    hits_L: Int[np.ndarray, " layers"]
    tokens: int

    def share(self, k: int) -> Float[np.ndarray, " layers"]:
        """Hits among all `k` experts of all tokens."""
        return self.hits_L / (k * max(self.tokens, 1))


def overlaps(
    judges: Mapping[str, Judge], traces: Iterable[Trace], *, size: int, length: int, routing: RoutingShape
) -> dict[str, Overlap]:
    """What each judge counts, in one pass of blocks of `size` traces that are cut after `length` tokens."""
    found = {name: Overlap(np.zeros(routing.layers, np.int64), 0) for name in judges}
    for part in groups(traces, size):
        examples = pack(part, length, routing)
        for name, judge in judges.items():
            hits_L, tokens = judge(examples)
            found[name].hits_L += np.asarray(hits_L)
            found[name].tokens += int(tokens)
    return found


def groups(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    """Lists of `size`, the last of what is left."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def judge_of(predictor: Any, routing: RoutingShape, *, first: int = 0) -> Judge:
    """Counts what a predictor names for each token from number `first` of a sequence on."""
    return partial(_predicted, predictor, routing=routing, first=first)


def judge_of_previous(routing: RoutingShape) -> Judge:
    """Counts which experts a token shares with the token before it; the first token of a sequence does not count."""
    return partial(_previous, routing=routing)


def top_k_overlap(
    model: Any, traces: Iterable[Trace], size: int, length: int, *, first: int = 0
) -> Float[np.ndarray, " layers"]:
    """Share of the true top-k experts among a trained predictor's top-k."""
    routing = model.config.routing
    judges = {"model": judge_of(model, routing, first=first)}
    return overlaps(judges, traces, size=size, length=length, routing=routing)["model"].share(routing.k)


def evidence_of(examples: Examples, routing: RoutingShape) -> Evidence:
    """What traces show a predictor at each token: the token before it, and the drafter's state at the first step."""

    def route(_: Any) -> ExpertSets:
        raise NotImplementedError("the target is not at hand")

    last_BLW = jnp.zeros((len(examples.tokens_BT), routing.layers, expert_bits.words(routing.experts)), jnp.uint32)
    before_BT = jnp.pad(examples.tokens_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    states_BTH = None if examples.states_BTSH is None else examples.states_BTSH[:, :, 0]
    return Evidence(last_BLW, route, before_BT, states_BTH)


@partial(nnx.jit, static_argnames=("routing", "first"))
def _predicted(predictor: Any, examples: Examples, *, routing: RoutingShape, first: int) -> Counts:
    batch, length = examples.tokens_BT.shape
    counted_BT = examples.live_BT & (jnp.arange(length) >= first)
    true_BTLW = jnp.where(counted_BT[..., None, None], _true(examples, routing), jnp.uint32(0))
    evidence = evidence_of(examples, routing)
    predicted_BTLW, _ = predictor(rows_of(examples), predictor.empty_cache(batch, length), evidence)
    return jnp.sum(expert_bits.count(predicted_BTLW & true_BTLW), axis=(0, 1)), jnp.sum(counted_BT)


@partial(jax.jit, static_argnames="routing")
def _previous(examples: Examples, *, routing: RoutingShape) -> Counts:
    true_BTLW = _true(examples, routing)
    shared = expert_bits.count(true_BTLW[:, 1:] & true_BTLW[:, :-1])
    return jnp.sum(shared, axis=(0, 1)), jnp.sum(examples.live_BT[:, 1:])


def _true(examples: Examples, routing: RoutingShape) -> UInt32[Array, "batch tokens layers words"]:
    """The chosen experts; of padding none, since its id is out of range."""
    return expert_bits.from_ids(examples.experts_BTLK, routing.experts)
