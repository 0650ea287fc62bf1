"""Cost-aware speculative decoding for Mixture-of-Experts language models in JAX."""

from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.decoder import Decoder, GenerationResult
from ecospec_jax.errors import UserError
from ecospec_jax.generation import Generation
from ecospec_jax.methods import Method
from ecospec_jax.tree import Selection

__all__ = [
    "Decoder",
    "Generation",
    "GenerationResult",
    "Method",
    "SamplingConfig",
    "Selection",
    "SpecConfig",
    "UserError",
]
