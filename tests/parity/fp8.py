"""Models stored in FP8 with arbitrary factors and ragged blocks, and the same models with widened weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import DeepseekV3Config, MtpConfig, RopeConfig
from ecospec_jax.kernels import Fp8
from ecospec_jax.models import abstract
from tests import tiny

CONFIG = DeepseekV3Config(  # most matrices have a block of less than 128, along one axis or both
    vocab_size=61,
    hidden_size=160,
    num_layers=2,
    num_heads=8,
    q_lora_rank=136,
    kv_lora_rank=132,
    qk_nope_head_dim=14,
    qk_rope_head_dim=10,
    v_head_dim=18,
    intermediate_size=150,
    moe_intermediate_size=140,
    num_experts=6,
    experts_per_token=2,
    shared_experts=1,
    groups=3,
    groups_per_token=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    first_sparse_layer=1,
    rms_norm_eps=1e-4,
    rope=RopeConfig(theta=500.0),
    max_positions=64,
    storage="fp8",
)


def random_fp8(build: Callable[[], Any], seed: int = 0) -> Any:
    """The module that `build` describes, with random weights; no two factors of a matrix are alike."""
    module = tiny.randomised(build, seed)
    random = np.random.default_rng(seed)
    found = parameters(module)
    for path in [path for path in found if path.endswith(".scales")]:
        codes, factors = found[path.removesuffix("scales") + "weight"], found[path]
        shape, grid = codes.get_value().shape, factors.get_value().shape
        codes.set_value(jnp.asarray(random.normal(size=shape), jnp.float8_e4m3fn))
        factors.set_value(jnp.asarray(random.uniform(0.5, 1.5, grid) * shape[-1] ** -0.5, jnp.float32))
    return module


def widened(quantised: Any) -> Any:
    """The same model in plain storage."""
    config = quantised.config
    if isinstance(config, MtpConfig):
        config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, storage="plain"))
    else:
        config = dataclasses.replace(config, storage="plain")
    plain, codes = abstract(config, jnp.dtype(jnp.float32)), parameters(quantised)
    for path, variable in parameters(plain).items():
        value, factors = codes[path].get_value(), codes.get(path.removesuffix("weight") + "scales")
        variable.set_value(value if factors is None else Fp8(value, factors.get_value()).widen())
    return plain
