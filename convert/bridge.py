"""An expert predictor of a published backbone: its bridge to the target's vocabulary, checked or built."""

from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.backbone import open_backbone
from ecospec_jax.config import RoutingShape
from ecospec_jax.errors import UserError
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.target import Target
from ecospec_jax.predictor_config import BackbonePredictorConfig, Bridge, Retokenise, SharedVocabulary, TargetEmbedding
from ecospec_jax.tokenizer import Tokenizer

BridgeKind = Literal["shared", "target_embedding", "retokenise"]
_SUBTOKENS = 4  # most that a target token is read as; each row costs as many rows of the backbone


def published_predictor(
    folder: Path, kind: BridgeKind, target: Target, tokenizer: Tokenizer | None, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> BackbonePredictor:
    """A predictor of a target with the layers of a published `qwen3` or `qwen2` folder; heads are random.

    Args:
        folder: `config.json`, safetensors and, but for the bridge `target_embedding`, the tokenizer.
        kind: the bridge.
        target: whose routing is to be predicted.
        tokenizer: the target's.
        dtype: of all parameters.
        rngs: for the heads, and the projection if there is one.

    Raises:
        UserError: the folder cannot be used, or not with this bridge.
    """
    published = open_backbone(folder)
    vocab_size, hidden = target.config.vocab_size, published.part.config.hidden_size
    bridge, table = TargetEmbedding(), None
    if kind != "target_embedding":
        if tokenizer is None:
            raise UserError(f"--bridge {kind}: compares tokenizers, but the target was converted without one")
        if not (folder / "tokenizer.json").is_file():  # transformers would make an empty tokenizer up
            raise UserError(f"{folder}: no tokenizer.json, which --bridge {kind} needs")
        own = Tokenizer.load(folder)
        if own.vocab_size > published.vocab_size:
            raise UserError(f"{folder}: the tokenizer has {own.vocab_size} ids, the model only {published.vocab_size}")
        if kind == "shared":
            bridge = _shared(folder, tokenizer, own)
        else:
            table = subtoken_table(tokenizer, own, vocab_size, _SUBTOKENS)
            bridge = Retokenise(published.vocab_size, table[0].shape[1])
    projected = isinstance(bridge, TargetEmbedding)
    config = BackbonePredictorConfig(
        vocab_size,
        target.config.hidden_size if projected else hidden,
        published.part.config,
        RoutingShape.of(target.config),
        bridge,
    )
    model = BackbonePredictor(config, dtype=dtype, rngs=rngs)
    published.fill(model.backbone)
    if projected:
        model.embedding.weight.set_value(target.embedding.weight.get_value().astype(dtype))
    else:
        published.embed(model.embedding.weight)
    if model.subtokens is not None and table is not None:
        model.subtokens.ids_VS.set_value(jnp.asarray(table[0]))
        model.subtokens.counts_V.set_value(jnp.asarray(table[1]))
    return model


def _shared(folder: Path, target: Tokenizer, own: Tokenizer) -> Bridge:
    """Refuses a backbone that does not know every id of the target as the same token."""
    mine = own.vocabulary
    for token_id, token in sorted(target.vocabulary.items()):
        if mine.get(token_id) != token:
            known = f"{mine[token_id]!r}" if token_id in mine else "no token"
            raise UserError(
                f"{folder}: token {token_id} is {token!r} to the target and {known} to the backbone, so their "
                f"vocabulary is not shared; bridges for that are target_embedding and retokenise"
            )
    return SharedVocabulary()


def subtoken_table(target: Tokenizer, backbone: Tokenizer, vocab_size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The backbone's tokens of every token of the target.

    Each token's bytes are encoded alone. Of one that takes more than `most` tokens, the last are kept. An id without a
    token, and a token that the backbone has no token for, is the backbone's filler.

    Returns:
        Ids, int32 `[vocab_size, S]` with S <= `most`, and how many of them count, int32 `[vocab_size]`, at least 1.
    """
    texts = target.token_bytes()
    encoded = [backbone.encode_bytes(texts.get(token, b""))[-most:] or [backbone.filler] for token in range(vocab_size)]
    counts_V = np.array([len(ids) for ids in encoded], np.int32)
    ids_VS = np.zeros((vocab_size, counts_V.max()), np.int32)
    for row, ids in zip(ids_VS, encoded, strict=True):
        row[: len(ids)] = ids
    return ids_VS, counts_V
