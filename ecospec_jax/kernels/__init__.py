"""Ops with several backends; one folder and one public function each."""

from ecospec_jax.kernels.dense import dense
from ecospec_jax.kernels.formats import Fp8, Matrix, Mxfp4, Plain
from ecospec_jax.kernels.grouped_experts import Activation, ClampedSwiglu, ExpertWeights, Swiglu, grouped_experts

__all__ = [
    "Activation",
    "ClampedSwiglu",
    "ExpertWeights",
    "Fp8",
    "Matrix",
    "Mxfp4",
    "Plain",
    "Swiglu",
    "dense",
    "grouped_experts",
]
