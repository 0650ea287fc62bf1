"""Small random DeepSeek-V3 checkpoints as published: sharded, FP8, an expert a tensor, the MTP module as last layer.

No two dimensions are equal, and several are no multiples of the blocks of 128.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 71,
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 136,
    "kv_lora_rank": 132,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "intermediate_size": 150,
    "moe_intermediate_size": 144,
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}
ALIGNED = CONFIG | {  # whatever has more than one block is a multiple of it, as transformers' own FP8 loading needs
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 116,
    "kv_lora_rank": 104,
    "v_head_dim": 18,
    "intermediate_size": 384,
    "moe_intermediate_size": 88,
    "n_shared_experts": 1,
}
MTP = "model.layers.3."
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def layer_matrices(config: dict[str, Any], layer: int) -> dict[str, tuple[int, int]]:
    """The quantised matrices of a decoder layer, without its prefix; the layer behind the last is the MTP module's."""
    hidden, heads, queries, latent, plain, rotary, value = (
        config[key]
        for key in (
            "hidden_size",
            "num_attention_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    )
    matrices = {
        "self_attn.q_a_proj": (queries, hidden),
        "self_attn.q_b_proj": (heads * (plain + rotary), queries),
        "self_attn.kv_a_proj_with_mqa": (latent + rotary, hidden),
        "self_attn.kv_b_proj": (heads * (plain + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }
    mlps, inner = {"mlp.": config["intermediate_size"]}, config["moe_intermediate_size"]
    if layer >= config["first_k_dense_replace"]:
        mlps = {f"mlp.experts.{expert}.": inner for expert in range(config["n_routed_experts"])}
        mlps["mlp.shared_experts."] = config["n_shared_experts"] * inner
    for mlp, width in mlps.items():
        matrices |= {f"{mlp}{kind}_proj": (width, hidden) for kind in ("gate", "up")}
        matrices[f"{mlp}down_proj"] = (hidden, width)
    return matrices


def blocks(shape: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a matrix has along each axis."""
    return -(-shape[0] // 128), -(-shape[1] // 128)


def published(config: dict[str, Any] = CONFIG, *, seed: int = 0, quantised: bool = True) -> Tensors:
    """All tensors of target and MTP module, whose embedding and head are copies; factors are arbitrary numbers."""
    generator = torch.Generator().manual_seed(seed)
    vocab, hidden, experts = (config[key] for key in ("vocab_size", "hidden_size", "n_routed_experts"))

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        return deviation * torch.randn(shape, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return (1 + normal(size, deviation=0.3)).bfloat16()

    tensors: Tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden).bfloat16(),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": normal(vocab, hidden, deviation=0.1).bfloat16(),
    }
    for layer in range(config["num_hidden_layers"] + 1):
        prefix = f"model.layers.{layer}."
        for name, shape in layer_matrices(config, layer).items():
            if quantised:
                tensors[f"{prefix}{name}.weight"] = normal(*shape).to(torch.float8_e4m3fn)
                factors = (1 + torch.rand(blocks(shape), generator=generator)) * 0.6 * shape[1] ** -0.5
                tensors[f"{prefix}{name}.weight_scale_inv"] = factors
            else:
                tensors[f"{prefix}{name}.weight"] = normal(*shape, deviation=shape[1] ** -0.5).bfloat16()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm(hidden)
        tensors[f"{prefix}self_attn.q_a_layernorm.weight"] = norm(config["q_lora_rank"])
        tensors[f"{prefix}self_attn.kv_a_layernorm.weight"] = norm(config["kv_lora_rank"])
        if layer >= config["first_k_dense_replace"]:
            tensors[f"{prefix}mlp.gate.weight"] = normal(experts, hidden, deviation=0.1).bfloat16()
            tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = normal(experts, deviation=0.3)
    mtp = f"model.layers.{config['num_hidden_layers']}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{mtp}{name}.weight"] = norm(hidden)
    tensors[f"{mtp}eh_proj.weight"] = normal(hidden, 2 * hidden, deviation=(2 * hidden) ** -0.5).bfloat16()
    tensors[f"{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def rounded_factors(tensors: Tensors) -> Tensors:
    """The same with powers of two as factors."""
    return tensors | {
        name: torch.exp2(torch.round(torch.log2(tensor)))
        for name, tensor in tensors.items()
        if name.endswith("_scale_inv")
    }


def write_sharded(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    """Three shards, a matrix and its factors mostly in different ones, and the index."""
    folder.mkdir(parents=True)
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {name: names[place % 3] for place, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensor for name, tensor in tensors.items() if index[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_sharded(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds (to the first shard) or, with None, removes tensors."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, tensor in edit.items():
        shard = index.setdefault(name, min(index.values()))
        kept = {other: value for other, value in load_file(folder / shard).items() if other != name}
        save_file(kept if tensor is None else kept | {name: tensor}, folder / shard)
        if tensor is None:
            del index[name]
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def write_nextn(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    """The MTP module alone, as sglang's script exports it: renumbered to layer 0, without embedding and head."""
    left_out = (f"{MTP}embed_tokens.weight", f"{MTP}shared_head.head.weight")
    module = {
        name.replace(MTP, "model.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith(MTP) and name not in left_out
    }
    folder.mkdir(parents=True)
    file = "nextn_layer_parameters.safetensors"
    save_file(module, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(module, file)}))
    changed = {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder
