"""DeepSeek-V3 (docs/formats.md A.3, B.2) and its MTP module as a drafter (D).

FP8 matrices keep their codes byte for byte; each has a tensor of factors beside it, one a block of 128 x 128 codes.
"""

from dataclasses import replace
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.assembly import Assembly, Part, check_target, equal, translate
from convert.hf_config import HFConfig
from convert.safetensors_reader import SafetensorsReader
from ecospec_jax.checkpoint import stored_parameters
from ecospec_jax.config import DeepseekV3Config, ModelConfig, MtpConfig
from ecospec_jax.errors import UserError
from ecospec_jax.kernels.formats import FP8_BLOCK

_NAMES = {  # parameter -> tensor; an expert's has its number in place of `{expert}`
    r"embedding\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"head\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.mlp_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"layers\.(\d+)\.attention\.kv_a\.weight": r"model.layers.\1.self_attn.kv_a_proj_with_mqa.weight",
    r"layers\.(\d+)\.attention\.(q_a|q_b|kv_b|o)\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"layers\.(\d+)\.attention\.(q_a|kv_a)_norm\.weight": r"model.layers.\1.self_attn.\2_layernorm.weight",
    r"layers\.(\d+)\.mlp\.(gate|up|down)\.weight": r"model.layers.\1.mlp.\2_proj.weight",
    r"layers\.(\d+)\.moe\.router\.gate\.weight": r"model.layers.\1.mlp.gate.weight",
    r"layers\.(\d+)\.moe\.router\.bias": r"model.layers.\1.mlp.gate.e_score_correction_bias",
    r"layers\.(\d+)\.moe\.shared\.(gate|up|down)\.weight": r"model.layers.\1.mlp.shared_experts.\2_proj.weight",
    r"layers\.(\d+)\.moe\.experts\.(gate|up|down)\.weight": r"model.layers.\1.mlp.experts.{expert}.\2_proj.weight",
}
_MTP_NAMES = {  # of the MTP module, beside its decoder layer; without the layer's prefix
    r"embedding\.weight": "embed_tokens.weight",
    r"embedding_norm\.weight": "enorm.weight",
    r"hidden_norm\.weight": "hnorm.weight",
    r"join\.weight": "eh_proj.weight",
    r"norm\.weight": "shared_head.norm.weight",
    r"head\.weight": "shared_head.head.weight",
}
_FP8 = {  # what this project implements; the keys that a quantization_config may have
    "fmt": "e4m3",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": None,
    "modules_to_convert": None,
    "expert_dtype": "fp8",
    "dequantize": False,
}
QUANTISATION = {  # of a checkpoint that is written; scales are powers of two, stored as float32
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "ue8m0",
}
_SCALE_FORMATS = ("float", "ue8m0")
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")


def tensor_name(path: str, mtp_layer: int | None = None) -> str:
    """The published name of a parameter: of the target, or of the MTP module that is layer `mtp_layer`."""
    if path.endswith(".scales"):
        return tensor_name(path.removesuffix("scales") + "weight", mtp_layer) + "_scale_inv"
    if mtp_layer is None:
        return translate(path, _NAMES)
    if path.startswith("layer."):
        return translate(f"layers.{mtp_layer}.{path.removeprefix('layer.')}", _NAMES)
    return _mtp_prefix(mtp_layer) + translate(path, _MTP_NAMES)


def open_target(source: HFConfig) -> Part[DeepseekV3Config]:
    """Reads the config and the headers beside it, and checks that they belong together.

    The tensors of MTP modules, which are the layers behind the last, may be there: they are a drafter's.
    """
    config = _config(source, source.size("num_hidden_layers"), source.need(int, "first_k_dense_replace"))
    reader = SafetensorsReader(source.file.parent)
    part = Part("target", source, config, reader, _assemblies(config, reader))
    mtp = MtpConfig(config, own_embedding=True, own_head=True)
    layers = range(config.num_layers, config.num_layers + (source.find(int, *_MTP_LAYERS) or 0))
    unstored = {
        name
        for layer in layers
        for assembly in _assemblies(mtp, reader, mtp_layer=layer).values()
        for name in assembly.names
    }
    check_target(
        part,
        tied=config.tie_embeddings,
        head="lm_head.weight",
        embedding="model.embed_tokens.weight",
        unstored=frozenset(unstored),
    )
    return part


def open_drafter(source: HFConfig, target: ModelConfig, target_reader: SafetensorsReader | None) -> Part[MtpConfig]:
    """The MTP module of a DeepSeek-V3 checkpoint, or one that was exported alone, as layer 0.

    Its embedding and head are the target's if they are absent, or equal to those that `target_reader` has.
    """
    if not isinstance(target, DeepseekV3Config):
        raise UserError(f"{source.file}: an MTP module drafts for deepseek_v3 targets only, not for {target.family}")
    reader = SafetensorsReader(source.file.parent)
    layer = _mtp_layer(source, reader)
    for key in _MTP_LAYERS:
        source.expect(key, 1)
    own_config = _config(source, target.num_layers, target.first_sparse_layer)
    for name in ("vocab_size", "hidden_size"):
        if getattr(own_config, name) != getattr(target, name):
            source.refuse(name, f"{getattr(own_config, name)}, but the target's is {getattr(target, name)}")

    copies = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    present = {path for path in copies if tensor_name(path, layer) in reader.tensors}
    own = {path for path in present if not _same(reader, tensor_name(path, layer), target_reader, copies[path])}
    config = MtpConfig(own_config, own_embedding="embedding.weight" in own, own_head="head.weight" in own)
    part = Part("drafter", source, config, reader, _assemblies(config, reader, mtp_layer=layer))
    models = {name for name in reader.tensors if not name.startswith(_mtp_prefix(layer))} if layer else set()
    part.check(unstored=frozenset(models | {tensor_name(path, layer) for path in present - own}))
    return part


def _same(reader: SafetensorsReader, name: str, other: SafetensorsReader | None, other_name: str) -> bool:
    return other is not None and other_name in other.tensors and equal(reader, name, other, other_name)


def _mtp_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _mtp_layer(source: HFConfig, reader: SafetensorsReader) -> int:
    """Which layer the MTP module is: the one behind the model's last, or 0 of a module alone."""
    behind = source.size("num_hidden_layers")
    for layer in (behind, 0):
        if tensor_name("join.weight", layer) in reader.tensors:
            return layer
    raise UserError(f"{reader.listing}: no MTP module: tensor {tensor_name('join.weight', behind)} is missing")


def _config(source: HFConfig, num_layers: int, first_sparse_layer: int) -> DeepseekV3Config:
    for key, value in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("rope_interleave", True),
        ("num_key_value_heads", source.size("num_attention_heads")),
        ("qk_head_dim", source.size("qk_nope_head_dim") + source.size("qk_rope_head_dim")),
    ):
        source.expect(key, value)
    return source.build(
        DeepseekV3Config,
        vocab_size=source.size("vocab_size"),
        hidden_size=source.size("hidden_size"),
        num_layers=num_layers,
        num_heads=source.size("num_attention_heads"),
        q_lora_rank=source.size("q_lora_rank"),
        kv_lora_rank=source.size("kv_lora_rank"),
        qk_nope_head_dim=source.size("qk_nope_head_dim"),
        qk_rope_head_dim=source.size("qk_rope_head_dim"),
        v_head_dim=source.size("v_head_dim"),
        intermediate_size=source.size("intermediate_size"),
        moe_intermediate_size=source.size("moe_intermediate_size"),
        num_experts=source.size("n_routed_experts", "num_local_experts"),
        experts_per_token=source.size("num_experts_per_tok"),
        shared_experts=source.size("n_shared_experts"),
        groups=source.size("n_group"),
        groups_per_token=source.size("topk_group"),
        norm_topk_prob=source.need(bool, "norm_topk_prob"),
        routed_scaling_factor=float(source.need(float, "routed_scaling_factor")),
        first_sparse_layer=first_sparse_layer,
        rms_norm_eps=float(source.need(float, "rms_norm_eps")),
        rope=source.rope(),
        max_positions=source.size("max_position_embeddings"),
        storage=_storage(source),
        tie_embeddings=source.need(bool, "tie_word_embeddings"),
    )


def _storage(source: HFConfig) -> Literal["plain", "fp8"]:
    """FP8 if the config says so. Which tensors are quantised is fixed (docs/formats.md A.3)."""
    quantisation = source.quantisation("fp8", {"scale_fmt", *_FP8})
    if quantisation is None:
        return "plain"
    quantisation.need(list, "weight_block_size")  # a checkpoint's shapes do not tell it
    for key, value in _FP8.items():
        quantisation.expect(key, value)
    scale_format = quantisation.find(str, "scale_fmt") or _SCALE_FORMATS[0]
    if scale_format not in _SCALE_FORMATS:
        quantisation.refuse("scale_fmt", f"'{scale_format}' is not supported, only {', '.join(_SCALE_FORMATS)}")
    return "fp8"


def _assemblies(
    config: DeepseekV3Config | MtpConfig, reader: SafetensorsReader, mtp_layer: int | None = None
) -> dict[str, Assembly]:
    _, stored = stored_parameters(config, jnp.dtype(jnp.float32))
    return {path: _assembly(path, variable, reader, tensor_name(path, mtp_layer)) for path, variable in stored.items()}


def _assembly(path: str, variable: nnx.Variable, reader: SafetensorsReader, name: str) -> Assembly:
    abstract, factors = variable.get_value(), path.endswith(".scales")
    shape = abstract.shape
    if "{expert}" not in name:
        assembly = Assembly.whole(name, shape)
    elif factors:
        assembly = Assembly.stacked([name.format(expert=expert) for expert in range(shape[0])], shape)
    else:
        assembly = Assembly.experts(name.split(".{expert}.")[0], path.split(".")[-2], shape, reader)
    if factors:
        widened = lambda tensors: assembly.build(tensors).astype(np.float32)  # noqa: E731
        return replace(assembly, build=widened, dtypes=("F32", "F8_E8M0"), fault=_fault_of_factors)
    if abstract.dtype == jnp.float8_e4m3fn:
        return replace(assembly, dtypes=("F8_E4M3",), fault=_fault_of_codes)
    return assembly


def _fault_of_codes(codes: np.ndarray) -> str | None:
    # Code by code, not as numbers: no array of floats as large as the tensor.
    broken = np.bitwise_and(codes.view(np.uint8), 0x7F).max() == 0x7F
    return "holds the code 0x7F or 0xFF, which means no number" if broken else None


def _fault_of_factors(factors: np.ndarray) -> str | None:
    return None if np.isfinite(factors.astype(np.float32)).all() else "holds a factor that is no finite number"
