"""The way back: models of this project as published checkpoints.

Floating-point tensors are written in bfloat16 but for those that have a dtype of their own, such as FP8 codes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert import deepseek_v3, eagle3, gpt_oss
from convert.assembly import translate
from convert.safetensors_reader import SINGLE_FILE
from convert.safetensors_writer import write_safetensors
from ecospec_jax.checkpoint import borrowed_parameters, parameters, published_dtypes
from ecospec_jax.config import DeepseekV3Config, Eagle3Config, GptOssConfig

Tensors = dict[str, np.ndarray]


def export_target(
    model: Any, folder: Path, *, eos_token_ids: Sequence[int], pad_token_id: int, mtp: Any = None
) -> None:
    """Writes config, generation config and tensors of a target into a folder; the first EOS id is the main one.

    `mtp` is the MTP module that belongs to a DeepSeek-V3 target: the layer behind its last.
    """
    config, tensors = _EXPORTS[model.config.family](model)
    if mtp is not None:
        config |= {"num_nextn_predict_layers": 1}
        tensors |= _deepseek_v3_tensors(mtp, mtp_layer=model.config.num_layers)
    tokens = {"eos_token_id": eos_token_ids[0], "pad_token_id": pad_token_id}
    _write(folder, {**config, **tokens}, tensors)
    generation = {**tokens, "eos_token_id": list(eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def export_drafter(model: Any, folder: Path) -> None:
    """Writes config and tensors of a drafter into a folder, without those it borrows from its target."""
    _write(folder, *_EXPORTS[model.config.family](model))


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_safetensors(folder / SINGLE_FILE, tensors)


def _parameters(model: Any) -> Tensors:
    """The model's own parameters, by path, in the dtypes they are published in."""
    dtypes, borrowed = published_dtypes(model.config), borrowed_parameters(model.config)
    return {
        path: np.asarray(variable.get_value().astype(dtypes[path]))
        for path, variable in parameters(model).items()
        if path not in borrowed
    }


def _tensors(model: Any, names: Mapping[str, str]) -> Tensors:
    """The same under their published names."""
    return {translate(path, names): value for path, value in _parameters(model).items()}


def _gpt_oss(model: Any) -> tuple[dict[str, Any], Tensors]:
    config: GptOssConfig = model.config
    if config.expert_storage != "mxfp4" or config.rope.kind != "yarn":
        raise ValueError("gpt-oss is published with mxfp4 experts and yarn rope")
    rope = config.rope
    values = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "experts_per_token": config.experts_per_token,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initial_context_length": rope.original_max_positions,
        "intermediate_size": config.moe_intermediate_size,
        "layer_types": [
            "sliding_attention" if layer in config.sliding_layers else "full_attention"
            for layer in range(config.num_layers)
        ],
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_local_experts": config.num_experts,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        },
        "rope_theta": rope.theta,
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }
    return values, _tensors(model, gpt_oss.NAMES)


def _eagle3(model: Any) -> tuple[dict[str, Any], Tensors]:
    """As SpecForge writes it, whose auxiliary layers are those that the boundaries lie behind."""
    config: Eagle3Config = model.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in config.boundaries],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
    }
    own = _parameters(model)
    target_ids = own.pop("target_ids").astype(np.int64)
    tensors = {translate(path, eagle3.NAMES).replace("layer.", "midlayer.", 1): value for path, value in own.items()}
    tensors["d2t"] = target_ids - np.arange(len(target_ids))
    tensors["t2d"] = np.isin(np.arange(config.vocab_size), target_ids)
    return values, tensors


def _deepseek_v3(model: Any) -> tuple[dict[str, Any], Tensors]:
    config: DeepseekV3Config = model.config
    rope = config.rope
    if config.storage != "fp8" or rope.kind != "yarn":
        raise ValueError("DeepSeek-V3 is published with fp8 matrices and yarn rope")
    values = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "first_k_dense_replace": config.first_sparse_layer,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": config.kv_lora_rank,
        "max_position_embeddings": config.max_positions,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": config.groups,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_experts,
        "norm_topk_prob": config.norm_topk_prob,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "quantization_config": deepseek_v3.QUANTISATION,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": {
            "type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        },
        "rope_theta": rope.theta,
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": config.tie_embeddings,
        "topk_group": config.groups_per_token,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
    }
    return values, _deepseek_v3_tensors(model)


def _deepseek_v3_tensors(model: Any, mtp_layer: int | None = None) -> Tensors:
    """Every expert is a tensor of its own."""
    tensors = {}
    for path, value in _parameters(model).items():
        name = deepseek_v3.tensor_name(path, mtp_layer)
        one_by_one = "{expert}" in name
        tensors |= {name.format(expert=i): part for i, part in enumerate(value)} if one_by_one else {name: value}
    return tensors


_EXPORTS: dict[str, Callable[[Any], tuple[dict[str, Any], Tensors]]] = {
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "eagle3": _eagle3,
}
