"""Converted gpt-oss targets of every layout against the tensors they came from, and transformers' reading of them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from convert import convert
from ecospec_jax import Decoder
from ecospec_jax.checkpoint import load_target, read_manifest
from ecospec_jax.config import FINAL, GptOssConfig, RopeConfig
from ecospec_jax.errors import UserError
from ecospec_jax.tokenizer import Tokenizer
from tests.convert.stored import assert_target, expected_pieces
from tests.hf_gpt_oss import QUANTISATION, TARGET, write_mxfp4, write_original, write_plain
from tests.hf_models import DRAFTER, drafter_tensors, edit_json, edit_tensors, write_drafter
from tests.parity.compare import assert_close
from tests.test_tokenizer import ALPHABET, write_tokenizer
from tests.tiny import compiling_quickly

CONFIG = GptOssConfig(
    vocab_size=71,
    hidden_size=64,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    moe_intermediate_size=96,
    num_experts=5,
    experts_per_token=3,
    sliding_window=7,
    sliding_layers=(0, 2),
    swiglu_limit=1.5,
    rms_norm_eps=1e-5,
    rope=RopeConfig(900.0, "yarn", 4.0, 32, beta_fast=32.0, beta_slow=1.0, truncate=False),
    max_positions=128,
    expert_storage="mxfp4",
)
FILE = "model.safetensors"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def expected(tensors: dict[str, torch.Tensor], *, quantised: bool, tied: bool = False) -> dict[str, torch.Tensor]:
    """Our parameters, written out from tensors by their Hugging Face names; plain experts are `x @ W` there."""
    found = {"embedding.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    if not tied:
        found["head.weight"] = tensors["lm_head.weight"]
    for i in range(TARGET["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        found[f"{ours}attention_norm.weight"] = tensors[f"{theirs}input_layernorm.weight"]
        found[f"{ours}mlp_norm.weight"] = tensors[f"{theirs}post_attention_layernorm.weight"]
        found[f"{ours}attention.sinks"] = tensors[f"{theirs}self_attn.sinks"]
        for part in ("weight", "bias"):
            for x in "qkvo":
                found[f"{ours}attention.{x}.{part}"] = tensors[f"{theirs}self_attn.{x}_proj.{part}"]
            found[f"{ours}moe.router.gate.{part}"] = tensors[f"{theirs}mlp.router.{part}"]
        for kind in ("gate_up", "down"):
            matrix, name = f"{ours}moe.experts.{kind}", f"{theirs}mlp.experts.{kind}_proj"
            found[f"{matrix}_bias"] = tensors[f"{name}_bias"]
            if quantised:
                found |= {f"{matrix}.{part}": tensors[f"{name}_{part}"] for part in ("blocks", "scales")}
            else:
                found[f"{matrix}.weight"] = torch.einsum("eio->eoi", tensors[name])
    return found


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """`mxfp4`, the same weights as `original`, and `converted` from the former."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    tensors = write_mxfp4(folder / "mxfp4")
    write_original(folder / "original", tensors)
    convert(folder / "mxfp4", folder / "converted")
    return folder


@pytest.fixture
def source(pristine, tmp_path) -> Path:
    """The quantised checkpoint, for the test to edit."""
    return Path(shutil.copytree(pristine / "mxfp4", tmp_path / "source"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_experts(tmp_path, dtype):
    model = write_plain(tmp_path / "source", dtype=dtype)
    manifest = convert(tmp_path / "source", tmp_path / "out")
    assert_target(tmp_path / "out", expected(model.state_dict(), quantised=False))
    stored = {tensor.dtype for piece in manifest.pieces.values() for tensor in piece.tensors.values()}
    assert stored == {str(dtype).removeprefix("torch.")}
    assert set(manifest.pieces) == expected_pieces(4, "gate_up", "down")
    assert manifest.target == replace(CONFIG, expert_storage="plain")


def test_quantised_experts_are_kept_byte_for_byte(pristine):
    assert_target(pristine / "converted", expected(load_file(pristine / "mxfp4" / FILE), quantised=True))
    assert read_manifest(pristine / "converted").target == CONFIG


def test_numbers_and_logits_equal_those_of_transformers(pristine):
    """Dequantised matrices exactly; logits, from the files to the head, in float32."""
    reference = AutoModelForCausalLM.from_pretrained(pristine / "mxfp4")
    decoder = Decoder.load(pristine / "converted", dtype="float32")
    for ours, theirs in zip(decoder.target.layers, reference.model.layers, strict=True):
        for kind in ("gate_up", "down"):
            matrix = getattr(theirs.mlp.experts, f"{kind}_proj")
            assert matrix.dtype == torch.bfloat16
            widened = np.asarray(getattr(ours.moe.experts.weights, kind).widen())
            np.testing.assert_array_equal(widened, matrix.detach().mT.float().numpy())
    ids = np.random.default_rng(0).integers(0, TARGET["vocab_size"], 3 * TARGET["sliding_window"]).tolist()
    with torch.no_grad():
        logits = reference.float()(torch.tensor([ids])).logits[0, -1]
    assert_close(decoder.next_token_logits(ids), logits.numpy())


def test_each_code_lands_in_its_place(tmp_path, source):
    """Matrices with one number other than zero a row, of every code, column and several scales."""
    name, experts, rows, columns = "model.layers.1.mlp.experts.gate_up_proj", 5, 192, 64
    blocks, scales = np.zeros((experts, rows, 2, 16), np.uint8), np.full((experts, rows, 2), 1, np.uint8)
    matrices = np.zeros((experts, rows, columns), np.float32)
    for expert, row in np.ndindex(experts, rows):
        column, code, scale = (5 * row + expert) % columns, 1 + (3 * row + expert) % 15, 120 + row % 11
        group, place = divmod(column, 32)
        blocks[expert, row, group, place // 2] = code << 4 if place % 2 else code
        scales[expert, row, group] = scale
        matrices[expert, row, column] = (-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (scale - 127)
    edit_tensors(source, {f"{name}_blocks": torch.tensor(blocks), f"{name}_scales": torch.tensor(scales)})
    target = load_target(tmp_path / "out", convert(source, tmp_path / "out"), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(target.layers[1].moe.experts.weights.gate_up.widen(), matrices)


def test_original_layout_with_a_tokenizer_from_elsewhere(pristine, tmp_path):
    text = write_tokenizer(tmp_path / "text", alphabet=list(ALPHABET))
    (text / "generation_config.json").write_text(json.dumps({"eos_token_id": [70, 9, 66]}))
    manifest = convert(pristine / "original", tmp_path / "out", tokenizer=text)
    assert manifest.source_hash == read_manifest(pristine / "converted").source_hash  # config and every byte
    assert manifest.eos_token_ids == (70, 9, 66)
    assert Tokenizer.load(tmp_path / "out/tokenizer").encode("tree")
    with pytest.raises(UserError, match=f"{tmp_path / 'out'}: no tokenizer there"):
        convert(pristine / "mxfp4", tmp_path / "other", tokenizer=tmp_path / "out")


HEADS = {
    "boundaries up to L": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    "last hidden state": {"eagle_config": {"use_aux_hidden_state": False}},
}


@pytest.mark.parametrize("kind", HEADS)
def test_decodes_with_the_heads_published_for_it(pristine, tmp_path, kind):
    config = DRAFTER | {"hidden_size": 64, "vocab_size": 71} | HEADS[kind]
    tensors = drafter_tensors(config=config, target_hidden=64) | {"input_norm.weight": torch.ones(3 * 64)}
    if kind == "last hidden state":
        del tensors["fc.weight"], tensors["input_norm.weight"]
    convert(pristine / "converted", tmp_path / "head", drafter=write_drafter(tmp_path / "source", tensors, config))
    decoder = Decoder.load(pristine / "converted", drafter=tmp_path / "head", dtype="float32")
    assert decoder.drafter.boundaries == ((FINAL,) if kind == "last hidden state" else (1, 3, 4))
    with compiling_quickly():
        plain, drafted = (
            decoder.generate([[3, 1, 4, 1, 5]], method=method, max_new_tokens=20, ignore_eos=True)
            for method in ("ar", "likelihood")
        )
    assert plain.generations[0].tokens == drafted.generations[0].tokens


def test_sharded_index(pristine, source, tmp_path):
    """Blocks and scales in different files."""
    tensors = load_file(source / FILE)
    shards = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, tensor in tensors.items():
        shards["model-2.safetensors" if name.endswith("_scales") else "model-1.safetensors"][name] = tensor
    for file, part in shards.items():
        save_file(part, source / file)
    index = {name: file for file, part in shards.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (source / FILE).unlink()
    assert convert(source, tmp_path / "out").source_hash == read_manifest(pristine / "converted").source_hash


@pytest.mark.parametrize(
    "edit",
    [
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": TARGET["rope_parameters"]},
        {"num_local_experts": ..., "num_experts": 5, "num_experts_per_tok": ..., "experts_per_token": 3},
        {"experts_per_token": ..., "initial_context_length": ..., "swiglu_alpha": ..., "attention_bias": ...},
        {"layer_types": None},
        {"quantization_config": {"quant_method": "mxfp4", "dequantize": False}},
    ],
)
def test_spellings_of_the_same_config(source, tmp_path, edit):
    edit_json(source / "config.json", **edit)
    assert convert(source, tmp_path / "out").target == CONFIG


def test_layers_that_do_not_alternate(source, tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    edit_json(source / "config.json", layer_types=kinds)
    assert convert(source, tmp_path / "out").target == replace(CONFIG, sliding_layers=(1, 2))


def test_tied_head(tmp_path):
    model = write_plain(tmp_path / "source", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach()
    edit_tensors(tmp_path / "source", {"lm_head.weight": embedding.clone()})
    assert convert(tmp_path / "source", tmp_path / "out").target.tie_embeddings
    assert_target(tmp_path / "out", expected(model.state_dict(), quantised=False, tied=True))
    edit_tensors(tmp_path / "source", {"lm_head.weight": embedding + 1})
    with pytest.raises(UserError, match=f"{FILE}: tensor lm_head.weight differs from model.embed_tokens"):
        convert(tmp_path / "source", tmp_path / "other")


def not_a_number(scales: torch.Tensor) -> torch.Tensor:
    changed = scales.clone()
    changed[-1, -1, -1] = 255
    return changed


EXPERTS = "model.layers.2.mlp.experts"
SCALES, BLOCKS = f"{EXPERTS}.down_proj_scales", f"{EXPERTS}.down_proj_blocks"
SINKS = "model.layers.3.self_attn.sinks"
BAD_TENSORS = {
    "scale 255": ({SCALES: not_a_number}, f"{FILE}: tensor {SCALES} holds the scale 255"),
    "no scales": ({SCALES: None}, f"{FILE}: tensor {SCALES} is missing"),
    "scales of other blocks": (
        {SCALES: torch.ones(5, 64, 2).byte()},
        f"tensor {SCALES} has shape (5, 64, 2), not (5, 64, 3)",
    ),
    "transposed": (
        {BLOCKS: torch.ones(5, 96, 2, 16).byte()},
        f"tensor {BLOCKS} has shape (5, 96, 2, 16), not (5, 64, 3",
    ),
    "dtype": ({BLOCKS: torch.ones(5, 64, 3, 16)}, f"{FILE}: tensor {BLOCKS} has dtype F32, not U8"),
    "plain too": (
        {f"{EXPERTS}.down_proj": torch.ones(5, 96, 64)},
        f"tensor {EXPERTS}.down_proj has no place in gpt_oss",
    ),
    "no sinks": ({SINKS: None}, f"{FILE}: tensor {SINKS} is missing"),
    "no bias": ({f"{EXPERTS}.gate_up_proj_bias": None}, f"tensor {EXPERTS}.gate_up_proj_bias is missing"),
}
BAD_CONFIG = {
    "quantisation": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantization_config.quant_method: 'bitsandbytes' is not supported, only 'mxfp4'",
    ),
    "no method": ({"quantization_config": {}}, "quantization_config.quant_method: missing"),
    "unknown quantisation": (
        {"quantization_config": QUANTISATION | {"block_size": 16}},
        "quantization_config.block_size: not known for quant_method 'mxfp4'",
    ),
    "experts not quantised": (
        {"quantization_config": QUANTISATION | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]}},
        "quantization_config.modules_to_not_convert: 'model.layers.*.mlp.experts' is not one of self_attn, router,",
    ),
    "not said to be quantised": (
        {"quantization_config": None},
        f"{FILE}: tensor model.layers.0.mlp.experts.down_proj is missing",
    ),
    "kind of layer": (
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: 'chunked_attention' is not supported, only 'sliding_attention' and 'full_attention'",
    ),
    "number of layers": ({"layer_types": ["full_attention"] * 3}, "layer_types: 3 layers, but num_hidden_layers is 4"),
    "only sliding layers": ({"layer_types": ["sliding_attention"] * 4}, "at least one layer must see every position"),
    "no window": ({"sliding_window": None}, "sliding_window: missing"),
    "experts per token": ({"experts_per_token": 2}, "experts_per_token: 2 contradicts num_experts_per_tok"),
    "context": ({"initial_context_length": 33}, "initial_context_length: 33, but the rope's context is 32"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported, only 'silu'"),
    "gain": ({"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5 is not supported, only 1.702"),
    "no limit": ({"swiglu_limit": ...}, "swiglu_limit: missing"),
    "no biases": ({"attention_bias": False}, "attention_bias: False is not supported, only True"),
    "blocks of 32": ({"hidden_size": 80}, "mxfp4 blocks hold 32 numbers; hidden_size is 80"),
}
BAD_ORIGINAL = {
    "unknown key": ({"num_shared_experts": 1}, {}, "config.json: num_shared_experts: not known in OpenAI's layout"),
    "missing key": ({"swiglu_limit": ...}, {}, "config.json: swiglu_limit: missing"),
    "qkv": (
        {},
        {"block.1.attn.qkv.weight": torch.ones(99, 64)},
        f"{FILE}: tensor block.1.attn.qkv.weight has shape (99, 64), not (100, 64)",
    ),
    "scale 255": (
        {},
        {"block.1.mlp.mlp1_weight.scales": not_a_number},
        f"{FILE}: tensor block.1.mlp.mlp1_weight.scales holds the scale 255",
    ),
    "no end": ({}, {}, "config.json: eos_token_id: missing, and generation_config.json has none either; --tokenizer"),
}


def assert_refused(source: Path, config: dict, tensors: dict, message: str) -> None:
    """One line that names the file once; nothing is written."""
    edit_json(source / "config.json", **config)
    found = load_file(source / FILE)
    edit_tensors(source, {name: edit(found[name]) if callable(edit) else edit for name, edit in tensors.items()})
    with pytest.raises(UserError, match=re.escape(message)) as error:
        convert(source, source.parent / "out")
    assert str(error.value).count(str(source)) == 1 and "\n" not in str(error.value)
    assert not list(source.parent.glob("out*"))


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_refused(source, case):
    tensors, message = BAD_TENSORS[case]
    assert_refused(source, {}, tensors, message)


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_configs_are_refused(source, case):
    config, message = BAD_CONFIG[case]
    assert_refused(source, config, {}, message)


@pytest.mark.parametrize("case", BAD_ORIGINAL)
def test_bad_original_is_refused(pristine, tmp_path, case):
    config, tensors, message = BAD_ORIGINAL[case]
    assert_refused(Path(shutil.copytree(pristine / "original", tmp_path / "source")), config, tensors, message)


def test_plain_experts_in_our_axis_order_are_refused(tmp_path):
    model = write_plain(tmp_path / "source")
    wrong = model.model.layers[2].mlp.experts.down_proj.detach().mT.contiguous()
    message = f"{FILE}: tensor {EXPERTS}.down_proj has shape (5, 64, 96), not (5, 96, 64)"
    assert_refused(tmp_path / "source", {}, {f"{EXPERTS}.down_proj": wrong}, message)


def test_dimensions_are_unequal():
    sizes = [value for value in TARGET.values() if type(value) is int]
    assert len(set(sizes)) == len(sizes)
