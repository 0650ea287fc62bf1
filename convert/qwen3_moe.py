"""Hugging Face `qwen3_moe` (docs/formats.md A.1)."""

import re

import jax.numpy as jnp

from convert.assembly import Assembly, Part, check_target, translate
from convert.hf_config import HFConfig
from convert.safetensors_reader import SafetensorsReader
from ecospec_jax.checkpoint import stored_parameters
from ecospec_jax.config import Qwen3MoeConfig

NAMES = {
    r"embedding\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"head\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.mlp_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"layers\.(\d+)\.attention\.([qk])_norm\.weight": r"model.layers.\1.self_attn.\2_norm.weight",
    r"layers\.(\d+)\.attention\.([qkvo])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"layers\.(\d+)\.mlp\.(gate|up|down)\.weight": r"model.layers.\1.mlp.\2_proj.weight",
    r"layers\.(\d+)\.moe\.router\.gate\.weight": r"model.layers.\1.mlp.gate.weight",
}
_EXPERTS = re.compile(r"layers\.(?P<layer>\d+)\.moe\.experts\.(?P<kind>gate|up|down)\.weight")


def open_target(source: HFConfig) -> Part[Qwen3MoeConfig]:
    """Reads the config and the headers beside it, and checks that they belong together."""
    config = _config(source)
    reader = SafetensorsReader(source.file.parent)
    _, stored = stored_parameters(config, jnp.dtype(jnp.float32))
    assemblies = {path: _assembly(path, variable.get_value().shape, reader) for path, variable in stored.items()}
    part = Part("target", source, config, reader, assemblies)
    check_target(part, tied=config.tie_embeddings, head="lm_head.weight", embedding="model.embed_tokens.weight")
    return part


def _config(source: HFConfig) -> Qwen3MoeConfig:
    source.expect("hidden_act", "silu")
    source.expect("use_sliding_window", False)
    layers, step = source.size("num_hidden_layers"), source.size("decoder_sparse_step")
    mlp_only = source.integers("mlp_only_layers") or ()
    return source.build(
        Qwen3MoeConfig,
        vocab_size=source.size("vocab_size"),
        hidden_size=source.size("hidden_size"),
        num_layers=layers,
        num_heads=source.size("num_attention_heads"),
        num_kv_heads=source.size("num_key_value_heads"),
        head_dim=source.size("head_dim"),
        intermediate_size=source.size("intermediate_size"),
        moe_intermediate_size=source.size("moe_intermediate_size"),
        num_experts=source.size("num_experts", "num_local_experts"),
        experts_per_token=source.size("num_experts_per_tok"),
        norm_topk_prob=source.need(bool, "norm_topk_prob"),
        rms_norm_eps=source.need(float, "rms_norm_eps"),
        rope=source.rope(),
        max_positions=source.size("max_position_embeddings"),
        dense_layers=tuple(layer for layer in range(layers) if layer in mlp_only or (layer + 1) % step != 0),
        tie_embeddings=source.need(bool, "tie_word_embeddings"),
        attention_bias=source.need(bool, "attention_bias"),
    )


def _assembly(path: str, shape: tuple[int, ...], reader: SafetensorsReader) -> Assembly:
    experts = _EXPERTS.fullmatch(path)
    if experts is None:
        return Assembly.whole(translate(path, NAMES), shape)
    return Assembly.experts(f"model.layers.{experts['layer']}.mlp.experts", experts["kind"], shape, reader)
