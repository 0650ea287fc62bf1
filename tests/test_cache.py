"""The cache's three operations against loops over plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.cache import KVCache, Rows, commit_path, empty_cache, storage_dtype, write_rows

BATCH, HEADS, SLOTS, CHANNELS = 3, 2, 17, 5


def _random_cache(layers: int) -> tuple[KVCache, list[np.ndarray]]:
    random = np.random.default_rng(0)
    buffers = [random.normal(size=(BATCH, HEADS, SLOTS, CHANNELS)).astype(np.float32) for _ in range(2 * layers)]
    return KVCache([jnp.asarray(b) for b in buffers[:layers]], [jnp.asarray(b) for b in buffers[layers:]]), buffers


@pytest.mark.parametrize("rows", [1, 4, SLOTS])
def test_write_rows(rows: int) -> None:
    """Each sequence at its own start, the very last slot included; nothing else changes."""
    random = np.random.default_rng(1)
    cache, (expected, _) = _random_cache(1)
    starts = np.array([0, (SLOTS - rows) // 2, SLOTS - rows])
    block = random.normal(size=(BATCH, HEADS, rows, CHANNELS)).astype(np.float32)
    for sequence, start in enumerate(starts):
        for row in range(rows):
            expected[sequence, :, start + row] = block[sequence, :, row]
    np.testing.assert_array_equal(jax.jit(write_rows)(cache.keys[0], jnp.asarray(block), jnp.asarray(starts)), expected)


def test_write_rows_keeps_the_storage_dtype() -> None:
    buffer = jnp.zeros((1, HEADS, SLOTS, CHANNELS), jnp.float32)
    written = write_rows(buffer, jnp.full((1, HEADS, 1, CHANNELS), 1 / 3, jnp.bfloat16), jnp.array([3]))
    assert written.dtype == jnp.float32
    assert written[0, 0, 3, 0] == jnp.bfloat16(1 / 3)


def test_empty_cache() -> None:
    shapes = [((HEADS, CHANNELS), (1, CHANNELS + 2))] * 4
    cache = empty_cache(shapes, slots=[SLOTS] * 4, batch=BATCH, dtype=jnp.dtype(jnp.bfloat16))
    assert cache.capacity == SLOTS
    assert len(cache.keys) == len(cache.values) == 4
    assert {buffer.shape for buffer in cache.keys} == {(BATCH, HEADS, SLOTS, CHANNELS)}
    assert {buffer.shape for buffer in cache.values} == {(BATCH, 1, SLOTS, CHANNELS + 2)}
    for buffer in cache.keys + cache.values:
        assert buffer.dtype == storage_dtype(jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize(
    "paths",
    [
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],  # chains: in place already
        [[0, 2, 4, 5], [0, 3, 4, 4], [0, 1, 5, 5]],  # accepted siblings that are not the first
        [[0, 0, 0, 0], [0, 5, 5, 5], [0, 2, 3, 0]],  # nothing accepted; entries past the path repeat any row
        [[0], [0], [0]],
    ],
)
def test_commit_path(paths: list[list[int]]) -> None:
    """Every layer's keys and values, lengths unequal; committed slots and those behind the path stay."""
    cache, buffers = _random_cache(layers=2)
    lengths = [0, 4, 11]
    expected = [buffer.copy() for buffer in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for sequence, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            for place, row in enumerate(path):
                after[sequence, :, length + place] = before[sequence, :, length + row]
    moved = jax.jit(commit_path)(cache, jnp.asarray(lengths), jnp.asarray(paths))
    for ours, theirs in zip(moved.keys + moved.values, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_visible_slots(offset: int, window: int) -> None:
    """The whole context, then what the mask shows of the window; nothing behind. The offset moves writes, not sight."""
    random = np.random.default_rng(window)
    rows, contexts = 4, [0, 7, SLOTS - window]
    mask_BRW = random.random((BATCH, rows, window)) < 0.5
    block = Rows(
        tokens_BR=jnp.zeros((BATCH, rows), jnp.int32),
        positions_BR=jnp.zeros((BATCH, rows), jnp.int32),
        live_BR=jnp.ones((BATCH, rows), bool),
        context_B=jnp.asarray(contexts),
        mask_BRW=jnp.asarray(mask_BRW),
        offset=offset,
    )
    expected = np.zeros((BATCH, rows, SLOTS), bool)
    for sequence, context in enumerate(contexts):
        for row in range(rows):
            for slot in range(SLOTS):
                if slot < context:
                    expected[sequence, row, slot] = True
                elif slot < context + window:
                    expected[sequence, row, slot] = mask_BRW[sequence, row, slot - context]
    np.testing.assert_array_equal(block.visible_BRS(SLOTS), expected)


def test_rows_are_a_pytree_with_a_static_offset() -> None:
    """Different offsets compile separately; the rest is traced."""
    zeros = jnp.zeros((1, 2), jnp.int32)
    rows = Rows(zeros, zeros, zeros == 0, jnp.zeros(1, jnp.int32), jnp.ones((1, 2, 3), bool), offset=1)
    assert len(jax.tree.leaves(rows)) == 5
    assert jax.jit(lambda r: r.offset * jnp.ones(()))(rows) == 1
