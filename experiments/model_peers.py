"""Other implementations that decode the same Qwen3-MoE weights on one CPU thread."""

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ecospec_jax import config as config_module
from ecospec_jax.models.moe import Experts
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from experiments.kernel_peers import to_torch, torch_missing


@dataclass(frozen=True)
class Decoded:
    """Greedy tokens, and how many a second came after the first."""

    tokens: tuple[int, ...]
    tokens_per_second: float


Peer = Callable[[Sequence[int], int], Decoded]
"""Decodes a prompt greedily to a number of new tokens."""


def decode(first_logits: Any, step: Callable[[int], Any], new_tokens: int) -> Decoded:
    """The greedy loop; `step` takes a token and returns the logits behind it, numpy or torch."""
    tokens = [int(first_logits.argmax())]
    started = time.perf_counter()
    while len(tokens) < new_tokens:
        tokens.append(int(step(tokens[-1]).argmax()))
    return Decoded(tuple(tokens), (new_tokens - 1) / (time.perf_counter() - started))


@contextlib.contextmanager
def transformers_peer(model: Qwen3Moe, implementation: str) -> Iterator[Peer | str]:
    """`Qwen3MoeForCausalLM` with a KV cache, or why there is none."""
    if (reason := torch_missing()) is not None:
        yield reason
        return
    import torch
    from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    c = model.config
    assert isinstance(c, config_module.Qwen3MoeConfig)
    config = Qwen3MoeConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        num_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        norm_topk_prob=c.norm_topk_prob,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=False,
    )
    config.head_dim = c.head_dim
    config._experts_implementation = implementation
    with torch.device("meta"):
        theirs = Qwen3MoeForCausalLM(config)
    state = {name: to_torch(array) for name, array in named_weights(model).items()}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}.mlp.experts"
        assert layer.moe is not None and isinstance(layer.moe.experts, Experts)
        experts = layer.moe.experts
        state[f"{prefix}.gate_up_proj"] = torch.cat(
            [to_torch(part.weight[...]) for part in (experts.gate, experts.up)], dim=1
        )
        state[f"{prefix}.down_proj"] = to_torch(experts.down.weight[...])
    theirs.load_state_dict(state, assign=True)
    # No parameter, and so not among the weights.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    theirs = theirs.eval()

    def peer(prompt: Sequence[int], new_tokens: int) -> Decoded:
        cache = DynamicCache(config=config)

        def step(tokens: Sequence[int]) -> Any:
            return theirs(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1]

        with torch.inference_mode():
            return decode(step(prompt), lambda token: step([token]), new_tokens)

    yield peer


def named_weights(model: Qwen3Moe) -> dict[str, jax.Array]:
    """All weights but the experts', by transformers' names."""
    assert model.head is not None
    named = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for index, layer in enumerate(model.layers):
        prefix, attention = f"model.layers.{index}", layer.attention
        assert layer.moe is not None
        named |= {
            f"{prefix}.input_layernorm.weight": layer.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm.weight,
            f"{prefix}.mlp.gate.weight": layer.moe.router.gate.weight,
            **{f"{prefix}.self_attn.{part}_proj.weight": getattr(attention, part).weight for part in "qkvo"},
            **{f"{prefix}.self_attn.{part}_norm.weight": getattr(attention, f"{part}_norm").weight for part in "qk"},
        }
    return {name: parameter[...] for name, parameter in named.items()}


@contextlib.contextmanager
def llama_peer(model: Qwen3Moe) -> Iterator[Peer | str]:
    """llama.cpp on a temporary GGUF file, or why there is none."""
    missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{' and '.join(missing)} not installed"
        return
    import llama_cpp  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(model, file)
        theirs = llama_cpp.Llama(str(file), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)

        def peer(prompt: Sequence[int], new_tokens: int) -> Decoded:
            theirs.reset()

            def step(tokens: Sequence[int]) -> np.ndarray:
                theirs.eval(tokens)
                logits = llama_cpp.llama_get_logits(theirs.ctx)
                return np.ctypeslib.as_array(logits, (model.config.vocab_size,))

            return decode(step(prompt), lambda token: step([token]), new_tokens)

        yield peer
        theirs.close()


def write_gguf(model: Qwen3Moe, file: Path) -> None:
    """The weights as they are; norms and routers in float32, as llama.cpp wants them. There is no vocabulary."""
    import gguf  # pyright: ignore[reportMissingImports]

    c = model.config
    assert isinstance(c, config_module.Qwen3MoeConfig)
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.experts_per_token)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope.theta)

    def add(name: str, array: jax.Array) -> None:
        if name.endswith(("norm.weight", "ffn_gate_inp.weight")):
            writer.add_tensor(name, np.asarray(array.astype(jnp.float32)))
        elif array.dtype == jnp.bfloat16:
            values = np.asarray(array).view(np.uint8)
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.asarray(array))

    for name, array in named_weights(model).items():
        add(gguf_name(name), array)
    for index, layer in enumerate(model.layers):
        assert layer.moe is not None
        for part in ("gate", "up", "down"):
            add(f"blk.{index}.ffn_{part}_exps.weight", getattr(layer.moe.experts, part).weight[...])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """The GGUF name of a weight that has a transformers name."""
    for theirs, ours in (
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate", "ffn_gate_inp"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("_proj.", "."),
    ):
        name = name.replace(theirs, ours)
    return name


PEERS = ("transformers eager", "transformers grouped_mm", "llama.cpp")


def open_peer(name: str, model: Qwen3Moe) -> contextlib.AbstractContextManager[Peer | str]:
    """A peer by name; its memory is free again when the context closes."""
    if name == "llama.cpp":
        return llama_peer(model)
    return transformers_peer(model, name.removeprefix("transformers "))
