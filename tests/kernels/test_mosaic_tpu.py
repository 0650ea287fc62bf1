"""What is special about the TPU backend; `test_grouped_experts.py` has what all backends must do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Swiglu
from ecospec_jax.kernels.grouped_experts import mosaic_tpu
from tests.kernels.expert_cases import STORAGES, assert_close, definition, poison, random_experts

SWIGLU = Swiglu()


def check(experts: ExpertWeights, ids_TK: np.ndarray, activation: Swiglu | ClampedSwiglu = SWIGLU) -> np.ndarray:
    """Compares with the definition, with NaN in all unused experts."""
    random = np.random.default_rng(0)
    x_TD = random.normal(size=(len(ids_TK), experts.hidden)).astype(np.float32)
    weights_TK = random.random(ids_TK.shape).astype(np.float32) + 0.1
    call = jax.jit(lambda *args: mosaic_tpu.grouped_experts(*args, activation, interpret=True))
    y_TD = call(x_TD, ids_TK, weights_TK, poison(experts, set(ids_TK.ravel().tolist())))
    assert_close(y_TD, definition(x_TD, ids_TK, weights_TK, experts, activation), 2e-6)
    return np.asarray(y_TD)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("hidden", "split"), [(32, True), (160, False)])
def test_several_tiles_of_an_expert(storage: str, split: bool, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one reaches past the end, where the interpreter has NaN; matrices in both orders of their axes."""
    monkeypatch.setattr(mosaic_tpu, "TILE_BYTES", 0)
    monkeypatch.setattr(mosaic_tpu, "MXFP4_TILE", 64)
    ffn = 160
    experts = random_experts(
        np.random.default_rng(1), storage, hidden, ffn, experts=4, split=split, biases=True, layers=2
    )
    assert ffn % mosaic_tpu._tile(experts)
    check(experts, np.array([[0, 3, -1], [3, 3, 7], [-1, 9, 4]], np.int32), ClampedSwiglu(limit=1.25))


@pytest.mark.parametrize("storage", ["float32", "mxfp4"])
def test_more_rows_than_a_block(storage: str) -> None:
    """Blocks have rows of their own; an expert has several blocks; unused blocks hold anything."""
    experts = random_experts(np.random.default_rng(2), storage, 64, 96, experts=5, biases=True)
    ids_TK = np.where(np.arange(150)[:, None] < 140, [[1, 2]], [[2, -1]]).astype(np.int32)
    ids_TK[7] = -1
    y_TD = check(experts, ids_TK)
    np.testing.assert_array_equal(y_TD[7], 0)


@pytest.mark.parametrize("rows", [2, 130])
@pytest.mark.parametrize("storage", STORAGES)
def test_no_expert_at_all(storage: str, rows: int) -> None:
    experts = random_experts(np.random.default_rng(3), storage, 64, 96, experts=4, biases=True)
    np.testing.assert_array_equal(check(experts, np.resize(np.int32([-1, 4, 7, -9]), (rows, 2))), 0)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("storage", STORAGES)
def test_memory_layouts(storage: str, layers: int | None) -> None:
    """One order for each array, the layers first; of a matrix the axis that is padded less is the minor one."""
    experts = random_experts(np.random.default_rng(4), storage, 256, 96, experts=2, biases=True, layers=layers)
    layouts = mosaic_tpu.memory_layouts(experts)
    for array, layout in zip(jax.tree.leaves(experts), jax.tree.leaves(layouts), strict=True):
        assert sorted(layout.major_to_minor) == list(range(array.ndim))
        assert layers is None or layout.major_to_minor[:1] in ((), (0,))
    minor = layouts.down.blocks if storage == "mxfp4" else layouts.down.weight
    lead = 1 if layers else 0
    assert minor.major_to_minor[-1] == 1 + lead  # 256 outputs, 96 inputs
    if storage != "mxfp4":
        assert layouts.gate_up[0].weight.major_to_minor[-1] == 2 + lead


def test_result_has_the_dtype_of_the_rows() -> None:
    experts = random_experts(np.random.default_rng(5), "bfloat16", 64, 96, experts=2)
    x_TD, ids_TK, weights_TK = jnp.ones((3, 64), jnp.bfloat16), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    y_TD = mosaic_tpu.grouped_experts(x_TD, ids_TK, weights_TK, experts, Swiglu(), interpret=True)
    assert y_TD.dtype == jnp.bfloat16
