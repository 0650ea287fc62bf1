"""Converted DeepSeek-V3 targets and MTP modules against the tensors they came from, and against transformers."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3ForCausalLM

from convert import convert
from ecospec_jax import Decoder
from ecospec_jax.checkpoint import load_drafter, load_target, parameters, read_manifest
from ecospec_jax.config import DeepseekV3Config, MtpConfig, RopeConfig
from ecospec_jax.errors import UserError
from tests.convert.stored import assert_stored, assert_target
from tests.hf_deepseek_v3 import (
    ALIGNED,
    CONFIG,
    INDEX,
    MTP,
    Tensors,
    edit_sharded,
    published,
    rounded_factors,
    write_nextn,
    write_sharded,
)
from tests.hf_models import edit_json
from tests.parity.compare import assert_close
from tests.parity.torch_deepseek_v3 import random_model

ROOT = Path(__file__).parents[2]
OURS = DeepseekV3Config(
    vocab_size=71,
    hidden_size=160,
    num_layers=3,
    num_heads=5,
    q_lora_rank=136,
    kv_lora_rank=132,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=14,
    intermediate_size=150,
    moe_intermediate_size=144,
    num_experts=6,
    experts_per_token=4,
    shared_experts=2,
    groups=3,
    groups_per_token=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_sparse_layer=1,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0, "yarn", 40.0, 32, mscale=1.0, mscale_all_dim=1.0),
    max_positions=256,
    storage="fp8",
)


def expected_layer(tensors: Mapping[str, torch.Tensor], theirs: str, ours: str, *, sparse: bool) -> Tensors:
    """The parameters of a decoder layer, written out from per-expert tensors."""
    found = {
        f"{ours}attention_norm.weight": tensors[f"{theirs}input_layernorm.weight"],
        f"{ours}mlp_norm.weight": tensors[f"{theirs}post_attention_layernorm.weight"],
        f"{ours}attention.q_a_norm.weight": tensors[f"{theirs}self_attn.q_a_layernorm.weight"],
        f"{ours}attention.kv_a_norm.weight": tensors[f"{theirs}self_attn.kv_a_layernorm.weight"],
    }
    parts = {"weight": "weight", "scales": "weight_scale_inv"}
    if f"{theirs}self_attn.o_proj.weight_scale_inv" not in tensors:
        del parts["scales"]
    for mine, part in parts.items():
        for name, projection in (
            ("q_a", "q_a_proj"),
            ("q_b", "q_b_proj"),
            ("kv_a", "kv_a_proj_with_mqa"),
            ("kv_b", "kv_b_proj"),
            ("o", "o_proj"),
        ):
            found[f"{ours}attention.{name}.{mine}"] = tensors[f"{theirs}self_attn.{projection}.{part}"]
        for kind in ("gate", "up", "down"):
            mlp, shared = f"{theirs}mlp.", f"{theirs}mlp.shared_experts."
            if not sparse:
                found[f"{ours}mlp.{kind}.{mine}"] = tensors[f"{mlp}{kind}_proj.{part}"]
                continue
            found[f"{ours}moe.shared.{kind}.{mine}"] = tensors[f"{shared}{kind}_proj.{part}"]
            experts = [tensors[f"{mlp}experts.{expert}.{kind}_proj.{part}"] for expert in range(6)]
            bits = torch.stack([expert.view(torch.uint8) for expert in experts])  # torch cannot stack float8
            found[f"{ours}moe.experts.{kind}.{mine}"] = bits.view(experts[0].dtype)
    if sparse:
        found[f"{ours}moe.router.gate.weight"] = tensors[f"{theirs}mlp.gate.weight"]
        found[f"{ours}moe.router.bias"] = tensors[f"{theirs}mlp.gate.e_score_correction_bias"]
    return found


def expected_target(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """All parameters of the target."""
    found = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "head.weight": tensors["lm_head.weight"],
    }
    for layer in range(3):
        found |= expected_layer(tensors, f"model.layers.{layer}.", f"layers.{layer}.", sparse=layer > 0)
    return found


def expected_mtp(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """All parameters of the MTP module."""
    return expected_layer(tensors, MTP, "layer.", sparse=True) | {
        "embedding.weight": tensors[f"{MTP}embed_tokens.weight"],
        "embedding_norm.weight": tensors[f"{MTP}enorm.weight"],
        "hidden_norm.weight": tensors[f"{MTP}hnorm.weight"],
        "join.weight": tensors[f"{MTP}eh_proj.weight"],
        "norm.weight": tensors[f"{MTP}shared_head.norm.weight"],
        "head.weight": tensors[f"{MTP}shared_head.head.weight"],
    }


def assert_drafter(folder: Path, tensors: Mapping[str, torch.Tensor], target_folder: Path | None = None) -> None:
    """The folder's drafter has exactly these parameters, borrowed ones included."""
    manifest, dtype = read_manifest(folder), jnp.dtype(jnp.float32)
    lender = target_folder or folder
    target = load_target(lender, read_manifest(lender), dtype)
    assert_stored(parameters(load_drafter(folder, manifest, dtype, target)), expected_mtp(tensors))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """`source`, and `converted` from it with its MTP module."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    source = write_sharded(folder / "source", published())
    convert(source, folder / "converted", drafter=source)
    return folder


@pytest.fixture
def source(pristine, tmp_path) -> Path:
    """The published layout, for the test to edit."""
    return Path(shutil.copytree(pristine / "source", tmp_path / "source"))


def test_published_layout_is_kept_byte_for_byte(pristine):
    assert_target(pristine / "converted", expected_target(published()))
    assert_drafter(pristine / "converted", published())
    manifest = read_manifest(pristine / "converted")
    assert manifest.target == OURS
    assert manifest.drafter == MtpConfig(OURS)
    tensors = {path: t for piece in manifest.pieces.values() for path, t in piece.tensors.items()}
    for path, tensor in tensors.items():
        wide = path.endswith((".scales", ".router.bias"))
        small = path.endswith(("norm.weight", "router.gate.weight")) or path in (
            "embedding.weight",
            "head.weight",
            "join.weight",
        )
        assert tensor.dtype == ("float32" if wide else "bfloat16" if small else "float8_e4m3fn"), path


def test_experts_are_pieces_of_their_own(pristine):
    """So that no decoder layer has to be in memory as a whole."""
    pieces = read_manifest(pristine / "converted").pieces
    experts = {f"moe.experts.{kind}" for kind in ("gate", "up", "down")}
    assert pieces.keys() == {
        "target/top",
        "drafter/top",
        *(f"target/layers.{layer}" for layer in range(3)),
        *(f"target/layers.{layer}.{matrix}" for layer in (1, 2) for matrix in experts),
        *(f"drafter/layer.{matrix}" for matrix in experts),
    }
    assert pieces["target/layers.1.moe.experts.up"].tensors.keys() == {
        "layers.1.moe.experts.up.weight",
        "layers.1.moe.experts.up.scales",
    }


def test_target_alone_skips_its_mtp_module(pristine, source, tmp_path):
    alone = convert(source, tmp_path / "alone")
    assert alone.drafter is None
    assert alone.target_hash == read_manifest(pristine / "converted").target_hash
    with pytest.raises(UserError, match=re.escape(f"tensor {MTP}mlp.extra.weight has no place in deepseek_v3")):
        edit_sharded(source, {f"{MTP}mlp.extra.weight": torch.ones(3)})
        convert(source, tmp_path / "other")


def test_mtp_module_for_a_target_that_was_converted_before(pristine, tmp_path):
    """The target's tensors are not at hand to compare with, so the module keeps its copies."""
    manifest = convert(pristine / "converted", tmp_path / "mtp", drafter=pristine / "source")
    assert manifest.drafter == MtpConfig(OURS, own_embedding=True, own_head=True)
    assert_drafter(tmp_path / "mtp", published(), target_folder=pristine / "converted")


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_copies_that_differ_are_kept(source, tmp_path, name):
    tensors = published()
    tensors[f"{MTP}{name}.weight"][-1, -1] += 1
    edit_sharded(source, {f"{MTP}{name}.weight": tensors[f"{MTP}{name}.weight"]})
    manifest = convert(source, tmp_path / "out", drafter=source)
    assert manifest.drafter == MtpConfig(OURS, own_embedding=name == "embed_tokens", own_head=name != "embed_tokens")
    assert_drafter(tmp_path / "out", tensors)


def test_module_that_was_exported_alone(pristine, source, tmp_path):
    """Layer 0 of a folder whose config counts one layer, without embedding and head."""
    nextn = write_nextn(tmp_path / "nextn", published())
    manifest = convert(source, tmp_path / "out", drafter=nextn)
    assert manifest.drafter == read_manifest(pristine / "converted").drafter
    assert manifest.drafter_hash == read_manifest(pristine / "converted").drafter_hash
    assert_drafter(tmp_path / "out", published())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_checkpoint_without_quantisation(tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in published(quantised=False).items()}
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    source = write_sharded(tmp_path / "source", tensors, config)
    manifest = convert(source, tmp_path / "out", drafter=source)
    assert manifest.target == replace(OURS, storage="plain")
    assert_target(tmp_path / "out", expected_target(tensors))
    assert_drafter(tmp_path / "out", tensors)


def test_factors_of_one_byte(source, tmp_path):
    """E8M0: powers of two, told by the dtype."""
    tensors = rounded_factors(published())
    one_byte = {n: t.to(torch.float8_e8m0fnu) for n, t in tensors.items() if n.endswith("_scale_inv")}
    edit_sharded(source, one_byte)
    convert(source, tmp_path / "out", drafter=source)
    assert_target(tmp_path / "out", expected_target(tensors))
    assert_drafter(tmp_path / "out", tensors)


@pytest.mark.parametrize("fused", [False, True])
def test_logits_and_names_of_transformers_5(tmp_path, fused):
    """Saved by transformers (its config, expert by expert), and with its names in memory (fused)."""
    model = random_model(seed=3)
    model.config.eos_token_id = 9
    model.save_pretrained(tmp_path / "source")
    if fused:
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, tmp_path / "source/model.safetensors")
    convert(tmp_path / "source", tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 97, 11).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert_close(Decoder.load(tmp_path / "out", dtype="float32").next_token_logits(ids), logits.numpy())


@pytest.mark.parametrize(
    "edit",
    [
        {
            "rope_scaling": ...,
            "rope_theta": ...,
            "rope_parameters": CONFIG["rope_scaling"] | {"type": ..., "rope_type": "yarn", "rope_theta": 1e4},
            "n_routed_experts": ...,
            "num_local_experts": 6,
            "num_nextn_predict_layers": ...,
            "num_mtp_layers": 1,
            "qk_head_dim": 20,
            "head_dim": 8,
            "rope_interleave": True,
        },
        {"moe_layer_freq": ..., "scoring_func": ..., "topk_method": ..., "hidden_act": ..., "attention_bias": ...},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "float"}},
    ],
)
def test_spellings_of_the_same_config(source, tmp_path, edit):
    if "rope_parameters" in edit:
        edit["rope_parameters"] = {k: v for k, v in edit["rope_parameters"].items() if v is not ...}
    edit_json(source / "config.json", **edit)
    manifest = convert(source, tmp_path / "out", drafter=source)
    assert manifest.target == OURS
    assert manifest.drafter == MtpConfig(OURS)


def test_logits_equal_those_of_transformers_own_fp8_loading(tmp_path):
    """Only for factors that are powers of two and aligned shapes: else transformers rounds, or takes other blocks."""
    tensors = rounded_factors(published(ALIGNED, seed=4))
    source = write_sharded(tmp_path / "source", tensors, ALIGNED)
    model = DeepseekV3ForCausalLM.from_pretrained(source).float()
    convert(source, tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 71, 13).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert_close(Decoder.load(tmp_path / "out", dtype="float32").next_token_logits(ids), logits.numpy())


def test_command_line(pristine, tmp_path):
    source, out = pristine / "source", tmp_path / "out"
    command = [sys.executable, "-m", "convert", str(source), str(out), "--drafter", str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_manifest(out).source_hash == read_manifest(pristine / "converted").source_hash


def changed(name: str, at: tuple[int, ...], byte: int) -> torch.Tensor:
    """A published tensor of codes with another byte at a place."""
    codes = published()[name].view(torch.uint8).clone()
    codes[at] = byte
    return codes.view(torch.float8_e4m3fn)


EXPERT, KV_A = "model.layers.2.mlp.experts.4.up_proj.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
FACTORS = f"{KV_A}_scale_inv"
BAD_TENSORS = {
    "code 0x7F": ({EXPERT: changed(EXPERT, (-1, -1), 0x7F)}, f"tensor {EXPERT} holds the code 0x7F or 0xFF, which"),
    "code 0xFF": ({KV_A: changed(KV_A, (0, 3), 0xFF)}, f"tensor {KV_A} holds the code 0x7F or 0xFF, which means"),
    "factor": ({FACTORS: torch.full((2, 2), torch.inf)}, f"tensor {FACTORS} holds a factor that is no finite number"),
    "grid": ({FACTORS: torch.ones(1, 2)}, f"tensor {FACTORS} has shape (1, 2), not (2, 2)"),
    "grid of an expert": (
        {f"{EXPERT}_scale_inv": torch.ones(2, 1)},
        f"tensor {EXPERT}_scale_inv has shape (2, 1), not (2, 2)",
    ),
    "no factors": ({FACTORS: None}, f"tensor {FACTORS} is missing"),
    "dtype of factors": (
        {FACTORS: torch.ones(2, 2).bfloat16()},
        f"tensor {FACTORS} has dtype BF16, not F32 or F8_E8M0",
    ),
    "mixed factors": (
        {f"{EXPERT}_scale_inv": torch.ones(2, 2).to(torch.float8_e8m0fnu)},
        f"tensor {EXPERT}_scale_inv has another dtype than model.layers.2.mlp.experts.0.up_proj.weight_scale_inv",
    ),
    "not quantised": ({KV_A: torch.ones(140, 160).bfloat16()}, f"tensor {KV_A} has dtype BF16, not F8_E4M3"),
    "other codes": (
        {KV_A: torch.ones(140, 160).to(torch.float8_e5m2)},
        f"tensor {KV_A} has dtype F8_E5M2, not F8_E4M3",
    ),
    "no bias": ({BIAS: None}, f"tensor {BIAS} is missing"),
    "too many experts": (
        {EXPERT.replace(".4.", ".6."): torch.ones(144, 160).to(torch.float8_e4m3fn)},
        f"tensor {EXPERT.replace('.4.', '.6.')} has no place in deepseek_v3",
    ),
    "a layer behind the MTP module": (
        {"model.layers.4.enorm.weight": torch.ones(160).bfloat16()},
        "tensor model.layers.4.enorm.weight has no place in deepseek_v3",
    ),
}
BAD_MTP = {
    "absent": ({f"{MTP}eh_proj.weight": None}, f"{INDEX}: no MTP module: tensor {MTP}eh_proj.weight is missing"),
    "part of it absent": ({f"{MTP}hnorm.weight": None}, f"{INDEX}: tensor {MTP}hnorm.weight is missing"),
    "halves": (
        {f"{MTP}eh_proj.weight": torch.ones(160, 319).bfloat16()},
        f"tensor {MTP}eh_proj.weight has shape (160, 319), not (160, 320)",
    ),
    "code": (
        {f"{MTP}self_attn.o_proj.weight": changed(f"{MTP}self_attn.o_proj.weight", (2, 2), 0x7F)},
        f"tensor {MTP}self_attn.o_proj.weight holds the code",
    ),
}
QUANTISATION = CONFIG["quantization_config"]
BAD_CONFIG = {
    "topk_method": ({"topk_method": "group_limited_greedy"}, "topk_method: 'group_limited_greedy' is not supported"),
    "scoring_func": ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported, only 'sigmoid'"),
    "every layer": ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported, only 1"),
    "half-split rope": ({"rope_interleave": False}, "rope_interleave: False is not supported, only True"),
    "grouped heads": ({"num_key_value_heads": 1}, "num_key_value_heads: 1 is not supported, only 5"),
    "query without a latent": ({"q_lora_rank": None}, "q_lora_rank: missing"),
    "no first_k_dense_replace": ({"first_k_dense_replace": ...}, "first_k_dense_replace: missing"),
    "all dense": ({"first_k_dense_replace": 3}, "first_sparse_layer 3 is not in 0..2"),
    "groups": ({"n_group": 4}, "6 experts do not form 4 groups"),
    "experts": ({"num_local_experts": 5}, "num_local_experts: 5 contradicts n_routed_experts"),
    "method": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method: 'gptq' is not"),
    "blocks": (
        {"quantization_config": QUANTISATION | {"weight_block_size": [64, 128]}},
        "quantization_config.weight_block_size: [64, 128] is not supported, only [128, 128]",
    ),
    "no blocks": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.weight_block_size: missing",
    ),
    "codes": (
        {"quantization_config": QUANTISATION | {"fmt": "e5m2"}},
        "quantization_config.fmt: 'e5m2' is not supported, only 'e4m3'",
    ),
    "static": (
        {"quantization_config": QUANTISATION | {"activation_scheme": "static"}},
        "quantization_config.activation_scheme: 'static' is not supported",
    ),
    "scale format": (
        {"quantization_config": QUANTISATION | {"scale_fmt": "e4m3"}},
        "quantization_config.scale_fmt: 'e4m3' is not supported, only float, ue8m0",
    ),
    "unknown key": (
        {"quantization_config": QUANTISATION | {"group_size": 32}},
        "quantization_config.group_size: not known for quant_method 'fp8'",
    ),
}


def assert_refused(source: Path, message: str, drafter: Path | None = None) -> None:
    """One line that names the file once; nothing stays behind."""
    with pytest.raises(UserError, match=re.escape(message)) as error:
        convert(source, source.parent / "out", drafter=drafter)
    assert str(error.value).count(str(source.parent)) == 1 and "\n" not in str(error.value)
    assert not list(source.parent.glob("out*"))


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_refused(source, case):
    tensors, message = BAD_TENSORS[case]
    edit_sharded(source, tensors)
    assert_refused(source, message)


@pytest.mark.parametrize("case", BAD_MTP)
def test_bad_mtp_modules_are_refused(source, case):
    tensors, message = BAD_MTP[case]
    edit_sharded(source, tensors)
    assert_refused(source, message, drafter=source)


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_configs_are_refused(source, case):
    config, message = BAD_CONFIG[case]
    edit_json(source / "config.json", **config)
    assert_refused(source, f"config.json: {message}")


def test_mtp_modules_that_do_not_fit(source, target_source, tmp_path):
    assert_refused(
        target_source, "config.json: an MTP module drafts for deepseek_v3 targets only, not for qwen3_moe", source
    )
    nextn = write_nextn(tmp_path / "nextn", published())
    edit_json(nextn / "config.json", vocab_size=70)
    assert_refused(source, "config.json: vocab_size: 70, but the target's is 71", nextn)
    edit_json(nextn / "config.json", vocab_size=71, num_nextn_predict_layers=2)
    assert_refused(source, "config.json: num_nextn_predict_layers: 2 is not supported, only 1", nextn)
    with pytest.raises(UserError, match="config.json: an MTP module, for which an auxiliary offset means nothing"):
        convert(source, tmp_path / "out", drafter=source, aux_offset=1)


def test_index_and_dimensions(pristine):
    weight_map = json.loads((pristine / "source" / INDEX).read_text())["weight_map"]
    assert weight_map[KV_A] != weight_map[FACTORS]  # a matrix and its factors come from different files
    for config in (CONFIG, ALIGNED):
        named = [
            value
            for key, value in config.items()
            if key.endswith(("size", "dim", "rank", "attention_heads", "experts")) and key != "n_shared_experts"
        ]
        assert len(set(named)) == len(named)
