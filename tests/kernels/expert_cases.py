"""Random expert layers in every storage, and what the op must return for them.

The definition is written anew here: numpy, float64, one (row, expert) pair at a time, with decoders of its own. It
shares no code with `ecospec_jax.kernels`, only the containers.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Fp8, Matrix, Mxfp4, Plain, Swiglu

STORAGES = ("float32", "bfloat16", "mxfp4", "fp8")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_NAN = 0x7F


def e2m1(code: int) -> float:
    """A four-bit number: a sign bit and an entry of the table."""
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def e4m3(code: int) -> float:
    """An eight-bit number: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity, two NaNs."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """w[out, 32 g + 2 b + h] = table[nibble h of blocks[out, g, b]] * 2^(scales[out, g] - 127)."""
    column = np.arange(32 * scales.shape[-1])
    group, byte, half = column // 32, column % 32 // 2, column % 2
    nibbles = (blocks[..., group, byte] >> (4 * half).astype(np.uint8)) & 15
    table = np.array([e2m1(code) for code in range(16)], np.float64)
    return (table[nibbles] * 2.0 ** (scales[..., group].astype(np.float64) - 127)).astype(np.float32)


def decode_fp8(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """w[i, j] = q[i, j] * s[i // 128, j // 128], multiplied in float32."""
    table = np.array([e4m3(code) for code in range(256)], np.float32)
    row, column = np.arange(weight.shape[-2])[:, None], np.arange(weight.shape[-1])
    return table[np.asarray(weight).view(np.uint8)] * scales[..., row // 128, column // 128]


def decode(matrix: Matrix) -> np.ndarray:
    """A matrix in float32."""
    parts = [np.asarray(part) for part in jax.tree.leaves(matrix)]
    match matrix:
        case Plain():
            return parts[0].astype(np.float32)
        case Mxfp4():
            return decode_mxfp4(*parts)
        case Fp8():
            return decode_fp8(*parts)


def random_matrix(
    random: np.random.Generator, shape: Sequence[int], storage: str, *, any_code: bool = False, powers: bool = False
) -> Matrix:
    """A matrix whose entries have about the variance 1 / (last dimension).

    With `any_code` all codes are equally likely and scales vary widely; with `powers` fp8 scales are powers of two.
    """
    *lead, outputs, inputs = shape
    size = inputs**-0.5
    if storage == "mxfp4":
        blocks = random.integers(0, 256, (*lead, outputs, inputs // 32, 16)).astype(np.uint8)
        middle = 127 + round(np.log2(size / 3))  # the root mean square of the table is about 3
        spread = 30 if any_code else 1
        return Mxfp4(blocks, random.integers(middle - spread, middle + spread + 1, blocks.shape[:-1]).astype(np.uint8))
    if storage == "fp8":
        grid = (*lead, -(-outputs // 128), -(-inputs // 128))
        scales = 2.0 ** random.integers(-3, 4, grid) if powers else random.uniform(0.5, 1.5, grid)
        if any_code:
            codes = random.permutation(np.setdiff1d(np.arange(256, dtype=np.uint8), [FP8_NAN, FP8_NAN | 0x80]))
            values = random.permutation(np.resize(codes, shape)).view(ml_dtypes.float8_e4m3fn)
            return Fp8(values, scales.astype(np.float32))
        values = np.clip(random.normal(size=shape) * 60, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return Fp8(values, (scales * size / 60).astype(np.float32))
    return Plain((random.normal(size=shape) * size).astype(jnp.dtype(storage)))


def random_experts(
    random: np.random.Generator,
    storage: str,
    hidden: int,
    ffn: int,
    *,
    experts: int,
    split: bool = True,
    biases: bool = False,
    layers: int | None = None,
) -> ExpertWeights:
    """Random weights, as numpy arrays; with `layers` the last but one layer is meant."""
    lead = (experts,) if layers is None else (layers, experts)
    bias_dtype = jnp.dtype("float32" if storage == "float32" else "bfloat16")

    def matrix(outputs: int, inputs: int) -> Matrix:
        return random_matrix(random, (*lead, outputs, inputs), storage)

    def bias(size: int) -> np.ndarray:
        return random.normal(size=(*lead, size)).astype(bias_dtype)

    gate_up = (matrix(ffn, hidden), matrix(ffn, hidden)) if split else matrix(2 * ffn, hidden)
    gate_up_bias = (bias(ffn), bias(ffn)) if split else bias(2 * ffn)
    return ExpertWeights(
        gate_up,
        matrix(hidden, ffn),
        gate_up_bias if biases else None,
        bias(hidden) if biases else None,
        None if layers is None else np.int32(layers - 2),
    )


def poison(experts: ExpertWeights, used: Collection[int]) -> ExpertWeights:
    """NaN in weights, scales and biases of all experts but `used`, and of all other layers."""
    lead = experts.down.shape[:-2]
    unused = np.ones(lead, bool)
    kept = [expert for expert in range(experts.count) if expert in used]
    unused[(*(() if experts.layer is None else (int(experts.layer),)), kept)] = False

    def spoil(part: np.ndarray) -> np.ndarray:
        part = np.array(part)
        part[unused] = 255 if part.dtype == np.uint8 else np.nan
        return part

    return replace(jax.tree.map(spoil, replace(experts, layer=None)), layer=experts.layer)


def activate(activation: Swiglu | ClampedSwiglu, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Both activations, in float64."""
    sigmoid = lambda z: (1 + np.tanh(z / 2)) / 2  # noqa: E731
    if isinstance(activation, Swiglu):
        return gate * sigmoid(gate) * up
    gate, up = np.minimum(gate, activation.limit), np.maximum(np.minimum(up, activation.limit), -activation.limit)
    return gate * sigmoid(activation.alpha * gate) * (up + 1)


def definition(
    x_TD: Any, ids_TK: Any, weights_TK: Any, experts: ExpertWeights, activation: Swiglu | ClampedSwiglu
) -> np.ndarray:
    """The op in float64, one pair at a time. Unused experts may hold anything."""
    x_TD, weights_TK = np.asarray(x_TD, np.float64), np.asarray(weights_TK, np.float64)
    own = (
        experts
        if experts.layer is None
        else jax.tree.map(lambda a: a[int(experts.layer)], replace(experts, layer=None))
    )
    dense = {}

    def expert_output(expert: int, x_D: np.ndarray) -> np.ndarray:
        if expert not in dense:
            one = jax.tree.map(lambda part: np.asarray(part)[expert], own)
            widen = lambda matrix: decode(matrix).astype(np.float64)  # noqa: E731
            bias = lambda array: 0.0 if array is None else np.asarray(array, np.float64)  # noqa: E731
            if isinstance(one.gate_up, tuple):
                first = [*map(widen, one.gate_up), *map(bias, one.gate_up_bias or (None, None))]
            else:
                rows, offsets = widen(one.gate_up), np.broadcast_to(bias(one.gate_up_bias), 2 * experts.ffn)
                first = [rows[0::2], rows[1::2], offsets[0::2], offsets[1::2]]
            dense[expert] = *first, widen(one.down), bias(one.down_bias)
        gate, up, gate_bias, up_bias, down, down_bias = dense[expert]
        return down @ activate(activation, gate @ x_D + gate_bias, up @ x_D + up_bias) + down_bias

    y_TD = np.zeros(x_TD.shape)
    for (row, place), expert in np.ndenumerate(np.asarray(ids_TK)):
        if 0 <= expert < experts.count:
            y_TD[row] += weights_TK[row, place] * expert_output(int(expert), x_TD[row])
    return y_TD


def assert_close(actual: Any, expected: np.ndarray, bound: float) -> None:
    """The largest error is at most `bound` times the largest expected magnitude; nothing is NaN."""
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound * np.abs(expected).max())


def pairwise(factors: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which any two values of two factors meet at least once; always the same ones."""
    levels = {name: list(values) for name, values in factors.items()}
    names = list(levels)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(levels[a]))
        for j in range(len(levels[b]))
    }
    order = {name: position for position, name in enumerate(names)}

    def gain(chosen: Mapping[str, int], name: str, level: int) -> int:
        items = [sorted([(name, level), other], key=lambda item: order[item[0]]) for other in chosen.items()]
        return sum(tuple(item) in missing for item in items)

    cases = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [(order[name], level) for name, level in pair]))
        for name in (name for name in names if name not in chosen):
            # On a tie a level that depends on the case's number, so that free factors vary.
            count = len(levels[name])
            ranks = [(gain(chosen, name, level), (level + len(cases)) % count) for level in range(count)]
            chosen[name] = ranks.index(max(ranks))
        missing -= set(itertools.combinations(((name, chosen[name]) for name in names), 2))
        cases.append({name: levels[name][chosen[name]] for name in names})
    return cases
