"""Published `qwen3` and `qwen2` models as backbones of expert predictors (docs/formats.md A.5, A.6)."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from convert.assembly import Assembly, Part, check_target, translate
from convert.hf_config import HFConfig
from convert.qwen3_moe import NAMES
from convert.safetensors_reader import SafetensorsReader
from ecospec_jax.checkpoint import parameters, stored_parameters
from ecospec_jax.models.backbone import Backbone
from ecospec_jax.predictor_config import BackboneConfig

EMBEDDING, _HEAD = "embedding.weight", "lm_head.weight"
_FAMILIES = ("qwen3", "qwen2")


@dataclass(frozen=True)
class PublishedBackbone:
    """A checkpoint that was checked and can be read.

    Attributes:
        part: its layers and final norm by the paths of `Backbone`, and its token embedding.
        vocab_size: rows of the embedding.
    """

    part: Part[BackboneConfig]
    vocab_size: int

    def fill(self, backbone: Backbone) -> None:
        """Gives a backbone of this config the checkpoint's values, in its own dtype."""
        for path, variable in parameters(backbone).items():
            variable.set_value(self._read(path, variable))

    def embed(self, variable: nnx.Variable) -> None:
        """Gives an embedding the checkpoint's rows: as many as it has, zeros for those that the checkpoint lacks."""
        rows = len(variable.get_value())
        weight = self._read(EMBEDDING, variable)[:rows]
        variable.set_value(jnp.pad(weight, ((0, rows - len(weight)), (0, 0))))

    def _read(self, path: str, variable: nnx.Variable) -> jnp.ndarray:
        return jnp.asarray(self.part.assemblies[path].read(self.part.reader)).astype(variable.get_value().dtype)


def open_backbone(folder: Path) -> PublishedBackbone:
    """Reads the config and the headers of a published folder, and checks that they belong together.

    The head is not read, but has to be what the config says.
    """
    source = HFConfig.read(folder / "config.json")
    config, vocab_size = _config(source), source.size("vocab_size")
    reader = SafetensorsReader(folder)
    _, stored = stored_parameters(config, jnp.dtype(jnp.float32))
    shapes = {path: variable.get_value().shape for path, variable in stored.items()}
    shapes[EMBEDDING] = vocab_size, config.hidden_size
    assemblies = {path: Assembly.whole(translate(path, NAMES), shape) for path, shape in shapes.items()}
    part = Part("backbone", source, config, reader, assemblies)
    tied = source.need(bool, "tie_word_embeddings")
    if not tied:
        Assembly.whole(_HEAD, shapes[EMBEDDING]).check(reader)
    check_target(part, tied=tied, head=_HEAD, embedding=translate(EMBEDDING, NAMES), unstored=frozenset({_HEAD}))
    return PublishedBackbone(part, vocab_size)


def _config(source: HFConfig) -> BackboneConfig:
    family = source.need(str, "model_type")
    if family not in _FAMILIES:
        source.refuse("model_type", f"'{family}' is no backbone, only {', '.join(_FAMILIES)} are")
    source.expect("hidden_act", "silu")
    source.expect("use_sliding_window", False)
    source.expect("use_mrope", False)
    hidden, heads, layers = (
        source.size("hidden_size"),
        source.size("num_attention_heads"),
        source.size("num_hidden_layers"),
    )
    source.expect("layer_types", ["full_attention"] * layers)
    if family == "qwen3":
        source.expect("attention_bias", False)
        head_dim = source.size("head_dim")
    elif hidden % heads:
        source.refuse("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    else:
        head_dim = hidden // heads
        source.expect("head_dim", head_dim)
    return source.build(
        BackboneConfig,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=source.size("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=source.size("intermediate_size"),
        rms_norm_eps=source.need(float, "rms_norm_eps"),
        rope=source.rope(),
        family=family,
    )
