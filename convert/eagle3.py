"""EAGLE-3 heads in all published dialects (docs/formats.md C): SafeAILab, SpecForge, NVIDIA modelopt, speculators.

They differ in tensor prefixes, in where the config states things, and in what a list of auxiliary layers means.
"""

import re
from typing import Literal

import jax.numpy as jnp
import numpy as np

from convert.assembly import Assembly, Part, translate
from convert.hf_config import HFConfig
from convert.safetensors_reader import SafetensorsReader, Tensor
from ecospec_jax.checkpoint import stored_parameters
from ecospec_jax.config import FINAL, Eagle3Config, ModelConfig
from ecospec_jax.errors import UserError

AuxOffset = Literal["auto", 0, 1]

_LLAMA_THETA = 10000.0  # what a head without rope_theta was trained with, whatever its target uses
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYER = r"(?:model\.)?(?:midlayer|layers\.0)\."
NAMES = {  # parameter -> tensor without `model.`, its decoder layer called `layer`
    r"embedding\.weight": "embed_tokens.weight",
    r"feature_norm\.weight": "input_norm.weight",
    r"boundary_norms\.(\d+)\.weight": r"fc_norm.\1.weight",
    r"fc\.weight": "fc.weight",
    r"embedding_norm\.weight": "layer.input_layernorm.weight",
    r"hidden_norm\.weight": "layer.hidden_norm.weight",
    r"attention\.([qkvo])\.weight": r"layer.self_attn.\1_proj.weight",
    r"mlp_norm\.weight": "layer.post_attention_layernorm.weight",
    r"mlp\.(gate|up|down)\.weight": r"layer.mlp.\1_proj.weight",
    r"norm\.weight": "norm.weight",
    r"head\.weight": "lm_head.weight",
}


class _Names:
    """The file's tensor names, found by their dialect-free form."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._listing = reader.listing
        self._spelled: dict[str, str] = {}
        for name in reader.tensors:
            plain = re.sub(_LAYER, "layer.", name, count=1).removeprefix("model.")
            if re.match(r"layers\.\d+\.", plain):
                raise UserError(f"{reader.listing}: tensor {name}: heads of more than one layer are not supported")
            if plain in self._spelled:
                raise UserError(f"{reader.listing}: tensors {name} and {self._spelled[plain]} are the same parameter")
            self._spelled[plain] = name

    def __contains__(self, plain: str) -> bool:
        return plain in self._spelled

    def spelled(self, plain: str) -> str:
        """The name as the file has it; SpecForge's for one that is missing."""
        return self._spelled.get(plain, re.sub(r"^layer\.", "midlayer.", plain))


def open_drafter(source: HFConfig, target: ModelConfig, aux_offset: AuxOffset) -> Part[Eagle3Config]:
    """Reads the config and the headers beside it, and checks that they belong together and to the target."""
    reader = SafetensorsReader(source.file.parent)
    names = _Names(reader)
    config = _config(source, reader, names, target, aux_offset)
    _, stored = stored_parameters(config, jnp.dtype(jnp.float32))
    assemblies = {
        path: Assembly.whole(names.spelled(translate(path, NAMES)), variable.get_value().shape)
        for path, variable in stored.items()
        if path != "target_ids"
    }
    assemblies["target_ids"] = _target_ids(config, names)
    part = Part("drafter", source, config, reader, assemblies)
    part.check(unstored=frozenset({names.spelled("t2d")} if "t2d" in names else ()))
    _check_target_ids(part, names)
    return part


def _config(
    source: HFConfig, reader: SafetensorsReader, names: _Names, target: ModelConfig, aux_offset: AuxOffset
) -> Eagle3Config:
    nested = source.section("transformer_layer_config")  # speculators
    layer, eagle = nested or source, source.section("eagle_config") or HFConfig(source.file, {})
    hidden = layer.size("hidden_size")
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    fc = eagle.find(bool, "use_aux_hidden_state") is not False
    _refuse_other_architectures(source, layer, eagle, reader, names)
    if layer.find(bool, "tie_word_embeddings") and own_embedding and not own_head:
        layer.refuse("tie_word_embeddings", "a head tied to the drafter's own embedding is not supported")

    vocab = layer.size("vocab_size")
    if vocab != target.vocab_size:
        layer.refuse("vocab_size", f"{vocab}, but the target's is {target.vocab_size}")
    head_rows = next(iter(reader.tensors[names.spelled("lm_head.weight")].shape), 0) if own_head else vocab

    def flag(key: str, default: bool) -> bool:
        values = (section.find(bool, key) for section in (source, eagle))
        return next((value for value in values if value is not None), default)

    boundaries = _boundaries(source, eagle, target, aux_offset) if fc else _last_hidden(source, eagle, aux_offset)
    _check_states(source, reader.tensors.get(names.spelled("fc.weight")) if fc else None, target, boundaries)
    return source.build(
        Eagle3Config,
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=layer.size("intermediate_size"),
        num_heads=layer.size("num_attention_heads"),
        num_kv_heads=layer.size("num_key_value_heads"),
        head_dim=layer.find(int, "head_dim") or hidden // layer.size("num_attention_heads"),
        vocab_size=vocab,
        draft_vocab_size=source.find(int, "draft_vocab_size") or head_rows,
        rms_norm_eps=layer.need(float, "rms_norm_eps"),
        rope=layer.rope(default_theta=_LLAMA_THETA),
        boundaries=boundaries,
        fc=fc,
        norm_before_fc=flag("norm_before_fc", default="input_norm.weight" in names),
        norm_each_boundary=flag("fc_norm", default="fc_norm.0.weight" in names),
        norm_before_residual=flag("norm_before_residual", default=nested is not None),
        norm_output=flag("norm_output", default=False),
        own_embedding=own_embedding,
        own_head=own_head,
    )


def _refuse_other_architectures(
    source: HFConfig, layer: HFConfig, eagle: HFConfig, reader: SafetensorsReader, names: _Names
) -> None:
    query = reader.tensors.get(names.spelled("layer.self_attn.q_proj.weight"))
    if query and query.shape[-1:] == (layer.size("hidden_size"),):
        raise UserError(
            f"{source.file}: an EAGLE-1 head, whose 'q_proj' takes one vector; only EAGLE-3 heads, whose 'q_proj' "
            f"takes embedding and state, are supported"
        )
    source.expect("speculators_model_type", "eagle3")
    layer.expect("num_hidden_layers", 1)
    layer.expect("hidden_act", "silu")
    layer.expect("attention_bias", False)
    layer.expect("mlp_bias", False)
    eagle.expect("use_input_layernorm_in_first_layer", True)
    eagle.expect("use_last_layernorm", True)
    eagle.expect("use_mtp_layernorm", False)


def _boundaries(source: HFConfig, eagle: HFConfig, target: ModelConfig, aux_offset: AuxOffset) -> tuple[int, ...]:
    """Boundaries of the target's residual stream (docs/formats.md section 0).

    A list in `eagle_config` counts layer outputs, so the boundary is one more, unless the list names L, as only a
    boundary can be called; one at the top level counts boundaries.
    """
    outputs, listed = eagle.integers(_AUX_LAYERS), source.integers(_AUX_LAYERS)
    if outputs is not None and listed is not None:
        source.refuse(_AUX_LAYERS, "stated in eagle_config too, where it means something else")
    layers = target.num_layers
    if outputs is None and listed is None:
        if aux_offset != "auto":
            source.refuse(_AUX_LAYERS, f"no list that the auxiliary offset {aux_offset} could be added to")
        boundaries = (2, layers // 2, layers - 3)
    else:
        listed = outputs or listed or ()
        offset = int(outputs is not None and layers not in listed) if aux_offset == "auto" else aux_offset
        boundaries = tuple(layer + offset for layer in listed)
    if list(boundaries) != sorted(set(boundaries) & set(range(layers + 1))):
        source.refuse(_AUX_LAYERS, f"boundaries {boundaries} do not ascend within 0..{layers} of the target")
    return boundaries


def _last_hidden(source: HFConfig, eagle: HFConfig, aux_offset: AuxOffset) -> tuple[int, ...]:
    """For a head without `fc`, which takes the target's last hidden state, after the final norm."""
    if eagle.integers(_AUX_LAYERS) or source.integers(_AUX_LAYERS) or aux_offset != "auto":
        source.refuse(_AUX_LAYERS, "neither a list nor an offset means anything with use_aux_hidden_state false")
    return (FINAL,)


def _check_states(source: HFConfig, fc: Tensor | None, target: ModelConfig, boundaries: tuple[int, ...]) -> None:
    """Checks the width of the target's states, and that `fc` takes them all."""
    target_hidden = source.find(int, "target_hidden_size") or target.hidden_size
    if target_hidden != target.hidden_size:
        source.refuse("target_hidden_size", f"{target_hidden}, but the target's hidden_size is {target.hidden_size}")
    if fc is not None and fc.shape[-1:] != (len(boundaries) * target_hidden,):
        raise UserError(
            f"{fc.file}: tensor fc.weight has shape {fc.shape}, but takes the states of {len(boundaries)} boundaries, "
            f"each of the target's hidden size {target_hidden}"
        )


def _target_ids(config: Eagle3Config, names: _Names) -> Assembly:
    """`d2t` holds offsets: draft id d means target id d + d2t[d]. Only a full vocabulary needs none."""
    if "d2t" not in names and config.draft_vocab_size == config.vocab_size:
        return Assembly((), (), lambda _: np.arange(config.vocab_size, dtype=np.int32))
    build = lambda tensors: _absolute(tensors[0]).astype(np.int32)  # noqa: E731
    return Assembly((names.spelled("d2t"),), (config.draft_vocab_size,), build, dtypes=("I64", "I32"))


def _absolute(offsets: np.ndarray) -> np.ndarray:
    return np.arange(offsets.size) + offsets


def _check_target_ids(part: Part[Eagle3Config], names: _Names) -> None:
    """Target ids must be in range and distinct, and those that the membership mask `t2d` shows, where there is one."""
    reader, config = part.reader, part.config
    ids = np.arange(config.vocab_size)
    if "d2t" in names:
        tensor = reader.tensors[names.spelled("d2t")]
        ids = _absolute(reader.read(names.spelled("d2t")))
        if ids.min() < 0 or ids.max() >= config.vocab_size or np.unique(ids).size != ids.size:
            raise UserError(f"{tensor.file}: tensor d2t gives no distinct target ids in 0..{config.vocab_size - 1}")
    if "t2d" in names:
        Assembly((names.spelled("t2d"),), (config.vocab_size,), lambda masks: masks[0], ("BOOL",)).check(reader)
        if not np.array_equal(np.flatnonzero(reader.read(names.spelled("t2d"))), ids):
            raise UserError(f"{reader.listing}: tensors d2t and t2d disagree on the draft vocabulary")
