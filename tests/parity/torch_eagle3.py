"""EAGLE-3 in PyTorch, written from its definition and one row at a time: no mask, no buffers, no shared code."""

import math
from dataclasses import dataclass, field

import jax.numpy as jnp
import torch
from flax import nnx

from ecospec_jax.config import Eagle3Config
from ecospec_jax.models.eagle3 import Eagle3

Memory = tuple[list[torch.Tensor], list[torch.Tensor]]  # rotated keys and values of the rows seen so far


@dataclass(frozen=True)
class Mistakes:
    """Deliberate departures from the definition, each seen in published code."""

    fc_on_recurrent_steps: bool = False
    hidden_half_first: bool = False
    recycle_normed_state: bool = False
    other_residual: bool = False


@dataclass
class TorchEagle3:
    """Weights by their published names, and the forward pass of one row."""

    config: Eagle3Config
    inverse_frequencies: torch.Tensor
    mistakes: Mistakes = Mistakes()
    seed: int = 0
    w: dict[str, torch.Tensor] = field(default_factory=dict)
    d2t: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.w:
            return
        c, generator = self.config, torch.Generator().manual_seed(self.seed)
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        features = len(c.boundaries) * c.target_hidden_size
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            **({"fc": (c.hidden_size, features)} if c.fc else {}),
            "q_proj": (heads, 2 * c.hidden_size),
            "k_proj": (kv_heads, 2 * c.hidden_size),
            "v_proj": (kv_heads, 2 * c.hidden_size),
            "o_proj": (c.hidden_size, heads),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
            "lm_head": (c.draft_vocab_size, c.hidden_size),
        }
        norms = dict.fromkeys(["input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"], c.hidden_size)
        if c.norm_before_fc:
            norms["input_norm"] = features
        if c.norm_each_boundary:
            norms |= {f"fc_norm.{i}": c.target_hidden_size for i in range(len(c.boundaries))}
        for name, shape in shapes.items():
            self.w[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, size in norms.items():
            self.w[name] = 1 + 0.3 * torch.randn(size, generator=generator)
        ids = torch.randperm(c.vocab_size, generator=generator)[: c.draft_vocab_size].sort().values
        self.d2t = ids - torch.arange(c.draft_vocab_size)

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.d2t[draft_id])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[name]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features to the drafter's width; as they are for a head of the last hidden state."""
        c = self.config
        if not c.fc:
            return features
        if c.norm_each_boundary:
            parts = features.split(c.target_hidden_size)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        if c.norm_before_fc:
            features = self.norm(features, "input_norm")
        return self.w["fc"] @ features

    def rotate(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        """Each channel pair (j, j + H/2) as a complex number turned by its angle."""
        half = heads.shape[-1] // 2
        turned = torch.complex(heads[:, :half], heads[:, half:]) * torch.polar(
            torch.ones(half), position * self.inverse_frequencies
        )
        return torch.cat([turned.real, turned.imag], dim=-1)

    def row(self, hidden: torch.Tensor, token: int, position: int, memory: Memory) -> tuple[torch.Tensor, Memory]:
        """One row that sees the rows of `memory` and itself; returns its state y and the longer memory."""
        c, w = self.config, self.w
        embedded, normed = self.norm(w["embed_tokens"][token], "input_layernorm"), self.norm(hidden, "hidden_norm")
        halves = [normed, embedded] if self.mistakes.hidden_half_first else [embedded, normed]
        x = torch.cat(halves)
        q = self.rotate((w["q_proj"] @ x).view(c.num_heads, -1), position)
        k = self.rotate((w["k_proj"] @ x).view(c.num_kv_heads, -1), position)
        v = (w["v_proj"] @ x).view(c.num_kv_heads, -1)
        keys, values = memory[0] + [k], memory[1] + [v]
        mixed = []
        for head in range(c.num_heads):
            kv_head = head * c.num_kv_heads // c.num_heads
            scores = torch.stack([q[head] @ key[kv_head] for key in keys]) / math.sqrt(c.head_dim)
            mixed.append(scores.softmax(0) @ torch.stack([value[kv_head] for value in values]))
        residual = normed if c.norm_before_residual != self.mistakes.other_residual else hidden
        h = residual + w["o_proj"] @ torch.cat(mixed)
        z = self.norm(h, "post_attention_layernorm")
        gate = w["gate_proj"] @ z
        return h + w["down_proj"] @ (gate * gate.sigmoid() * (w["up_proj"] @ z)), (keys, values)

    def context(self, features: torch.Tensor, tokens: list[int]) -> tuple[list[torch.Tensor], Memory]:
        """Committed rows: row t has the target's features of position t and the token at position t + 1."""
        states, memory = [], ([], [])
        for position, token in enumerate(tokens):
            state, memory = self.row(self.fuse(features[position]), token, position, memory)
            states.append(state)
        return states, memory

    def draft(self, parent: torch.Tensor, token: int, position: int, memory: Memory) -> tuple[torch.Tensor, Memory]:
        """A drafted row behind its parent's state."""
        if self.config.norm_output != self.mistakes.recycle_normed_state:
            parent = self.norm(parent, "norm")
        if self.mistakes.fc_on_recurrent_steps:
            parent = self.fuse(parent)
        return self.row(parent, token, position, memory)

    def log_probs(self, state: torch.Tensor) -> torch.Tensor:
        return (self.norm(state, "norm") @ self.w["lm_head"].T).log_softmax(-1)

    def to_jax(self) -> Eagle3:
        """Our module with the same weights."""
        ours = nnx.eval_shape(lambda: Eagle3(self.config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
        places = {
            "embed_tokens": ours.embedding,
            "fc": ours.fc,
            "lm_head": ours.head,
            "norm": ours.norm,
            "input_layernorm": ours.embedding_norm,
            "hidden_norm": ours.hidden_norm,
            "post_attention_layernorm": ours.mlp_norm,
            "input_norm": ours.feature_norm,
        }
        places |= {f"{name}_proj": getattr(ours.attention, name) for name in "qkvo"}
        places |= {f"{name}_proj": getattr(ours.mlp, name) for name in ("gate", "up", "down")}
        places |= {f"fc_norm.{i}": norm for i, norm in enumerate(ours.boundary_norms or [])}
        for name, tensor in self.w.items():
            assert places[name].weight.shape == tuple(tensor.shape), name
            places[name].weight.set_value(jnp.asarray(tensor.numpy()))
        absolute = [self.target_id(draft_id) for draft_id in range(self.config.draft_vocab_size)]
        ours.target_ids.set_value(jnp.asarray(absolute, jnp.int32))
        return ours
