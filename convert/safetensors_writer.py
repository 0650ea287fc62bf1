"""Writes a safetensors file; the safetensors library cannot take numpy bfloat16 arrays."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.safetensors_reader import DTYPES

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors under a temporary name, then renames. Wider numbers come first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers refuses the file
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, value in ordered:
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": _NAMES[value.dtype], "shape": value.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    partial.replace(file)
