"""What parity tests of all target families share: transformers' evaluation of a sequence, and moving weights over."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from ecospec_jax.config import RopeConfig
from ecospec_jax.models.moe import Experts
from ecospec_jax.models.transformer import Transformer


class TorchWeights:
    """A model's tensors, of which none may stay unused."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.unused = dict(model.state_dict())

    def put(self, parameter: nnx.Variable, name: str, part: slice = slice(None), axis: int = 0) -> None:
        """Gives `parameter` the tensor, or a part of it along an axis (the tensor then counts as unused)."""
        tensor = self.unused.pop(name) if part == slice(None) else self.unused[name]
        array = tensor.numpy()[(slice(None),) * axis + (part,)]
        assert parameter.shape == array.shape, name
        parameter.set_value(jnp.asarray(array))


def put_ends(weights: TorchWeights, ours: Transformer) -> None:
    """Embedding, final norm and head."""
    weights.put(ours.embedding.weight, "model.embed_tokens.weight")
    weights.put(ours.norm.weight, "model.norm.weight")
    if ours.head is None:
        weights.unused.pop("lm_head.weight", None)
    else:
        weights.put(ours.head.weight, "lm_head.weight")


def rope_of(config: transformers.PreTrainedConfig) -> RopeConfig:
    """Our form of a transformers config's rope."""
    rope = dict(config.rope_parameters)
    return RopeConfig(
        theta=rope["rope_theta"],
        kind=rope["rope_type"],
        factor=rope.get("factor", 1.0),
        original_max_positions=rope.get("original_max_position_embeddings"),
        truncate=rope.get("truncate", True),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
    )


def put_experts(weights: TorchWeights, experts: Experts, prefix: str) -> None:
    """Experts whose gate rows, then up rows, are one tensor."""
    fused, width = prefix + "gate_up_proj", experts.gate.weight.shape[1]
    weights.put(experts.gate.weight, fused, slice(0, width), axis=1)
    weights.put(experts.up.weight, fused, slice(width, None), axis=1)
    weights.put(experts.down.weight, prefix + "down_proj")
    del weights.unused[fused]


def put_common(weights: TorchWeights, ours: Transformer) -> None:
    """Embedding, head, norms and the attention's projections."""
    put_ends(weights, ours)
    put = weights.put
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        put(layer.attention_norm.weight, prefix + "input_layernorm.weight")
        put(layer.mlp_norm.weight, prefix + "post_attention_layernorm.weight")
        for letter in "qkvo":
            linear = getattr(layer.attention, letter)
            put(linear.weight, f"{prefix}self_attn.{letter}_proj.weight")
            if linear.bias is not None:
                put(linear.bias, f"{prefix}self_attn.{letter}_proj.bias")


@dataclass
class TorchOutput:
    """Internals of one forward pass over one sequence; the last four are of the MoE layers only."""

    logits_RV: np.ndarray
    boundaries: list[np.ndarray]  # the residual stream [R, D] at boundaries 0..L
    router_inputs_LRD: np.ndarray
    expert_ids_LRK: np.ndarray
    combine_weights_LRK: np.ndarray
    gap_LR: np.ndarray  # between the scores of the last expert that was chosen and of the first that was not


def run(model: transformers.PreTrainedModel, tokens: list[int] | np.ndarray) -> TorchOutput:
    """Plain evaluation of one whole sequence without a cache."""
    streams, routers = [], []
    handles = [model.model.layers[0].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))]
    for layer in model.model.layers:
        handles.append(layer.register_forward_hook(lambda _, inputs, output: streams.append(output[0])))
        if hasattr(layer.mlp, "experts"):
            record = lambda router, inputs, output: routers.append((router, inputs[0].flatten(0, -2), *output))  # noqa: E731
            router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
            handles.append(router.register_forward_hook(record))
    try:
        with torch.no_grad():
            logits = model(torch.tensor(np.asarray(tokens)[None]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return TorchOutput(
        logits_RV=logits.numpy(),
        boundaries=[stream.numpy() for stream in streams],
        router_inputs_LRD=np.stack([x.numpy() for _, x, _, _, _ in routers]),
        expert_ids_LRK=np.stack([ids.numpy() for *_, ids in routers]),
        combine_weights_LRK=np.stack([weights.numpy() for _, _, _, weights, _ in routers]),
        gap_LR=np.stack([_gap(router, scores.double(), ids).numpy() for router, _, scores, _, ids in routers]),
    )


def _gap(router: torch.nn.Module, logits_RE: torch.Tensor, ids_RK: torch.Tensor) -> torch.Tensor:
    """The smallest difference that a choice of each row hangs on: of probabilities, or of DeepSeek's biased scores."""
    k = ids_RK.shape[1]
    if not hasattr(router, "e_score_correction_bias"):
        return _cut(torch.softmax(logits_RE, -1), k)
    biased_RE = torch.sigmoid(logits_RE) + router.e_score_correction_bias.double()
    biased_RGM = biased_RE.unflatten(1, (router.num_group, -1))
    sums_RG = biased_RGM.topk(2).values.sum(-1)
    kept_RG = sums_RG >= sums_RG.topk(router.topk_group).values[:, -1:]
    allowed_RE = torch.where(kept_RG[..., None], biased_RGM, -torch.inf).flatten(1)
    return torch.minimum(_cut(sums_RG, router.topk_group), _cut(allowed_RE, k))


def _cut(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Rank k minus rank k + 1; infinite if there is no more than k."""
    ranked = torch.nn.functional.pad(scores.sort(-1, descending=True).values, (0, 1), value=-torch.inf)
    return ranked[:, k - 1] - ranked[:, k]
