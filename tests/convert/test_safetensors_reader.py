"""Our safetensors reader against files that the safetensors library wrote."""

import pytest
import torch
from safetensors.torch import save_file

from convert.safetensors_reader import SafetensorsReader

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype(tmp_path, dtype):
    values = torch.tensor([[0.5, 1, 2], [4, 8, 16]]).to(dtype)
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "x": values}, tmp_path / "model.safetensors")
    found = SafetensorsReader(tmp_path).read("x")
    assert found.dtype.name == str(dtype).removeprefix("torch.")
    assert found.shape == (2, 3)
    assert found.astype("float64").tolist() == values.to(torch.float64).tolist()


def test_scalars_and_empty_tensors(tmp_path):
    save_file({"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.read("scalar").tolist() == 3.5
    assert reader.read("empty").shape == (0, 4)
