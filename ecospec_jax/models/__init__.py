"""Targets, drafters, backbones and predictors as Flax NNX modules, found by the `family` of their config."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ecospec_jax.config import DrafterConfig, ModelConfig
from ecospec_jax.models.backbone import Backbone
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.models.mtp import Mtp
from ecospec_jax.models.predictor import Frequency, TokenPairs, TokenTable
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.models.state_predictors import DrafterFeatures, TargetGates
from ecospec_jax.predictor_config import BackboneConfig, PredictorConfig
from ecospec_jax.sharding import Placement, spread

TARGETS: dict[str, Callable[..., Any]] = {"qwen3_moe": Qwen3Moe, "gpt_oss": GptOss, "deepseek_v3": DeepseekV3}
DRAFTERS: dict[str, Callable[..., Any]] = {"eagle3": Eagle3, "mtp": Mtp}
BACKBONES: dict[str, Callable[..., Any]] = {"qwen3": Backbone, "qwen2": Backbone}
PREDICTORS: dict[str, Callable[..., Any]] = {
    "backbone": BackbonePredictor,
    "drafter_features": DrafterFeatures,
    "target_gates": TargetGates,
    "token_table": lambda config, **_: TokenTable(config),
    "token_pairs": lambda config, **_: TokenPairs(config),
    "frequency": lambda config, **_: Frequency(config),
}


def abstract(config: ModelConfig | DrafterConfig | BackboneConfig | PredictorConfig, dtype: jnp.dtype) -> Any:
    """The module of a config without values: every variable holds a `jax.ShapeDtypeStruct`."""
    # Counting keys within a trace takes time quadratic in their number; values are not wanted here.
    key = jax.random.key(0)
    rngs: Any = SimpleNamespace(params=lambda: key)
    build = (TARGETS | DRAFTERS | BACKBONES | PREDICTORS)[config.family]
    return nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=rngs))


def with_random_weights(
    config: ModelConfig | DrafterConfig, dtype: jnp.dtype, seed: int, placement: Placement | None = None
) -> Any:
    """A target or drafter of this shape, its weights made where `placement` has them: no device needs room for all.

    But for rounding they do not depend on the placement.
    """
    key = jax.random.key(seed)

    def build() -> Any:
        made = count()  # `nnx.Rngs` takes time quadratic in it where values are traced
        rngs: Any = SimpleNamespace(params=lambda: jax.random.fold_in(key, next(made)))
        return (TARGETS | DRAFTERS)[config.family](config, dtype=dtype, rngs=rngs)

    if placement is None:
        return build()
    module = abstract(config, dtype)
    shardings = jax.tree.map(
        lambda variable: placement.sharding(variable.get_metadata()["logical_axes"], variable.get_value().shape),
        nnx.state(module),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    nnx.update(module, jax.jit(lambda: nnx.pure(nnx.state(build())), out_shardings=shardings)())
    spread(module, placement)
    return module
