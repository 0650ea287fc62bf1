"""Targets, drafters and predictors as Flax NNX modules, found by the `family` of their config."""

from collections.abc import Callable
from typing import Any

from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.models.predictor import BackbonePredictor, Frequency, TokenTable
from ecospec_jax.models.qwen3_moe import Qwen3Moe

TARGETS: dict[str, Callable[..., Any]] = {"qwen3_moe": Qwen3Moe}
DRAFTERS: dict[str, Callable[..., Any]] = {"eagle3": Eagle3}
PREDICTORS: dict[str, Callable[..., Any]] = {
    "backbone": BackbonePredictor,
    "token_table": lambda config, **_: TokenTable(config),
    "frequency": lambda config, **_: Frequency(config),
}
