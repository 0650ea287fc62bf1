"""What a step costs: bytes of the recorded model itself, or of a full target, scaled to the recorded routing."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from ecospec_jax import UserError
from ecospec_jax.cost import CostModel, byte_model
from ecospec_jax.presets import PRESETS, drafter_for, get_preset
from experiments.recording import Header

OWN = "own"
Draft = Literal["eagle3", "free"]


@dataclass(frozen=True)
class FullTarget:
    """Bytes that a full target reads (docs/design.md section 4).

    Attributes:
        fixed: of every pass.
        per_expert: of one expert.
        layers, k: MoE layers and experts of one token.
        draft: of one drafting with an EAGLE-3 head of the published shape, where that is known.
    """

    fixed: float
    per_expert: float
    layers: int
    k: int
    draft: float | None = None


# Without a config here yet: figures of the published checkpoints, mxfp4 and fp8 experts.
WITHOUT_CONFIG = {
    "gpt-oss-120b": FullTarget(fixed=3.1e9, per_expert=13.2e6, layers=36, k=4),
    "deepseek-v3.1": FullTarget(fixed=17.2e9, per_expert=44.0e6, layers=58, k=8),
}
TARGETS = (OWN, *PRESETS, *WITHOUT_CONFIG)


@cache
def full_target(name: str, depth: int) -> FullTarget:
    """A published target in bf16, or one of `WITHOUT_CONFIG`."""
    if name in WITHOUT_CONFIG:
        return WITHOUT_CONFIG[name]
    config = get_preset(name)
    cost = byte_model(config, 2.0, drafter=drafter_for(config), depth=depth)
    return FullTarget(cost.fixed, cost.per_expert, cost.moe_layers, config.experts_per_token, cost.draft)


def cost_model(header: Header, target: str, predictor: str | None, draft: Draft) -> CostModel:
    """Costs of a recorded method.

    For a full target the bytes of an expert are scaled so that the experts of one token cost what they cost there,
    although the recorded model has other layers and another k. Its predictor costs nothing: none of that size exists.

    Args:
        header: of the recording.
        target: `own` for the recorded model, or a full target's name.
        predictor: of the method; `oracle` and those without weights cost nothing.
        draft: whether drafting (and predicting, for `own`) costs what its weights weigh, or nothing.
    """
    if target not in TARGETS:
        raise UserError(f"unknown cost model '{target}'; known: {', '.join(TARGETS)}")
    counted = draft == "eagle3"
    if target == OWN:
        return byte_model(
            header.target,
            float(header.bytes_per_weight),
            drafter=header.drafter if counted else None,
            predictor=header.predictors.get(predictor or "") if counted else None,
            depth=header.depth,
        )
    full, routing = full_target(target, header.depth), header.routing
    if counted and full.draft is None:
        raise UserError(f"the shape of a drafter for {target} is not known here: use --draft free")
    scale = full.layers * full.k / (routing.layers * routing.k)
    return CostModel(
        fixed=full.fixed,
        per_expert=full.per_expert * scale,
        moe_layers=routing.layers,
        draft=(full.draft or 0.0) if counted else 0.0,
    )
