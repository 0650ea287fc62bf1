"""gpt-oss (docs/formats.md A.2) in both published layouts: Hugging Face's, and OpenAI's own folder `original`.

Expert matrices keep their storage: MXFP4 blocks and scales byte for byte, plain ones in their dtype.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from convert.assembly import Assembly, Part, check_target, translate
from convert.hf_config import HFConfig
from convert.safetensors_reader import SafetensorsReader
from ecospec_jax.checkpoint import stored_parameters
from ecospec_jax.config import GptOssConfig, RopeConfig
from ecospec_jax.errors import UserError

# Parameter -> tensor in the Hugging Face layout. Plain expert matrices are [E, in, out] there and [E, out, in] here.
NAMES = {
    r"embedding\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"head\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.mlp_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"layers\.(\d+)\.attention\.([qkvo])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"layers\.(\d+)\.attention\.sinks": r"model.layers.\1.self_attn.sinks",
    r"layers\.(\d+)\.moe\.router\.gate\.(weight|bias)": r"model.layers.\1.mlp.router.\2",
    r"layers\.(\d+)\.moe\.experts\.(gate_up|down)\.weight": r"model.layers.\1.mlp.experts.\2_proj",
    r"layers\.(\d+)\.moe\.experts\.(gate_up|down)\.(blocks|scales)": r"model.layers.\1.mlp.experts.\2_proj_\3",
    r"layers\.(\d+)\.moe\.experts\.(gate_up|down)_bias": r"model.layers.\1.mlp.experts.\2_proj_bias",
}
ORIGINAL_NAMES = {  # the same in OpenAI's layout, whose qkv holds the rows of q, then k, then v
    r"embedding\.weight": "embedding.weight",
    r"norm\.weight": "norm.scale",
    r"head\.weight": "unembedding.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"block.\1.attn.norm.scale",
    r"layers\.(\d+)\.mlp_norm\.weight": r"block.\1.mlp.norm.scale",
    r"layers\.(\d+)\.attention\.[qkv]\.(weight|bias)": r"block.\1.attn.qkv.\2",
    r"layers\.(\d+)\.attention\.o\.(weight|bias)": r"block.\1.attn.out.\2",
    r"layers\.(\d+)\.attention\.sinks": r"block.\1.attn.sinks",
    r"layers\.(\d+)\.moe\.router\.gate\.(weight|bias)": r"block.\1.mlp.gate.\2",
    r"layers\.(\d+)\.moe\.experts\.gate_up\.(blocks|scales)": r"block.\1.mlp.mlp1_weight.\2",
    r"layers\.(\d+)\.moe\.experts\.gate_up_bias": r"block.\1.mlp.mlp1_bias",
    r"layers\.(\d+)\.moe\.experts\.down\.(blocks|scales)": r"block.\1.mlp.mlp2_weight.\2",
    r"layers\.(\d+)\.moe\.experts\.down_bias": r"block.\1.mlp.mlp2_bias",
}
_PLAIN_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)\.weight")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNQUANTISED = ("self_attn", "router", "embed_tokens", "lm_head")
_NOT_A_NUMBER = 255  # as an exponent of E8M0
# What OpenAI's config does not state, since its code fixes it.
_ORIGINAL_EPS = 1e-5
_ORIGINAL_KEYS = (
    "num_hidden_layers",
    "num_experts",
    "experts_per_token",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "swiglu_limit",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "sliding_window",
    "initial_context_length",
    "rope_theta",
    "rope_scaling_factor",
    "rope_ntk_alpha",
    "rope_ntk_beta",
)


def is_original(source: HFConfig) -> bool:
    """Whether a config is that of OpenAI's own layout, which names no model type."""
    return "model_type" not in source.values and source.values.keys() >= {"rope_ntk_alpha", "rope_ntk_beta"}


def open_target(source: HFConfig) -> Part[GptOssConfig]:
    """Reads the config and the headers beside it, and checks that they belong together."""
    return _open(source, _config(source), NAMES)


def open_original(source: HFConfig) -> Part[GptOssConfig]:
    """The same for OpenAI's layout."""
    return _open(source, _original_config(source), ORIGINAL_NAMES)


def _open(source: HFConfig, config: GptOssConfig, names: Mapping[str, str]) -> Part[GptOssConfig]:
    reader = SafetensorsReader(source.file.parent)
    _, stored = stored_parameters(config, jnp.dtype(jnp.float32))
    assemblies = {path: _assembly(path, variable.get_value().shape, config, names) for path, variable in stored.items()}
    part = Part("target", source, config, reader, assemblies)
    embedding, head = (translate(path, names) for path in ("embedding.weight", "head.weight"))
    check_target(part, tied=config.tie_embeddings, head=head, embedding=embedding)
    _check_scales(part)
    return part


def _config(source: HFConfig) -> GptOssConfig:
    source.expect("hidden_act", "silu")  # the name that every published config gives the clamped SwiGLU
    source.expect("swiglu_alpha", 1.702)
    source.expect("attention_bias", True)
    rope = source.rope()
    context = source.find(int, "initial_context_length")
    if context not in (None, rope.original_max_positions):
        source.refuse("initial_context_length", f"{context}, but the rope's context is {rope.original_max_positions}")
    return _build(
        source,
        sliding_layers=_sliding_layers(source),
        rms_norm_eps=float(source.need(float, "rms_norm_eps")),
        rope=rope,
        max_positions=source.size("max_position_embeddings"),
        expert_storage=_storage(source),
        tie_embeddings=source.need(bool, "tie_word_embeddings"),
    )


def _original_config(source: HFConfig) -> GptOssConfig:
    for key in source.values.keys() - set(_ORIGINAL_KEYS):
        source.refuse(key, "not known in OpenAI's layout")
    context, factor = source.size("initial_context_length"), float(source.need(float, "rope_scaling_factor"))
    rope = source.build(
        RopeConfig,
        theta=float(source.need(float, "rope_theta")),
        kind="yarn",
        factor=factor,
        original_max_positions=context,
        beta_fast=float(source.need(float, "rope_ntk_beta")),
        beta_slow=float(source.need(float, "rope_ntk_alpha")),
        truncate=False,
    )
    return _build(
        source,
        sliding_layers=_alternating(source),
        rms_norm_eps=_ORIGINAL_EPS,
        rope=rope,
        max_positions=int(context * factor),
        expert_storage="mxfp4",
    )


def _build(source: HFConfig, **others: Any) -> GptOssConfig:
    """The config with what both layouts state under the same names, and `others`."""
    return source.build(
        GptOssConfig,
        vocab_size=source.size("vocab_size"),
        hidden_size=source.size("hidden_size"),
        num_layers=source.size("num_hidden_layers"),
        num_heads=source.size("num_attention_heads"),
        num_kv_heads=source.size("num_key_value_heads"),
        head_dim=source.size("head_dim"),
        moe_intermediate_size=source.size("intermediate_size"),
        num_experts=source.size("num_local_experts", "num_experts"),
        experts_per_token=source.size("num_experts_per_tok", "experts_per_token"),
        sliding_window=source.size("sliding_window"),
        swiglu_limit=float(source.need(float, "swiglu_limit")),
        **others,
    )


def _alternating(source: HFConfig) -> tuple[int, ...]:
    return tuple(range(0, source.size("num_hidden_layers"), 2))


def _sliding_layers(source: HFConfig) -> tuple[int, ...]:
    """From `layer_types`; without it they alternate, beginning with a sliding one."""
    kinds = source.find(list, "layer_types")
    if kinds is None:
        return _alternating(source)
    for kind in kinds:
        if kind not in (_SLIDING, _FULL):
            source.refuse("layer_types", f"{kind!r} is not supported, only '{_SLIDING}' and '{_FULL}'")
    if len(kinds) != source.size("num_hidden_layers"):
        source.refuse(
            "layer_types", f"{len(kinds)} layers, but num_hidden_layers is {source.size('num_hidden_layers')}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)


def _storage(source: HFConfig) -> Literal["plain", "mxfp4"]:
    """MXFP4 if the config says so. Which tensors are quantised is fixed: the expert matrices, and nothing else."""
    quantisation = source.quantisation("mxfp4", {"modules_to_not_convert", "dequantize"})
    if quantisation is None:
        return "plain"
    quantisation.expect("dequantize", False)
    for module in quantisation.find(list, "modules_to_not_convert") or ():
        if str(module).split(".")[-1] not in _UNQUANTISED:
            quantisation.refuse("modules_to_not_convert", f"{module!r} is not one of {', '.join(_UNQUANTISED)}")
    return "mxfp4"


def _assembly(path: str, shape: tuple[int, ...], config: GptOssConfig, names: Mapping[str, str]) -> Assembly:
    name = translate(path, names)
    if path.endswith((".blocks", ".scales")):
        return Assembly.whole(name, shape, dtypes=("U8",))
    if _PLAIN_EXPERTS.fullmatch(path):
        return Assembly.transposed(name, shape)
    if name.endswith(("qkv.weight", "qkv.bias")):
        rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        return Assembly.part(name, shape, rows, "qkv".index(path.split(".")[-2]))
    return Assembly.whole(name, shape)


def _check_scales(part: Part[GptOssConfig]) -> None:
    """Refuses scales that are no numbers. They are read before anything is written: a seventeenth of the experts."""
    for path, assembly in part.assemblies.items():
        if path.endswith(".scales"):
            (name,) = assembly.names
            if part.reader.read(name).max() == _NOT_A_NUMBER:
                file = part.reader.tensors[name].file
                raise UserError(f"{file}: tensor {name} holds the scale {_NOT_A_NUMBER}, which means no number")
