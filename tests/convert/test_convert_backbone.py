"""Published backbones that cannot be used, and bridges that do not hold: one line that names the reason."""

import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from convert.backbone import open_backbone
from convert.bridge import published_predictor, subtoken_table
from ecospec_jax.errors import UserError
from ecospec_jax.tokenizer import Tokenizer
from tests import tiny
from tests.hf_backbones import write_backbone, write_bpe
from tests.hf_models import edit_json, edit_tensors

FILE = "model.safetensors"
Q, HEAD, EMBEDDING = "model.layers.1.self_attn.q_proj", "lm_head.weight", "model.embed_tokens.weight"
FAMILY = {"qwen2": "untied qwen2", "qwen3": "tied qwen3"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_backbone(folder / "tied qwen3", "qwen3")
    write_backbone(folder / "untied qwen2", "qwen2", tied=False)
    return folder


def config(**edit):
    return lambda folder: edit_json(folder / "config.json", **edit)


def tensors(**edit):
    return lambda folder: edit_tensors(folder, edit)


BAD = {
    "model type": ("qwen3", config(model_type="llama"), "config.json: model_type: 'llama' is no backbone, only qwen3"),
    "experts": ("qwen3", config(model_type="qwen3_moe"), "config.json: model_type: 'qwen3_moe' is no backbone"),
    "activation": ("qwen2", config(hidden_act="gelu"), "config.json: hidden_act: 'gelu' is not supported"),
    "window": ("qwen2", config(use_sliding_window=True), "config.json: use_sliding_window: True is not supported"),
    "windowed layer": (
        "qwen3",
        config(layer_types=["full_attention", "sliding_attention"]),
        "config.json: layer_types: ['full_attention', 'sliding_attention'] is not supported",
    ),
    "mrope": ("qwen2", config(use_mrope=True), "config.json: use_mrope: True is not supported"),
    "biases": ("qwen3", config(attention_bias=True), "config.json: attention_bias: True is not supported"),
    "rope type": (
        "qwen3",
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
        "config.json: rope_parameters.rope_type: 'dynamic' is not supported",
    ),
    "heads": (
        "qwen2",
        config(num_attention_heads=7),
        "config.json: hidden_size: 30 is not a multiple of num_attention",
    ),
    "head_dim": ("qwen2", config(head_dim=14), "config.json: head_dim: 14 is not supported, only 6"),
    "no head_dim": ("qwen3", config(head_dim=...), "config.json: head_dim: missing"),
    "no tie": ("qwen3", config(tie_word_embeddings=...), "config.json: tie_word_embeddings: missing"),
    "missing": ("qwen3", tensors(**{f"{Q}.weight": None}), f"{FILE}: tensor {Q}.weight is missing"),
    "missing bias": ("qwen2", tensors(**{f"{Q}.bias": None}), f"{FILE}: tensor {Q}.bias is missing"),
    "bias of another family": (
        "qwen3",
        tensors(**{f"{Q}.bias": torch.ones(70)}),
        f"{FILE}: tensor {Q}.bias has no place in qwen3",
    ),
    "norm of another family": (
        "qwen2",
        tensors(**{"model.layers.1.self_attn.q_norm.weight": torch.ones(6)}),
        f"{FILE}: tensor model.layers.1.self_attn.q_norm.weight has no place in qwen2",
    ),
    "shape": (
        "qwen3",
        tensors(**{f"{Q}.weight": torch.ones(70, 29)}),
        f"{FILE}: tensor {Q}.weight has shape (70, 29), not (70, 30)",
    ),
    "vocabulary": ("qwen3", config(vocab_size=46), f"{FILE}: tensor {EMBEDDING} has shape (47, 30), not (46, 30)"),
    "dtype": (
        "qwen3",
        tensors(**{f"{Q}.weight": torch.ones(70, 30).to(torch.int8)}),
        f"{FILE}: tensor {Q}.weight has dtype I8",
    ),
    "tied head differs": (
        "qwen3",
        tensors(**{HEAD: torch.ones(47, 30)}),
        f"{FILE}: tensor {HEAD} differs from {EMBEDDING}, though tie_word_embeddings is true",
    ),
    "no head": ("qwen2", tensors(**{HEAD: None}), f"{FILE}: tensor {HEAD} is missing"),
    "head's shape": ("qwen2", tensors(**{HEAD: torch.ones(46, 30)}), f"tensor {HEAD} has shape (46, 30), not (47, 30)"),
    "no config": ("qwen3", lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
    "no tensors": ("qwen3", lambda folder: (folder / FILE).unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_folders(pristine: Path, tmp_path, case: str) -> None:
    family, damage, message = BAD[case]
    folder = Path(shutil.copytree(pristine / FAMILY[family], tmp_path / "published"))
    open_backbone(folder)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        open_backbone(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


def test_all_tensors_but_the_head_are_used(pristine: Path) -> None:
    folder = pristine / FAMILY["qwen2"]
    part = open_backbone(folder).part
    assert sorted(name for one in part.assemblies.values() for name in one.names) == sorted(
        set(load_file(folder / FILE)) - {HEAD}
    )


# ---------------------------------------------------------------------------------------------------------------------
# Bridges


def tokenizer(folder: Path, merged: list[str], seed: int, special: tuple[str, ...] = ()) -> Tokenizer:
    write_bpe(folder, merged, seed=seed, special=special)
    return Tokenizer.load(folder)


def predictor(folder: Path, kind, target: Tokenizer | None):
    model = tiny.make_target(tiny.TARGET)
    return published_predictor(folder, kind, model, target, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))


def test_a_shared_vocabulary_has_the_same_tokens(pristine: Path, tmp_path) -> None:
    """Tokens that the backbone has beyond the target's are no matter; the first that differs is named."""
    folder = Path(shutil.copytree(pristine / FAMILY["qwen3"], tmp_path / "published"))
    write_backbone(folder, "qwen3", vocab_size=262)
    target = tokenizer(tmp_path / "target", ["th"], 0)
    tokenizer(folder, ["th"], 0, special=("<|more|>",))
    assert predictor(folder, "shared", target).embedding.weight[...].shape == (29, 30)

    other = tokenizer(folder, ["th"], 1)
    first = min(i for i in range(257) if other.vocabulary[i] != target.vocabulary[i])
    theirs, mine = target.vocabulary[first], other.vocabulary[first]
    message = f"{folder}: token {first} is {theirs!r} to the target and {mine!r} to the backbone"
    with pytest.raises(UserError, match=f"^{re.escape(message)}.*target_embedding and retokenise$"):
        predictor(folder, "shared", target)

    longer = tokenizer(tmp_path / "longer", ["th"], 0, special=("<|mine|>",))
    tokenizer(folder, ["th"], 0)
    with pytest.raises(UserError, match=r"token 257 is '<\|mine\|>' to the target and no token to the backbone"):
        predictor(folder, "shared", longer)


def test_bridges_need_tokenizers_that_fit(pristine: Path, tmp_path) -> None:
    folder = Path(shutil.copytree(pristine / FAMILY["qwen3"], tmp_path / "published"))
    target = tokenizer(tmp_path / "target", ["th"], 0)
    for kind in ("shared", "retokenise"):
        with pytest.raises(UserError, match=f"^--bridge {kind}: .*the target was converted without one"):
            predictor(folder, kind, None)
        with pytest.raises(UserError, match=f"^{folder}: no tokenizer.json, which --bridge {kind} needs$"):
            predictor(folder, kind, target)
    tokenizer(folder, [], 0)
    with pytest.raises(UserError, match=f"^{folder}: the tokenizer has 256 ids, the model only 47"):
        predictor(folder, "retokenise", target)


def test_table_of_subtokens(tmp_path) -> None:
    """Text through the other tokenizer, bytes through its merges; long tokens lose their front, ids without text none.

    The target's mark is known to the backbone, too, as one token.
    """
    euro = "\u00e2\u0124"  # two bytes of three
    target = tokenizer(tmp_path / "target", ["th", "the", "thes", "these", euro], 0, special=("<|end|>", "<|x|>"))
    own = tokenizer(tmp_path / "own", ["th", "es", euro], 3, special=("<|end|>",))
    ids_VS, counts_V = subtoken_table(target, own, 270, 3)
    assert ids_VS.shape == (270, 3) and (ids_VS.dtype, counts_V.dtype) == (np.int32, np.int32)
    mine, theirs = {t: i for i, t in target.vocabulary.items()}, {t: i for i, t in own.vocabulary.items()}
    expected = {
        "the": ["th", "e"],
        "these": ["th", "es", "e"],
        "\u0120": ["\u0120"],
        "\u0124": ["\u0124"],  # a byte that is no text
        euro: [euro],
        "<|end|>": ["<|end|>"],
        "<|x|>": ["x", "|", ">"],
    }
    for token, subtokens in expected.items():
        row = mine[token]
        assert ids_VS[row, : counts_V[row]].tolist() == [theirs[one] for one in subtokens], token
    assert set(counts_V[len(mine) :]) == {1} and set(ids_VS[len(mine) :, 0]) == {own.filler}


def test_retokenising_needs_byte_level_tokens(tmp_path) -> None:
    """Another alphabet would be taken for bytes that it does not mean."""
    backend = Backend(models.BPE(vocab={"a": 0, "\u2581a": 1}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path}: token 1, '\u2581a', is not of a byte-level vocabulary$"):
        Tokenizer.load(tmp_path).token_bytes()
