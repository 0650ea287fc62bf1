"""Ops with several backends; one folder and one public function each."""

from ecospec_jax.kernels.grouped_experts import ExpertWeights, grouped_experts

__all__ = ["ExpertWeights", "grouped_experts"]
