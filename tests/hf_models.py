"""Small random checkpoints in Hugging Face layouts; no two dimensions are equal, so that a mix-up cannot pass."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TARGET = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "moe_intermediate_size": 18,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "eos_token_id": 5,
}
DRAFTER = {
    "hidden_size": 24,  # the target's: it borrows the embedding
    "intermediate_size": 46,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "vocab_size": 67,
    "draft_vocab_size": 31,
    "rms_norm_eps": 1e-5,
    "rope_theta": 700.0,
    "hidden_act": "silu",
}


def write_target(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> Qwen3MoeForCausalLM:
    """Saves a random Qwen3-MoE (per-expert names, transformers 5 config) and returns it; norms are random too."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(TARGET | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1.0)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def drafter_tensors(
    layer: str = "midlayer.",
    *,
    boundaries: int = 3,
    target_hidden: int = 24,
    own_embedding: bool = False,
    own_head: bool = True,
    seed: int = 1,
    config: dict[str, Any] = DRAFTER,
) -> dict[str, torch.Tensor]:
    """Random tensors of an EAGLE-3 head whose layer has the given prefix; `d2t` leaves gaps, `t2d` agrees with it."""
    torch.manual_seed(seed)
    hidden, inner, vocab, draft = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc.weight": (hidden, boundaries * target_hidden),
        "norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (q, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, q),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }
    shapes |= {"embed_tokens.weight": (vocab, hidden)} if own_embedding else {}
    shapes |= {"lm_head.weight": (draft, hidden)} if own_head else {}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    if draft < vocab:
        target_ids = torch.sort(torch.randperm(vocab)[:draft]).values
        tensors["d2t"] = target_ids - torch.arange(draft)
        tensors["t2d"] = torch.isin(torch.arange(vocab), target_ids)
    return tensors


def write_drafter(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = DRAFTER) -> Path:
    """Saves an EAGLE-3 head."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of `model.safetensors`."""
    tensors = load_file(folder / "model.safetensors") | edit
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def edit_json(file: Path, **edit: Any) -> None:
    """Sets keys of a JSON file, or removes those set to `...`."""
    values = json.loads(file.read_text()) | edit
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
