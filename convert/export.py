"""The way back: models of this project as published checkpoints. Floating-point tensors are written in bfloat16."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import eagle3, gpt_oss
from convert.assembly import translate
from convert.safetensors_reader import SINGLE_FILE
from convert.safetensors_writer import write_safetensors
from ecospec_jax.checkpoint import borrowed_parameters, parameters
from ecospec_jax.config import Eagle3Config, GptOssConfig

Tensors = dict[str, np.ndarray]


def export_target(model: Any, folder: Path, *, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
    """Writes config, generation config and tensors of a target into a folder; the first EOS id is the main one."""
    config, tensors = _EXPORTS[model.config.family](model)
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


def _tensors(model: Any, names: Mapping[str, str], unnamed: Sequence[str] = ()) -> Tensors:
    """The model's own parameters under their published names."""
    left_out = {*borrowed_parameters(model.config), *unnamed}

    def stored(value: jax.Array) -> np.ndarray:
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        return np.asarray(value.astype(jnp.bfloat16) if floating else value)

    return {
        translate(path, names): stored(variable.get_value())
        for path, variable in parameters(model).items()
        if path not in left_out
    }


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
    named = _tensors(model, eagle3.NAMES, unnamed=["target_ids"])
    tensors = {name.replace("layer.", "midlayer.", 1): value for name, value in named.items()}
    target_ids = np.asarray(model.target_ids.get_value()).astype(np.int64)
    tensors["d2t"] = target_ids - np.arange(len(target_ids))
    tensors["t2d"] = np.isin(np.arange(config.vocab_size), target_ids)
    return values, tensors


_EXPORTS: dict[str, Callable[[Any], tuple[dict[str, Any], Tensors]]] = {"gpt_oss": _gpt_oss, "eagle3": _eagle3}
