"""What a converted folder holds, against tensors that were put together without `convert/`."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from ecospec_jax.checkpoint import load_target, parameters, read_manifest


def assert_target(folder: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """The folder's target has exactly these parameters: bytes as they are, numbers in float32."""
    assert_stored(parameters(load_target(folder, read_manifest(folder), jnp.dtype(jnp.float32))), wanted)


def assert_stored(found: Mapping[str, nnx.Variable], wanted: Mapping[str, torch.Tensor]) -> None:
    """Exactly these parameters: bytes and FP8 codes as they are, numbers in float32."""
    assert found.keys() == wanted.keys()
    for path, tensor in wanted.items():
        value = np.asarray(found[path].get_value())
        if tensor.dtype == torch.float8_e4m3fn:
            assert value.dtype == jnp.float8_e4m3fn
            value, tensor = value.view(np.uint8), tensor.view(torch.uint8)
        expected = tensor.numpy() if tensor.dtype == torch.uint8 else tensor.float().numpy()
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected, err_msg=path)


def expected_pieces(layers: int, *matrices: str) -> set[str]:
    """Of a target all of whose layers have experts: each matrix of experts is a piece of its own."""
    parts = ["", *(f".moe.experts.{matrix}" for matrix in matrices)]
    return {"target/top", *(f"target/layers.{layer}{part}" for layer in range(layers) for part in parts)}
