"""Hugging Face checkpoints to Orbax. Nothing outside this package knows Hugging Face tensor or config names."""

from convert.conversion import convert
from convert.eagle3 import AuxOffset

__all__ = ["AuxOffset", "convert"]
