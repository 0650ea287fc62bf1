"""Random transformers Qwen3-MoE models, what they compute, and the same weights in our module (without `convert/`)."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from ecospec_jax.config import Qwen3MoeConfig, RopeConfig
from ecospec_jax.models.qwen3_moe import Qwen3Moe

# No two dimensions are equal, nor are heads * head_dim (60), kv_heads * head_dim (20) or twice the expert width (56).
SIZES = dict(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=36,
    moe_intermediate_size=28,
    num_experts=11,
    num_experts_per_tok=4,
    max_position_embeddings=128,
    norm_topk_prob=True,
    rms_norm_eps=1e-3,  # large enough to matter
    rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    tie_word_embeddings=False,
)


def random_model(seed: int = 0, **overrides) -> transformers.Qwen3MoeForCausalLM:
    """A float32 model in which every parameter matters: no constant norm weights, no vanishing layers or biases."""
    config = transformers.Qwen3MoeConfig(**(SIZES | overrides))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "mlp.gate.weight" in name:
                parameter.copy_(2 * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def to_jax(model: transformers.Qwen3MoeForCausalLM) -> Qwen3Moe:
    """Our module with the same weights, float32."""
    config = config_of(model.config)
    ours = nnx.eval_shape(lambda: Qwen3Moe(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    unused = dict(model.state_dict())

    def put(parameter: nnx.Param, name: str, part: slice = slice(None), axis: int = 0) -> None:
        tensor = unused.pop(name) if part == slice(None) else unused[name]
        array = tensor.numpy()[(slice(None),) * axis + (part,)]
        assert parameter.shape == array.shape, name
        parameter.set_value(jnp.asarray(array))

    put(ours.embedding.weight, "model.embed_tokens.weight")
    put(ours.norm.weight, "model.norm.weight")
    if ours.head is not None:
        put(ours.head.weight, "lm_head.weight")
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        put(layer.attention_norm.weight, prefix + "input_layernorm.weight")
        put(layer.mlp_norm.weight, prefix + "post_attention_layernorm.weight")
        for letter in "qkvo":
            linear = getattr(layer.attention, letter)
            put(linear.weight, f"{prefix}self_attn.{letter}_proj.weight")
            if linear.bias is not None:
                put(linear.bias, f"{prefix}self_attn.{letter}_proj.bias")
        put(layer.attention.q_norm.weight, prefix + "self_attn.q_norm.weight")
        put(layer.attention.k_norm.weight, prefix + "self_attn.k_norm.weight")
        if layer.moe is None:
            for name in ("gate", "up", "down"):
                put(getattr(layer.mlp, name).weight, f"{prefix}mlp.{name}_proj.weight")
        else:
            width = config.moe_intermediate_size
            put(layer.moe.router.gate.weight, prefix + "mlp.gate.weight")
            put(layer.moe.experts.gate, prefix + "mlp.experts.gate_up_proj", slice(0, width), axis=1)
            put(layer.moe.experts.up, prefix + "mlp.experts.gate_up_proj", slice(width, None), axis=1)
            put(layer.moe.experts.down, prefix + "mlp.experts.down_proj")
            del unused[prefix + "mlp.experts.gate_up_proj"]
    if ours.head is None:
        unused.pop("lm_head.weight", None)
    assert not unused, sorted(unused)
    return ours


def config_of(config: transformers.Qwen3MoeConfig) -> Qwen3MoeConfig:
    """Our form of a transformers config, spelled out here a second time."""
    rope = dict(config.rope_parameters)
    layers = range(config.num_hidden_layers)
    return Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(
            theta=rope["rope_theta"],
            kind=rope["rope_type"],
            factor=rope.get("factor", 1.0),
            original_max_positions=rope.get("original_max_position_embeddings"),
        ),
        max_positions=config.max_position_embeddings,
        dense_layers=tuple(
            i for i in layers if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step != 0
        ),
        tie_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
    )


@dataclass
class TorchOutput:
    """Internals of one forward pass over one sequence; the last four are of the MoE layers only."""

    logits_RV: np.ndarray
    boundaries: list[np.ndarray]  # the residual stream [R, D] at boundaries 0..L
    router_inputs_LRD: np.ndarray
    expert_ids_LRK: np.ndarray
    combine_weights_LRK: np.ndarray
    gap_LR: np.ndarray  # probability of rank k minus that of rank k + 1


def run(model: transformers.Qwen3MoeForCausalLM, tokens: list[int] | np.ndarray) -> TorchOutput:
    """Plain evaluation of one whole sequence without a cache."""
    streams, routers = [], []
    handles = [model.model.layers[0].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))]
    for layer in model.model.layers:
        handles.append(layer.register_forward_hook(lambda _, inputs, output: streams.append(output[0])))
        if hasattr(layer.mlp, "experts"):
            record = lambda _, inputs, output: routers.append((inputs[0], *output))  # noqa: E731
            handles.append(layer.mlp.gate.register_forward_hook(record))
    try:
        with torch.no_grad():
            logits = model(torch.tensor(np.asarray(tokens)[None]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    k = model.config.num_experts_per_tok
    ranked = [torch.softmax(scores.double(), -1).sort(-1, descending=True).values for _, scores, _, _ in routers]
    return TorchOutput(
        logits_RV=logits.numpy(),
        boundaries=[stream.numpy() for stream in streams],
        router_inputs_LRD=np.stack([x.numpy() for x, _, _, _ in routers]),
        expert_ids_LRK=np.stack([ids.numpy() for _, _, _, ids in routers]),
        combine_weights_LRK=np.stack([weights.numpy() for _, _, weights, _ in routers]),
        gap_LR=np.stack([(ranks[:, k - 1] - ranks[:, k]).numpy() for ranks in ranked]),
    )
