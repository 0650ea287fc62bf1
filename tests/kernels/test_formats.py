"""What stored numbers mean, to the last bit: against index formulas and against transformers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ecospec_jax import kernels
from ecospec_jax.kernels.formats import Fp8, Matrix, Mxfp4, Plain, check_matrix, one_of
from tests.kernels.expert_cases import STORAGES, decode, e2m1, e4m3, random_matrix

widen = jax.jit(lambda matrix: matrix.widen())


def bits(array: object) -> np.ndarray:
    """So that -0 differs from 0, and NaN equals itself."""
    return np.asarray(array, np.float32).view(np.uint32)


def fp8_codes(codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


class TestMxfp4:
    def test_all_codes_and_scales(self) -> None:
        """Every scale whose products are all normal numbers; -0 keeps its sign."""
        scales = np.arange(2, 252, dtype=np.uint8)
        low, high = np.arange(16), np.arange(16)[::-1]
        blocks = np.broadcast_to(low | high << 4, (len(scales), 1, 16)).astype(np.uint8)
        wide = np.asarray(widen(Mxfp4(blocks, scales[:, None])))
        expected = np.empty((len(scales), 32), np.float32)
        for row, scale in enumerate(scales):
            for byte in range(16):
                expected[row, 2 * byte] = np.ldexp(e2m1(int(low[byte])), int(scale) - 127)
                expected[row, 2 * byte + 1] = np.ldexp(e2m1(int(high[byte])), int(scale) - 127)
        assert np.isfinite(expected).all() and np.abs(expected[expected != 0]).min() >= np.finfo(np.float32).tiny
        np.testing.assert_array_equal(bits(wide), bits(expected))
        np.testing.assert_array_equal(bits(decode(Mxfp4(blocks, scales[:, None]))), bits(expected))

    def test_smallest_scales(self) -> None:
        """Products below the normal range: exact or zero, nothing else."""
        scales = np.array([[0], [1]], np.uint8)
        blocks = np.broadcast_to(np.arange(16) * 17, (2, 1, 16)).astype(np.uint8)
        wide, exact = np.asarray(widen(Mxfp4(blocks, scales))), decode(Mxfp4(blocks, scales))
        assert ((wide == exact) | ((wide == 0) & (np.abs(exact) < 6.1 * 2.0**-127))).all()

    def test_scale_that_means_nan_is_never_a_finite_number(self) -> None:
        blocks = np.full((1, 1, 16), 0x25, np.uint8)
        assert not np.isfinite(widen(Mxfp4(blocks, np.array([[255]], np.uint8)))).any()

    @pytest.mark.parametrize("half", [0, 1])
    def test_place_of_each_nibble(self, half: int) -> None:
        """One nibble set at a time, with scales that tell rows and groups apart."""
        outputs, groups = 3, 2
        scales = (120 + np.arange(outputs * groups).reshape(outputs, groups)).astype(np.uint8)
        for output, group, byte in np.ndindex(outputs, groups, 16):
            blocks = np.zeros((outputs, groups, 16), np.uint8)
            blocks[output, group, byte] = 5 << (4 * half)
            expected = np.zeros((outputs, 32 * groups), np.float32)
            expected[output, 32 * group + 2 * byte + half] = 3.0 * 2.0 ** (scales[output, group] - 127.0)
            np.testing.assert_array_equal(widen(Mxfp4(blocks, scales)), expected)

    def test_transformers(self) -> None:
        """Its result is [experts, in, out]."""
        torch = pytest.importorskip("torch")
        mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
        matrix = random_matrix(np.random.default_rng(0), (3, 5, 96), "mxfp4", any_code=True)
        theirs = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(matrix.blocks), torch.from_numpy(matrix.scales), dtype=torch.float32
        )
        assert theirs.shape == (3, 96, 5)
        np.testing.assert_array_equal(bits(widen(matrix)), bits(theirs.numpy().swapaxes(1, 2)))


class TestFp8:
    def test_all_codes(self) -> None:
        codes = np.arange(256).reshape(2, 128)
        wide = np.asarray(widen(Fp8(fp8_codes(codes), np.array([[1.0]], np.float32))))
        expected = np.array([[e4m3(int(code)) for code in row] for row in codes], np.float32)
        assert np.nanmax(expected) == 448 and np.isnan(expected).sum() == 2
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(wide), ~number)
        np.testing.assert_array_equal(bits(wide)[number], bits(expected)[number])

    @pytest.mark.parametrize(
        ("shape", "grid"), [((576, 200), (5, 2)), ((192, 256), (2, 2)), ((128, 129), (1, 2)), ((7, 5), (1, 1))]
    )
    @pytest.mark.parametrize("lead", [(), (2,)])
    def test_ragged_blocks(self, shape: tuple[int, int], grid: tuple[int, int], lead: tuple[int, ...]) -> None:
        """Blocks are 128 long from the start; the last one is what is left."""
        random = np.random.default_rng(1)
        matrix = random_matrix(random, (*lead, *shape), "fp8", any_code=True)
        assert matrix.scales.shape == (*lead, *grid)
        check_matrix(matrix, "matrix")
        wide = np.asarray(widen(matrix))
        table = np.array([e4m3(code) for code in range(256)], np.float32)
        codes = matrix.weight.view(np.uint8)
        expected = np.empty(codes.shape, np.float32)
        for index in np.ndindex(*codes.shape):
            *first, i, j = index
            expected[index] = table[codes[index]] * matrix.scales[(*first, i // 128, j // 128)]
        np.testing.assert_array_equal(bits(wide), bits(expected))
        np.testing.assert_array_equal(bits(decode(matrix)), bits(expected))

    def test_transformers(self) -> None:
        """Whole blocks and powers of two only: it guesses the block size, and rounds to the dtype of the output."""
        torch = pytest.importorskip("torch")
        fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
        matrix = random_matrix(np.random.default_rng(2), (384, 256), "fp8", any_code=True, powers=True)
        weight = torch.from_numpy(matrix.weight.view(np.uint8)).view(torch.float8_e4m3fn)
        theirs = fp8.Fp8Dequantize(None)._dequantize_one(weight, torch.from_numpy(matrix.scales))
        np.testing.assert_array_equal(bits(widen(matrix)), bits(theirs.float().numpy()))


class TestMatrix:
    @pytest.mark.parametrize("storage", STORAGES)
    def test_shape_storage_and_meaning(self, storage: str) -> None:
        shape = (2, 3, 5, 160)
        matrix = random_matrix(np.random.default_rng(3), shape, storage)
        check_matrix(matrix, "matrix")
        assert matrix.shape == shape and matrix.storage == storage
        wide = widen(matrix)
        assert wide.dtype == jnp.float32 and wide.shape == shape
        np.testing.assert_array_equal(bits(wide), bits(decode(matrix)))

    @pytest.mark.parametrize("storage", STORAGES)
    def test_one_of(self, storage: str) -> None:
        matrix = random_matrix(np.random.default_rng(4), (3, 130, 160), storage)
        for index in range(3):
            np.testing.assert_array_equal(widen(jax.jit(one_of)(matrix, index)), decode(matrix)[index])

    @pytest.mark.parametrize(
        ("matrix", "message"),
        [
            (
                Plain(np.zeros((2, 3), np.float16)),
                r"down.weight: float16\[2, 3\], expected float32 or bfloat16\[2, 3\]",
            ),
            (Plain(np.zeros((2, 3), np.int8)), r"down.weight: int8"),
            (
                Mxfp4(np.zeros((4, 2, 16), np.int8), np.zeros((4, 2), np.uint8)),
                r"down.blocks: int8\[4, 2, 16\], expected uint8\[4, 2, 16\]",
            ),
            (
                Mxfp4(np.zeros((4, 2, 8), np.uint8), np.zeros((4, 2), np.uint8)),
                r"down.blocks: uint8\[4, 2, 8\], expected uint8\[4, 2, 16\]",
            ),
            (
                Mxfp4(np.zeros((4, 2, 16), np.uint8), np.zeros((4, 3), np.uint8)),
                r"down.scales: uint8\[4, 3\], expected uint8\[4, 2\]",
            ),
            (Mxfp4(np.zeros((4, 2, 16), np.uint8), np.zeros((4, 2), np.float32)), r"down.scales: float32"),
            (
                Fp8(np.zeros((576, 200), np.float32), np.zeros((5, 2), np.float32)),
                r"down.weight: float32\[576, 200\], expected float8_e4m3fn\[576, 200\]",
            ),
            (Fp8(np.zeros((4, 4), ml_dtypes.float8_e5m2), np.zeros((1, 1), np.float32)), r"down.weight: float8_e5m2\["),
            (
                Fp8(fp8_codes(np.zeros((576, 200))), np.zeros((4, 2), np.float32)),
                r"down.scales: float32\[4, 2\], expected float32\[5, 2\]",
            ),
            (
                Fp8(fp8_codes(np.zeros((576, 200))), np.zeros((5, 1), np.float32)),
                r"down.scales: float32\[5, 1\], expected float32\[5, 2\]",
            ),
            (
                Fp8(fp8_codes(np.zeros((3, 576, 200))), np.zeros((5, 2), np.float32)),
                r"down.scales: float32\[5, 2\], expected float32\[3, 5, 2\]",
            ),
            (Fp8(fp8_codes(np.zeros((4, 4))), np.zeros((1, 1), ml_dtypes.bfloat16)), r"down.scales: bfloat16"),
        ],
    )
    def test_disagreement(self, matrix: Matrix, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            check_matrix(matrix, "down")

    def test_no_storage_format(self) -> None:
        with pytest.raises(TypeError, match="^down: ndarray is not a storage format; known: Plain, Mxfp4, Fp8$"):
            check_matrix(np.zeros((2, 3), np.float32), "down")  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(not callable(getattr(kernels, "dense", None)), reason="there is no dense op yet")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", STORAGES)
def test_dense_op_hands_out_decoded_weights(storage: str, dtype: str) -> None:
    """Rows that are unit vectors give the columns of the matrix, bit for bit; all codes, ragged blocks."""
    outputs, inputs = 576, 160
    matrix = random_matrix(np.random.default_rng(5), (outputs, inputs), storage, any_code=True)
    y_TO = jax.jit(kernels.dense)(jnp.eye(inputs, dtype=dtype), matrix)
    assert y_TO.dtype == dtype
    np.testing.assert_array_equal(
        y_TO.astype(jnp.float32), decode(matrix).T.astype(jnp.dtype(dtype)).astype(np.float32)
    )


def test_own_tables() -> None:
    """The tests' own decoders, against ml_dtypes."""
    np.testing.assert_array_equal(
        np.array([e4m3(code) for code in range(256)], np.float32),
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    )
    np.testing.assert_array_equal(
        bits([e2m1(code) for code in range(16)]), bits(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn))
    )
