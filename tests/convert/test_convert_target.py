"""Converted targets against the state dict of the transformers model they came from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convert import convert
from ecospec_jax.checkpoint import read_manifest
from ecospec_jax.config import Qwen3MoeConfig, RopeConfig
from ecospec_jax.errors import UserError
from tests.convert.stored import assert_target, expected_pieces
from tests.hf_models import TARGET, edit_json, edit_tensors, write_target


def expected(state: dict[str, torch.Tensor], config: Qwen3MoeConfig) -> dict[str, torch.Tensor]:
    """Our parameters, written out from transformers' in-memory (fused) tensors."""
    found = {"embedding.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if not config.tie_embeddings:
        found["head.weight"] = state["lm_head.weight"]
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        found[f"{ours}attention_norm.weight"] = state[f"{theirs}input_layernorm.weight"]
        found[f"{ours}mlp_norm.weight"] = state[f"{theirs}post_attention_layernorm.weight"]
        for x in "qkvo":
            found[f"{ours}attention.{x}.weight"] = state[f"{theirs}self_attn.{x}_proj.weight"]
            if config.attention_bias:
                found[f"{ours}attention.{x}.bias"] = state[f"{theirs}self_attn.{x}_proj.bias"]
        for x in "qk":
            found[f"{ours}attention.{x}_norm.weight"] = state[f"{theirs}self_attn.{x}_norm.weight"]
        if i in config.dense_layers:
            for x in ("gate", "up", "down"):
                found[f"{ours}mlp.{x}.weight"] = state[f"{theirs}mlp.{x}_proj.weight"]
        else:
            gate_up = state[f"{theirs}mlp.experts.gate_up_proj"]
            found[f"{ours}moe.router.gate.weight"] = state[f"{theirs}mlp.gate.weight"]
            found[f"{ours}moe.experts.gate.weight"] = gate_up[:, : config.moe_intermediate_size]
            found[f"{ours}moe.experts.up.weight"] = gate_up[:, config.moe_intermediate_size :]
            found[f"{ours}moe.experts.down.weight"] = state[f"{theirs}mlp.experts.down_proj"]
    return found


def assert_converted(folder: Path, state: dict[str, torch.Tensor]) -> None:
    assert_target(folder, expected(state, read_manifest(folder).target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_and_stored_dtype(tmp_path, dtype):
    model = write_target(tmp_path / "source", dtype=dtype)
    manifest = convert(tmp_path / "source", tmp_path / "out")
    assert_converted(tmp_path / "out", model.state_dict())
    stored = {tensor.dtype for piece in manifest.pieces.values() for tensor in piece.tensors.values()}
    assert stored == {str(dtype).removeprefix("torch.")}
    assert set(manifest.pieces) == expected_pieces(8, "gate", "up", "down")
    assert manifest == read_manifest(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({"mlp_only_layers": [1, 6]}, (1, 6)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4, 6, 7)),
        ({"attention_bias": True, "norm_topk_prob": False, "num_hidden_layers": 2}, ()),
        ({"tie_word_embeddings": True, "num_hidden_layers": 2}, ()),
    ],
)
def test_options(tmp_path, options, dense):
    model = write_target(tmp_path / "source", **options)
    config = convert(tmp_path / "source", tmp_path / "out").target
    assert config.dense_layers == dense
    assert config.norm_topk_prob == options.get("norm_topk_prob", True)
    assert config.tie_embeddings == options.get("tie_word_embeddings", False)
    assert_converted(tmp_path / "out", model.state_dict())


def test_fused_names_equal_per_expert_names(tmp_path):
    model = write_target(tmp_path / "source", mlp_only_layers=[1])
    separate = convert(tmp_path / "source", tmp_path / "separate")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "source/model.safetensors")
    fused = convert(tmp_path / "source", tmp_path / "fused")
    assert_converted(tmp_path / "fused", model.state_dict())
    assert fused.source_hash == separate.source_hash


def test_both_config_dialects_give_the_same_config(tmp_path, target_source):
    file = target_source / "config.json"
    assert "num_experts" not in json.loads(file.read_text())  # or this test compares a dialect with itself
    modern = convert(target_source, tmp_path / "modern").target
    edit_json(
        file,
        num_local_experts=...,
        num_experts=7,
        rope_parameters=...,
        rope_theta=5000.0,
        rope_scaling=None,
        dtype=...,
        torch_dtype="float32",
    )
    assert convert(target_source, tmp_path / "hub").target == modern
    assert modern == Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=24,
        num_layers=8,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=44,
        moe_intermediate_size=18,
        num_experts=7,
        experts_per_token=3,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=5000.0),
        max_positions=512,
    )


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(5000.0, "linear", 2.0)),
        (
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "truncate": False, "mscale": None},
            RopeConfig(5000.0, "yarn", 4.0, 128, truncate=False),
        ),
        (
            {
                "type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
            },
            RopeConfig(5000.0, "llama3", 8.0, 64, 2.0, 3.0),
        ),
    ],
)
def test_rope_dialects(tmp_path, target_source, scaling, rope, type_key):
    kind = scaling["type"]
    scaling = {type_key: kind} | {key: value for key, value in scaling.items() if key != "type"}
    edit_json(target_source / "config.json", rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling)
    assert convert(target_source, tmp_path / "hub").target.rope == rope
    edit_json(
        target_source / "config.json",
        rope_theta=...,
        rope_scaling=...,
        rope_parameters=scaling | {"rope_theta": 5000.0},
    )
    assert convert(target_source, tmp_path / "modern").target.rope == rope


def test_sharded_index(tmp_path):
    model = write_target(tmp_path / "source")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    sharded = convert(tmp_path / "sharded", tmp_path / "out")
    assert_converted(tmp_path / "out", model.state_dict())
    assert sharded.source_hash == convert(tmp_path / "source", tmp_path / "single").source_hash


def test_redundant_tied_head(tmp_path):
    model = write_target(tmp_path / "source", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "source/model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path / "source", {"lm_head.weight": embedding.clone()})
    convert(tmp_path / "source", tmp_path / "out")
    assert_converted(tmp_path / "out", model.state_dict())
    embedding[-1, -1] += 1
    edit_tensors(tmp_path / "source", {"lm_head.weight": embedding})
    with pytest.raises(UserError, match="model.safetensors: tensor lm_head.weight differs from model.embed_tokens"):
        convert(tmp_path / "source", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [({"eos_token_id": 9}, 5, (9,)), ({"eos_token_id": [9, 11]}, 5, (9, 11)), ({}, [5, 6], (5, 6)), (None, 5, (5,))],
)
def test_eos_ids(tmp_path, target_source, generation, config, ids):
    file = target_source / "generation_config.json"
    file.unlink() if generation is None else file.write_text(json.dumps(generation))
    edit_json(target_source / "config.json", eos_token_id=config)
    assert convert(target_source, tmp_path / "out").eos_token_ids == ids


def test_dimensions_are_unequal():
    sizes = [value for value in TARGET.values() if type(value) is int]
    assert len(set(sizes)) == len(sizes)
