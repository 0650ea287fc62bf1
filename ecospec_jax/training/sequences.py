"""Whole documents packed into sequences of equal length, and shuffled batches."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ecospec_jax.cache import Rows

PADDING = -1
ItemT = TypeVar("ItemT")


@jax.tree_util.register_dataclass
@dataclass
class Packed:
    """Sequences of documents.

    Attributes:
        tokens_BT: token ids.
        documents_BT: number of the document that a token belongs to, ascending within a sequence; `PADDING` behind all.
    """

    tokens_BT: Int[Array, "batch tokens"]
    documents_BT: Int[Array, "batch tokens"]

    def take(self, sequences: Sequence[int]) -> "Packed":
        """Some of the sequences."""
        return jax.tree.map(lambda part_BT: part_BT[jnp.array(sequences)], self)

    def reaches(self, count: int) -> Bool[Array, "batch tokens"]:
        """Which tokens have another of their document `count` places further on."""
        ahead_BT = jnp.pad(self.documents_BT[:, count:], ((0, 0), (0, count)), constant_values=PADDING)
        return (self.documents_BT != PADDING) & (self.documents_BT == ahead_BT)


def pack_documents(documents: Sequence[Sequence[int]], length: int) -> Packed:
    """Documents of token ids in as few sequences as best-fit finds; those longer than `length` are cut into several."""
    pieces = [document[at : at + length] for document in documents for at in range(0, len(document), length)]
    sequences: list[list[Sequence[int]]] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), ascending
    for piece in sorted(pieces, key=len, reverse=True):
        place = bisect.bisect_left(room, (len(piece), -1))
        free, sequence = room.pop(place) if place < len(room) else (length, len(sequences))
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(piece)
        if free > len(piece):
            bisect.insort(room, (free - len(piece), sequence))
    tokens = np.zeros((len(sequences), length), np.int32)
    numbers = np.full((len(sequences), length), PADDING, np.int32)
    for row, held in enumerate(sequences):
        joined = np.concatenate([np.asarray(piece, np.int32) for piece in held])
        tokens[row, : len(joined)] = joined
        numbers[row, : len(joined)] = np.repeat(np.arange(len(held)), [len(piece) for piece in held])
    return Packed(jnp.asarray(tokens), jnp.asarray(numbers))


def document_rows(packed: Packed) -> Rows:
    """Rows of whole sequences. Each document sees itself only and begins at position 0."""
    batch, length = packed.tokens_BT.shape
    same_BTT = packed.documents_BT[:, :, None] == packed.documents_BT[:, None, :]
    mask_BTT = same_BTT & jnp.tril(jnp.ones((length, length), bool))
    return Rows(
        tokens_BR=packed.tokens_BT,
        positions_BR=jnp.sum(mask_BTT, axis=2) - 1,
        live_BR=packed.documents_BT != PADDING,
        context_B=jnp.zeros(batch, jnp.int32),
        mask_BRW=mask_BTT,
    )


def batches(items: Sequence[ItemT], size: int, seed: int, first_step: int) -> Iterator[list[ItemT]]:
    """Endless shuffled batches from number `first_step` on, so a resumed run sees what it would have seen."""
    per_epoch = max(1, len(items) // size)
    step = first_step
    while True:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(items))
        yield [items[i] for i in order[place * size : (place + 1) * size]]
        step += 1
