"""What a step costs, in bytes from the configurations or in seconds from measurements (docs/design.md section 4)."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pydantic

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import STRICT, DrafterConfig, ModelConfig, MtpConfig, read_json, write_json
from ecospec_jax.errors import UserError, reported_as_user_error
from ecospec_jax.models import abstract
from ecospec_jax.predictor_config import FrequencyConfig, PredictorConfig, TokenPairsConfig, TokenTableConfig


@dataclass(frozen=True)
class CostModel:
    """`fixed + per_expert * pairs + per_row * rows`, and what drafting and predicting add; all in one unit.

    Attributes:
        fixed: every target pass: attention, routers, norms, dense layers, head (of the embedding only rows).
        per_expert: each distinct (layer, expert) pair that the pass touches.
        moe_layers: layers that have experts.
        per_row: each live row of the pass.
        draft: one drafting of a candidate tree, the catch-up included.
        predict: one prediction of a candidate tree's experts.
        unit: `bytes` or `seconds`.
    """

    fixed: float
    per_expert: float
    moe_layers: int
    per_row: float = 0.0
    draft: float = 0.0
    predict: float = 0.0
    unit: Literal["bytes", "seconds"] = "bytes"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        for name in ("fixed", "per_expert", "per_row", "draft", "predict"):
            # As integers, bytes of a large model would overflow the device's 32 bits.
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("fixed", "per_expert"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"cost model: {name} must be positive and finite, not {getattr(self, name)}")
        for name in ("per_row", "draft", "predict"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"cost model: {name} must be finite and not negative, not {getattr(self, name)}")
        if self.moe_layers < 1:
            raise UserError(f"cost model: moe_layers must be at least 1, not {self.moe_layers}")

    def step(self, u: float, rows: float = 0.0) -> float:
        """Cost of a verification of `rows` rows that touches `u` distinct experts in the mean MoE layer."""
        return self.fixed + u * self.moe_layers * self.per_expert + rows * self.per_row


def byte_model(
    config: ModelConfig,
    bytes_per_weight: float,
    *,
    drafter: DrafterConfig | None = None,
    predictor: PredictorConfig | None = None,
    depth: int = 3,
    branch: int = 2,
) -> CostModel:
    """The cost in bytes of weights read: `bytes_per_weight` each, or what those take that are stored quantised.

    A drafter is read once for the catch-up and once for each further level of the tree of `depth` levels; of its own
    experts, if it has any, those that `branch` rows touch under uniform routing. A predictor with a backbone is read
    once. Tables cost nothing: a step reads rows of them.
    """
    sizes, moe_layers = _sizes(config), len(config.moe_layers)
    experts = _experts(sizes)
    rows_only = set() if config.tie_embeddings else {"embedding.weight"}
    return CostModel(
        fixed=_total(sizes, sizes.keys() - experts - rows_only, bytes_per_weight),
        per_expert=_total(sizes, experts, bytes_per_weight) / (moe_layers * config.num_experts),
        moe_layers=moe_layers,
        draft=0.0 if drafter is None else _draft_bytes(drafter, bytes_per_weight, depth, branch),
        predict=0.0 if predictor is None else _predict_bytes(predictor, bytes_per_weight),
    )


@dataclass(frozen=True)
class _Size:
    """Numbers in the model's dtype, and bytes of numbers in a dtype of their own."""

    numbers: int = 0
    own_bytes: int = 0


def _total(sizes: dict[str, _Size], paths: Set[str], bytes_per_weight: float) -> float:
    """Bytes of these parameters."""
    return sum(sizes[path].numbers * bytes_per_weight + sizes[path].own_bytes for path in paths)


def _experts(sizes: dict[str, _Size]) -> Set[str]:
    return {path for path in sizes if ".moe.experts." in path}


@cache
def _sizes(config: ModelConfig | DrafterConfig | PredictorConfig) -> dict[str, _Size]:
    """Of a model's parameters, borrowed ones included."""
    dtype = jnp.dtype(jnp.bfloat16)
    sizes = {}
    for path, variable in parameters(abstract(config, dtype)).items():
        array = variable.get_value()
        in_dtype = array.dtype == dtype
        sizes[path] = _Size(numbers=array.size) if in_dtype else _Size(own_bytes=array.size * array.dtype.itemsize)
    return sizes


def _draft_bytes(config: DrafterConfig, bytes_per_weight: float, depth: int, branch: int) -> float:
    sizes = _sizes(config)
    once = {path for path in sizes if path.startswith("fc.")}
    experts = _experts(sizes)
    total, touched = partial(_total, sizes, bytes_per_weight=bytes_per_weight), 0.0
    if isinstance(config, MtpConfig):
        unused = 1 - config.layer.experts_per_token / config.layer.num_experts
        touched = (1 - unused) + (depth - 1) * (1 - unused**branch)
    every = sizes.keys() - once - experts - {"embedding.weight", "target_ids"}
    return total(once) + depth * total(every) + touched * total(experts)


def _predict_bytes(config: PredictorConfig, bytes_per_weight: float) -> float:
    """Of tables a few rows are read, which count as nothing; of an embedding too."""
    if isinstance(config, TokenTableConfig | TokenPairsConfig | FrequencyConfig):
        return 0.0
    sizes = _sizes(config)
    rows_only = {"embedding.weight", "features.embedding.weight", "subtokens.ids_VS", "subtokens.counts_V"}
    return _total(sizes, sizes.keys() - rows_only, bytes_per_weight)


def fit_seconds(
    seconds: Sequence[float],
    pairs: Sequence[float],
    rows: Sequence[float],
    *,
    moe_layers: int,
    draft: float,
    predict: float,
) -> tuple[CostModel, float]:
    """Least squares with coefficients >= 0: seconds of verifications from their (layer, expert) pairs and rows.

    Returns:
        The model and r^2.

    Raises:
        UserError: the measurements do not determine a positive cost of a pass and of an expert.
    """
    from scipy.optimize import nnls

    if len(set(pairs)) < 2:
        raise UserError("cost model: the measurements do not differ in the experts they touch")
    y = np.asarray(seconds, np.float64)
    design = np.stack([np.ones_like(y), np.asarray(pairs, np.float64), np.asarray(rows, np.float64)], axis=1)
    scale = np.maximum(design.max(axis=0), 1e-30)
    coefficients, _ = nnls(design / scale, y)
    fixed, per_expert, per_row = coefficients / scale
    rest = y - design @ (coefficients / scale)
    spread = np.sum((y - y.mean()) ** 2)
    r_squared = 1 - float(np.sum(rest**2) / spread) if spread > 0 else 0.0
    return CostModel(fixed, per_expert, moe_layers, per_row, draft, predict, unit="seconds"), r_squared


def write_cost(path: Path, cost: CostModel) -> None:
    """Writes a cost model as JSON, whole or not at all, and makes the folder."""
    with reported_as_user_error(f"{path}: cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, cost)


def read_cost(path: Path) -> CostModel:
    """Reads what `write_cost` wrote; a wrong file is a `UserError`."""
    return read_json(CostModel, path)
