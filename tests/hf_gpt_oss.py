"""Small random gpt-oss checkpoints in every published layout; no two dimensions are equal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.hf_models import edit_json

TARGET = {
    "vocab_size": 71,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 96,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 900.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": 9,
}
QUANTISATION = {  # as published
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
ORIGINAL_CONFIG = {  # of OpenAI's layout
    "num_hidden_layers": 4,
    "num_experts": 5,
    "experts_per_token": 3,
    "vocab_size": 71,
    "hidden_size": 64,
    "intermediate_size": 96,
    "swiglu_limit": 1.5,
    "head_dim": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "sliding_window": 7,
    "initial_context_length": 32,
    "rope_theta": 900,
    "rope_scaling_factor": 4.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}


def write_plain(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> GptOssForCausalLM:
    """Saves a random model with plain experts and returns it; every parameter is random."""
    model = GptOssForCausalLM(GptOssConfig(**(TARGET | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def random_blocks(rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random MXFP4 codes and scales of all experts' `[rows, columns]` matrices."""
    groups = (TARGET["num_local_experts"], rows, columns // 32)
    return {
        "blocks": torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8),
        "scales": torch.randint(118, 126, groups, generator=generator, dtype=torch.uint8),
    }


def write_mxfp4(folder: Path, *, seed: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    """Saves a random model with quantised experts, as published in names and config; returns its tensors."""
    write_plain(folder, seed=seed, **config)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = TARGET["hidden_size"], TARGET["intermediate_size"]
    for layer in range(TARGET["num_hidden_layers"]):
        for kind, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
            name = f"model.layers.{layer}.mlp.experts.{kind}"
            del tensors[name]
            tensors |= {f"{name}_{part}": value for part, value in random_blocks(*shape, generator).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rope = {key: value for key, value in TARGET["rope_parameters"].items() if key != "rope_theta"}
    edit_json(
        folder / "config.json",
        quantization_config=QUANTISATION,
        rope_parameters=...,
        rope_theta=900.0,
        rope_scaling=rope,
        experts_per_token=3,
        initial_context_length=32,
    )
    return tensors


def write_original(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Saves the tensors of `write_mxfp4` in OpenAI's own layout."""
    renamed = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
    }
    for layer in range(TARGET["num_hidden_layers"]):
        theirs, block = f"model.layers.{layer}.", f"block.{layer}."
        renamed[f"{block}attn.norm.scale"] = tensors[f"{theirs}input_layernorm.weight"]
        renamed[f"{block}mlp.norm.scale"] = tensors[f"{theirs}post_attention_layernorm.weight"]
        renamed[f"{block}attn.sinks"] = tensors[f"{theirs}self_attn.sinks"]
        for part in ("weight", "bias"):
            renamed[f"{block}attn.qkv.{part}"] = torch.cat(
                [tensors[f"{theirs}self_attn.{x}_proj.{part}"] for x in "qkv"]
            )
            renamed[f"{block}attn.out.{part}"] = tensors[f"{theirs}self_attn.o_proj.{part}"]
            renamed[f"{block}mlp.gate.{part}"] = tensors[f"{theirs}mlp.router.{part}"]
        for number, kind in (("1", "gate_up_proj"), ("2", "down_proj")):
            for part in ("blocks", "scales"):
                renamed[f"{block}mlp.mlp{number}_weight.{part}"] = tensors[f"{theirs}mlp.experts.{kind}_{part}"]
            renamed[f"{block}mlp.mlp{number}_bias"] = tensors[f"{theirs}mlp.experts.{kind}_bias"]
    folder.mkdir(parents=True)
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    return folder
