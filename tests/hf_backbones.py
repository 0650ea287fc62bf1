"""Small random Qwen3 and Qwen2 models as published, and byte-level tokenizers that differ."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 34,
    "rms_norm_eps": 1e-2,  # large, so that it counts
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "attn_implementation": "eager",
}
FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, lambda **values: Qwen3Config(head_dim=14, **values)),
    "qwen2": (Qwen2ForCausalLM, lambda **values: Qwen2Config(**values)),  # its head_dim is 6
}


def write_backbone(
    folder: Path, family: str, *, vocab_size: int = 47, tied: bool = True, shard_size: str = "1GB", seed: int = 0
) -> torch.nn.Module:
    """Saves a random model, norms and biases random too, and returns it."""
    torch.manual_seed(seed)
    kind, config = FAMILIES[family]
    model = kind(config(vocab_size=vocab_size, tie_word_embeddings=tied, **SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def hidden_states(model: torch.nn.Module, ids: Sequence[int]) -> np.ndarray:
    """Theirs after the final norm, `[T, D]`."""
    with torch.no_grad():
        return model.model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()


def write_bpe(folder: Path, merged: Sequence[str], *, seed: int, special: Sequence[str] = ()) -> None:
    """A byte-level tokenizer whose ids are shuffled; each of `merged` is one merge: its last character joins the rest.

    Characters are those of the byte-level alphabet, a space is \u0120.
    """
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), *merged]
    order = np.random.default_rng(seed).permutation(len(tokens)).tolist()
    vocabulary = {token: order[place] for place, token in enumerate(sorted(tokens))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[(token[:-1], token[-1]) for token in merged]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.add_special_tokens({"extra_special_tokens": list(special)})
    fast.save_pretrained(folder)
