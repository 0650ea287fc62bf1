"""Converted EAGLE-3 heads of every published dialect (docs/formats.md C.2, C.3)."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import convert
from ecospec_jax import Decoder
from ecospec_jax.checkpoint import load_drafter, load_target, parameters, read_manifest
from ecospec_jax.config import FINAL, Eagle3Config, RopeConfig
from ecospec_jax.errors import UserError
from tests.hf_models import DRAFTER, drafter_tensors, write_drafter, write_target

AUX = "eagle_aux_hidden_state_layer_ids"
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "embedding.weight": "embed_tokens.weight",
    "feature_norm.weight": "input_norm.weight",
    "boundary_norms.0.weight": "fc_norm.0.weight",
    "boundary_norms.1.weight": "fc_norm.1.weight",
    "boundary_norms.2.weight": "fc_norm.2.weight",
    "embedding_norm.weight": "input_layernorm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
NESTED = {key: value for key, value in DRAFTER.items() if key != "draft_vocab_size"}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": NESTED, "draft_vocab_size": 31}


def load(folder):
    manifest = read_manifest(folder)
    target = load_target(folder, manifest, jnp.dtype(jnp.float32))
    drafter = load_drafter(folder, manifest, jnp.dtype(jnp.float32), target)
    return manifest.drafter, parameters(drafter), parameters(target)


def assert_weights(found, target, tensors):
    """All parameters come from the file, by names without the dialects' prefixes, or are the target's own arrays."""
    plain = {re.sub(r"^(model\.)?(midlayer\.|layers\.0\.)?", "", name): value for name, value in tensors.items()}
    checked = {"d2t", "t2d"} & plain.keys()
    for path, variable in found.items():
        value = variable.get_value()
        if path == "target_ids":
            offsets = plain["d2t"].numpy() if "d2t" in plain else np.zeros(67, np.int64)
            assert value.dtype == jnp.int32
            np.testing.assert_array_equal(value, [draft + offset for draft, offset in enumerate(offsets)])
        elif NAMES[path] in plain:
            checked.add(NAMES[path])
            np.testing.assert_array_equal(value, plain[NAMES[path]].float().numpy(), err_msg=path)
        else:
            assert value is target[path].get_value(), path
    assert checked == plain.keys()


@pytest.mark.parametrize("model_prefix", ["", "model."])
@pytest.mark.parametrize(
    ("layer", "config", "own_embedding", "expected"),
    [
        pytest.param("midlayer.", DRAFTER, False, {"boundaries": (2, 4, 5)}, id="SafeAILab"),
        pytest.param(
            "midlayer.",
            DRAFTER | {"eagle_config": {AUX: [0, 3, 7], "use_aux_hidden_state": True}, "target_hidden_size": 24},
            True,
            {"boundaries": (1, 4, 8), "own_embedding": True},
            id="SpecForge",
        ),
        pytest.param(
            "layers.0.",
            DRAFTER | {"eagle_config": {"use_last_layernorm": True, "use_mtp_layernorm": False, AUX: [1, 3, 4]}},
            False,
            {"boundaries": (2, 4, 5)},
            id="modelopt",
        ),
        pytest.param(
            "layers.0.",
            SPECULATORS | {AUX: [1, 3, 8]},
            True,
            {"boundaries": (1, 3, 8), "norm_before_residual": True, "own_embedding": True},
            id="speculators",
        ),
        pytest.param(
            "layers.0.",
            SPECULATORS | {"norm_before_residual": False, "norm_output": True},
            False,
            {"boundaries": (2, 4, 5), "norm_output": True},
            id="speculators-stated",
        ),
    ],
)
def test_dialects(tmp_path, target_source, layer, config, own_embedding, expected, model_prefix):
    tensors = drafter_tensors(layer, own_embedding=own_embedding)
    if model_prefix:
        tensors = {name if name == "lm_head.weight" else model_prefix + name: value for name, value in tensors.items()}
    drafter = write_drafter(tmp_path / "drafter", tensors, config)
    convert(target_source, tmp_path / "out", drafter=drafter)
    converted, found, target = load(tmp_path / "out")
    base = {
        "hidden_size": 24,
        "target_hidden_size": 24,
        "intermediate_size": 46,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 14,
        "vocab_size": 67,
        "draft_vocab_size": 31,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(700.0),
    }
    assert converted == Eagle3Config(**(base | expected))
    assert_weights(found, target, tensors)


@pytest.mark.parametrize("listed", ["top", "eagle_config"])
@pytest.mark.parametrize(("aux_offset", "shift"), [("auto", None), (0, 0), (1, 1)])
def test_aux_offset(tmp_path, target_source, listed, aux_offset, shift):
    config = DRAFTER | ({AUX: [0, 2, 6]} if listed == "top" else {"eagle_config": {AUX: [0, 2, 6]}})
    drafter = write_drafter(tmp_path / "drafter", drafter_tensors(), config)
    manifest = convert(target_source, tmp_path / "out", drafter=drafter, aux_offset=aux_offset)
    shift = (1 if listed == "eagle_config" else 0) if shift is None else shift
    assert manifest.drafter.boundaries == (shift, 2 + shift, 6 + shift)


@pytest.mark.parametrize("listed", ["top", "eagle_config"])
def test_a_list_that_names_the_last_boundary(tmp_path, target_source, listed):
    """Of 8 layers none has output 8, so the numbers are boundaries wherever they are."""
    config = DRAFTER | ({AUX: [4, 6, 8]} if listed == "top" else {"eagle_config": {AUX: [4, 6, 8]}})
    drafter = write_drafter(tmp_path / "drafter", drafter_tensors() | {"input_norm.weight": torch.randn(72)}, config)
    manifest = convert(target_source, tmp_path / "out", drafter=drafter)
    assert manifest.drafter.boundaries == (4, 6, 8) and manifest.drafter.norm_before_fc
    with pytest.raises(UserError, match=r"boundaries \(5, 7, 9\) do not ascend within 0..8"):
        convert(target_source, tmp_path / "other", drafter=drafter, aux_offset=1)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_head_of_the_last_hidden_state(tmp_path, target_source, layer):
    """As published for gpt-oss: no `fc`, one state, which is the target's after its final norm."""
    tensors = drafter_tensors(layer)
    del tensors["fc.weight"], tensors["t2d"]
    config = DRAFTER | {"eagle_config": {AUX: [], "use_aux_hidden_state": False, "use_last_layernorm": True}}
    drafter = write_drafter(tmp_path / "drafter", tensors, config)
    convert(target_source, tmp_path / "out", drafter=drafter)
    converted, found, target = load(tmp_path / "out")
    assert (converted.boundaries, converted.fc) == ((FINAL,), False)
    assert_weights(found, target, tensors)
    with pytest.raises(UserError, match="neither a list nor an offset means anything with use_aux_hidden_state false"):
        convert(target_source, tmp_path / "other", drafter=drafter, aux_offset=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extra_norms_and_dtypes(tmp_path, target_source, dtype):
    for name, norms, expected in (
        ("one", {"input_norm.weight": torch.randn(72)}, {"norm_before_fc": True}),
        ("each", {f"fc_norm.{i}.weight": torch.randn(24) for i in range(3)}, {"norm_each_boundary": True}),
    ):
        tensors = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in (drafter_tensors() | norms).items()
        }
        drafter = write_drafter(tmp_path / f"drafter-{name}", tensors)
        manifest = convert(target_source, tmp_path / name, drafter=drafter)
        stored = {tensor.dtype for tensor in manifest.pieces["drafter/top"].tensors.values()}
        assert stored == {str(dtype).removeprefix("torch."), "int32"}
        config, found, target = load(tmp_path / name)
        assert {key: getattr(config, key) for key in ("norm_before_fc", "norm_each_boundary")} == {
            "norm_before_fc": False,
            "norm_each_boundary": False,
        } | expected
        assert_weights(found, target, tensors)


def test_wider_head_than_target(tmp_path, target_source):
    config = DRAFTER | {"hidden_size": 32, "draft_vocab_size": None, "head_dim": None, "rope_theta": None}
    tensors = drafter_tensors(
        own_embedding=True, config=DRAFTER | {"hidden_size": 32, "head_dim": 8, "draft_vocab_size": 31}
    )
    del tensors["t2d"]  # as modelopt
    drafter = write_drafter(tmp_path / "drafter", tensors, config)
    convert(target_source, tmp_path / "out", drafter=drafter)
    converted, found, target = load(tmp_path / "out")
    assert (converted.hidden_size, converted.head_dim, converted.draft_vocab_size) == (32, 8, 31)
    assert converted.rope == RopeConfig(10000.0)  # Llama's default; the target's theta is 5000
    assert_weights(found, target, tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_full_vocabulary_borrows_the_targets_head(tmp_path, tied):
    write_target(tmp_path / "source", tie_word_embeddings=tied)
    config = DRAFTER | {"draft_vocab_size": 67}
    tensors = drafter_tensors(own_head=False, config=config)
    assert "d2t" not in tensors
    drafter = write_drafter(tmp_path / "drafter", tensors, config)
    convert(tmp_path / "source", tmp_path / "out", drafter=drafter)
    converted, found, target = load(tmp_path / "out")
    lender = target["embedding.weight" if tied else "head.weight"]
    assert found["head.weight"].get_value() is lender.get_value()
    assert not converted.own_head
    assert_weights(found, target | {"head.weight": lender}, tensors)


def test_head_alone_for_a_target_converted_before(tmp_path, target_source, drafter_source):
    together = convert(target_source, tmp_path / "together", drafter=drafter_source)
    convert(target_source, tmp_path / "target")
    alone = convert(tmp_path / "target", tmp_path / "head", drafter=drafter_source)
    assert set(alone.pieces) == {"drafter/top"} and alone.drafter_hash == together.drafter_hash
    assert alone.eos_token_ids == together.eos_token_ids
    decoder = Decoder.load(tmp_path / "target", drafter=tmp_path / "head")
    assert decoder.drafter.config == together.drafter
    with pytest.raises(UserError, match="head: holds a drafter alone; name its target, and this folder as the drafter"):
        Decoder.load(tmp_path / "head")
    with pytest.raises(UserError, match="target: was converted before; --drafter names a drafter to convert for it"):
        convert(tmp_path / "target", tmp_path / "other")
    with pytest.raises(UserError, match="target: was converted before; --tokenizer is for a first conversion"):
        convert(tmp_path / "target", tmp_path / "other", drafter=drafter_source, tokenizer=target_source)
    assert not list(tmp_path.glob("other*"))


def changed(**edit):
    return {name: value for name, value in (drafter_tensors() | edit).items() if value is not None}


ONE_STATE = {"eagle_config": {"use_aux_hidden_state": False}}
D2T, T2D = drafter_tensors()["d2t"], drafter_tensors()["t2d"]
BAD = {
    "no d2t": (changed(d2t=None), {}, r"model.safetensors: tensor d2t is missing"),
    "d2t as ids": (
        changed(d2t=D2T + torch.arange(31), t2d=None),
        {},
        "tensor d2t gives no distinct target ids in 0..66",
    ),
    "negative id": (changed(d2t=D2T - 9, t2d=None), {}, "tensor d2t gives no distinct target ids"),
    "repeated id": (changed(d2t=-torch.arange(31), t2d=None), {}, "tensor d2t gives no distinct target ids"),
    "t2d disagrees": (changed(t2d=T2D.roll(1)), {}, "tensors d2t and t2d disagree"),
    "t2d shape": (changed(t2d=T2D[:-1]), {}, r"tensor t2d has shape \(66,\), not \(67,\)"),
    "d2t dtype": (changed(d2t=D2T.float()), {}, "tensor d2t has dtype F32, not I64 or I32"),
    "missing": (changed(**{"midlayer.hidden_norm.weight": None}), {}, "tensor midlayer.hidden_norm.weight is missing"),
    "missing norm": (changed(), {"norm_before_fc": True}, "model.safetensors: tensor input_norm.weight is missing"),
    "unused norm": (
        changed(**{"input_norm.weight": torch.randn(72)}),
        {"norm_before_fc": False},
        "model.safetensors: tensor input_norm.weight has no place in eagle3",
    ),
    "unused": (changed(extra=torch.ones(2)), {}, "model.safetensors: tensor extra has no place in eagle3"),
    "two layers": (
        changed(**{"layers.1.hidden_norm.weight": torch.ones(24)}),
        {},
        "tensor layers.1.hidden_norm.weight: heads of more than one layer",
    ),
    "two layers stated": (changed(), {"num_hidden_layers": 2}, "num_hidden_layers: 2 is not supported"),
    "twice": (changed(**{"model.fc.weight": torch.ones(24, 72)}), {}, "are the same parameter"),
    "no fc": (changed(**{"fc.weight": None}), {}, "model.safetensors: tensor fc.weight is missing"),
    "one state": (changed(), ONE_STATE, "model.safetensors: tensor fc.weight has no place in eagle3"),
    "one state of a list": (
        changed(**{"fc.weight": None}),
        ONE_STATE | {AUX: [2]},
        "config.json: eagle_aux_hidden_state_layer_ids: neither a list nor an offset means anything",
    ),
    "norm of one state": (
        changed(**{"fc.weight": None, "input_norm.weight": torch.randn(24)}),
        ONE_STATE,
        "config.json: input_norm and fc_norm need an fc behind them",
    ),
    "one state of another width": (
        {
            name: tensor
            for name, tensor in drafter_tensors(own_embedding=True, config=DRAFTER | {"hidden_size": 32}).items()
            if name != "fc.weight"
        },
        ONE_STATE | {"hidden_size": 32},
        "config.json: a drafter without fc takes one state of the target, of its own hidden size",
    ),
    "narrow q": (
        changed(**{"midlayer.self_attn.q_proj.weight": torch.ones(56, 24)}),
        {},
        "config.json: an EAGLE-1 head",
    ),
    "hidden": (changed(), {"target_hidden_size": 25}, "target_hidden_size: 25, but the target's hidden_size is 24"),
    "fc columns": (drafter_tensors(target_hidden=25), {}, r"tensor fc.weight has shape \(24, 75\)"),
    "vocabulary": (changed(), {"vocab_size": 68}, "config.json: vocab_size: 68, but the target's is 67"),
    "attention bias": (changed(), {"attention_bias": True}, "attention_bias: True is not supported"),
    "speculator": (changed(), {"speculators_model_type": "dflash"}, "speculators_model_type: 'dflash'"),
    "tied": (
        drafter_tensors(own_embedding=True, own_head=False, config=DRAFTER | {"draft_vocab_size": 67}),
        {"draft_vocab_size": 67, "tie_word_embeddings": True},
        "tie_word_embeddings: a head tied to the drafter's own embedding",
    ),
    "beyond": (changed(), {AUX: [2, 4, 9]}, r"boundaries \(2, 4, 9\) do not ascend within 0..8"),
    "negative": (changed(), {AUX: [-1, 2, 8]}, r"boundaries \(-1, 2, 8\) do not ascend"),
    "descending": (changed(), {AUX: [4, 2, 8]}, r"boundaries \(4, 2, 8\) do not ascend"),
    "two lists": (changed(), {AUX: [2, 4, 5], "eagle_config": {AUX: [1, 3, 4]}}, "stated in eagle_config too"),
    "list": (changed(), {AUX: [2, 4.5, 5]}, "are not all integers"),
    "activation": (changed(), {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_head_is_refused_before_anything_is_written(tmp_path, target_source, case):
    tensors, config, message = BAD[case]
    drafter = write_drafter(tmp_path / "drafter", tensors, DRAFTER | config)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as error:
        convert(target_source, tmp_path / "out", drafter=drafter)
    assert str(error.value).count(str(drafter)) == 1
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_offset_without_a_list_is_refused(tmp_path, target_source, drafter_source):
    with pytest.raises(UserError, match="no list that the auxiliary offset 1 could be added to"):
        convert(target_source, tmp_path / "out", drafter=drafter_source, aux_offset=1)


def test_shallow_target_needs_a_list(tmp_path):
    write_target(tmp_path / "source", num_hidden_layers=4)
    drafter = write_drafter(tmp_path / "drafter", drafter_tensors())
    with pytest.raises(UserError, match=r"boundaries \(2, 2, 1\) do not ascend within 0..4"):
        convert(tmp_path / "source", tmp_path / "out", drafter=drafter)
