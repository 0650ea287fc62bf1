"""Written safetensors files are what the library writes; models that have no published form are refused."""

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from convert.export import export_target
from convert.safetensors_reader import SafetensorsReader
from convert.safetensors_writer import write_safetensors
from tests.tiny import quick_compilation
from tests.training.models import make_gpt_oss

__all__ = ["quick_compilation"]


def test_written_file(tmp_path) -> None:
    """Of every kind of tensor, in any order, also strided ones; nothing else is left in the folder."""
    random = np.random.default_rng(0)
    tensors = {
        "mask": random.integers(0, 2, 3).astype(bool),
        "blocks": random.integers(0, 256, (2, 3, 5)).astype(np.uint8),
        "transposed": random.normal(size=(3, 4)).astype(np.float32).T,
        "rounded": random.normal(size=(5, 2)).astype(ml_dtypes.bfloat16),
        "offsets": np.arange(7) * 2**40,
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(2.5).reshape(()),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    theirs, ours = load_file(tmp_path / "model.safetensors"), SafetensorsReader(tmp_path)
    assert theirs.keys() == ours.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        other = theirs[name].float().numpy() if theirs[name].dtype == torch.bfloat16 else theirs[name].numpy()
        np.testing.assert_array_equal(other, value.astype(other.dtype))
        assert ours.read(name).dtype == value.dtype
        np.testing.assert_array_equal(ours.read(name), value)


def test_a_target_without_a_published_form_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="mxfp4"):
        export_target(make_gpt_oss(), tmp_path / "target", eos_token_ids=[1], pad_token_id=0)
    assert not list(tmp_path.iterdir())
