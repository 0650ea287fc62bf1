"""Frozen configurations of targets, drafters and decoding, in one canonical form.

Published checkpoints spell these in several dialects; `convert/` translates them. Every config validates itself, so an
impossible value is refused where it is made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic

from ecospec_jax.errors import UserError, reported_as_user_error

STRICT = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
ConfigT = TypeVar("ConfigT")


def to_json(config: Any) -> dict[str, Any]:
    """The config as plain JSON values."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")


def from_json(kind: type[ConfigT], values: Any, source: str) -> ConfigT:
    """Builds a config from JSON values; an unknown, absent or impossible value is a `UserError` naming `source`."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}: {where}: {first['msg']}") from error


def write_json(path: Path, config: Any) -> None:
    """Writes a config as a JSON file, whole or not at all; a place that cannot be written is a `UserError`."""
    with reported_as_user_error(f"{path}: cannot be written", OSError):
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps(to_json(config), indent=1) + "\n")
        unfinished.replace(path)


def read_json(kind: type[ConfigT], path: Path) -> ConfigT:
    """Reads what `write_json` wrote; a wrong file is a `UserError`."""
    with reported_as_user_error(f"{path}: cannot be read", OSError, ValueError):
        values = json.loads(path.read_text())
    return from_json(kind, values, str(path))


def require(condition: bool, message: str) -> None:
    """A false condition is a `UserError`."""
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, half-split layout; scaling as in Hugging Face `rope_scaling` (docs/formats.md A.4).

    Attributes:
        theta: base of the geometric frequencies.
        kind: how frequencies are rescaled beyond the trained context.
        factor: context extension factor (all kinds but `default`).
        original_max_positions: trained context (`llama3`, `yarn`).
        low_freq_factor, high_freq_factor: `llama3` only.
        beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: `yarn` only.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        require(self.theta > 0, f"rope theta must be positive, not {self.theta}")
        require(self.factor >= 1, f"rope factor must be at least 1, not {self.factor}")
        if self.kind in ("llama3", "yarn"):
            require(self.original_max_positions is not None, f"rope kind {self.kind} needs original_max_positions")


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Qwen3-MoE target (docs/formats.md A.1). Layers listed in `dense_layers` have one MLP in place of experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    dense_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False
    attention_bias: bool = False
    family: Literal["qwen3_moe"] = "qwen3_moe"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        _check_attention_and_experts(self)
        _require_layers("dense_layers", self.dense_layers, self.num_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rope turns: all."""
        return self.head_dim


@dataclass(frozen=True)
class GptOssConfig:
    """gpt-oss target (docs/formats.md A.2). All layers have experts.

    Attributes:
        sliding_layers: layers that see the last `sliding_window` positions, a token's own included.
        swiglu_limit: clamp of the experts' activation.
        expert_storage: `plain` in the model's dtype, or `mxfp4`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    sliding_window: int
    sliding_layers: tuple[int, ...]
    swiglu_limit: float
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    expert_storage: Literal["plain", "mxfp4"]
    tie_embeddings: bool = False
    family: Literal["gpt_oss"] = "gpt_oss"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        _check_attention_and_experts(self)
        require(self.sliding_window >= 1, f"sliding_window must be at least 1, not {self.sliding_window}")
        require(self.swiglu_limit > 0, f"swiglu_limit must be positive, not {self.swiglu_limit}")
        _require_layers("sliding_layers", self.sliding_layers, self.num_layers)
        require(len(set(self.sliding_layers)) < self.num_layers, "at least one layer must see every position")
        for name in ("hidden_size", "moe_intermediate_size"):
            size = getattr(self, name)
            require(self.expert_storage == "plain" or size % 32 == 0, f"mxfp4 blocks hold 32 numbers; {name} is {size}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        return tuple(range(self.num_layers))

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rope turns: all."""
        return self.head_dim


@dataclass(frozen=True)
class DeepseekV3Config:
    """DeepSeek-V3 target (docs/formats.md A.3), without its MTP module.

    Attributes:
        q_lora_rank, kv_lora_rank: widths of the latents that queries, and keys and values, come from.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's query without and with rope.
        v_head_dim: channels of a head's value.
        intermediate_size: of the dense layers, which are those before `first_sparse_layer`.
        shared_experts: experts, as one wider MLP, that every token goes through.
        groups, groups_per_token: experts are chosen within the best groups only.
        routed_scaling_factor: of the routed experts' sum.
        storage: of all projections but router, embedding and head: `plain` in the model's dtype, or `fp8`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    shared_experts: int
    groups: int
    groups_per_token: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_sparse_layer: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    storage: Literal["plain", "fp8"]
    tie_embeddings: bool = False
    family: Literal["deepseek_v3"] = "deepseek_v3"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        _check_experts(self)
        require(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim must be even, not {self.qk_rope_head_dim}")
        require(self.num_experts % self.groups == 0, f"{self.num_experts} experts do not form {self.groups} groups")
        group = self.num_experts // self.groups
        require(group >= 2, "a group of experts is judged by its best two; groups have one")
        require(
            1 <= self.groups_per_token <= self.groups and self.experts_per_token <= self.groups_per_token * group,
            f"{self.experts_per_token} experts a token do not fit into {self.groups_per_token} groups of {group}",
        )
        require(self.shared_experts >= 1, f"shared_experts must be at least 1, not {self.shared_experts}")
        require(
            0 <= self.first_sparse_layer < self.num_layers,
            f"first_sparse_layer {self.first_sparse_layer} is not in 0..{self.num_layers - 1}",
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        return tuple(range(self.first_sparse_layer, self.num_layers))

    @property
    def rotary_dim(self) -> int:
        """Channels that rope turns."""
        return self.qk_rope_head_dim


def _check_attention_and_experts(config: "Qwen3MoeConfig | GptOssConfig") -> None:
    require(config.num_heads % config.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads")
    require(config.head_dim % 2 == 0, f"head_dim must be even, not {config.head_dim}")
    _check_experts(config)


def _check_experts(config: "ModelConfig") -> None:
    require(
        1 <= config.experts_per_token <= config.num_experts,
        f"experts_per_token {config.experts_per_token} is not in 1..{config.num_experts}",
    )


def _require_layers(name: str, listed: tuple[int, ...], layers: int) -> None:
    require(all(0 <= layer < layers for layer in listed), f"{name} {listed} are not all in 0..{layers - 1}")


ModelConfig = Annotated[Qwen3MoeConfig | GptOssConfig | DeepseekV3Config, pydantic.Field(discriminator="family")]
FINAL = -1  # among a drafter's boundaries: the state after the target's final norm (docs/formats.md 0)


@dataclass(frozen=True)
class Eagle3Config:
    """EAGLE-3 drafter head (docs/formats.md C).

    Attributes:
        target_hidden_size: width of the target's residual stream.
        vocab_size: the target's vocabulary; drafted tokens are target ids.
        draft_vocab_size: rows of the drafter's own head; below `vocab_size` an offset map `d2t` translates.
        boundaries: boundaries of the target's residual stream, in 0..L, whose states are concatenated, low to high; or
            `FINAL` alone.
        fc: the states go through `fc`; without it there is one state, of the drafter's width, taken as it is.
        norm_before_fc: one RMSNorm over the concatenation before `fc` (`input_norm`).
        norm_each_boundary: one RMSNorm per boundary before `fc` (`fc_norm.{i}`); excludes `norm_before_fc`.
        norm_before_residual: the residual branch starts from the normed hidden state.
        norm_output: the state fed to the next draft step is the final norm's output (EAGLE-3.1).
        own_embedding: the checkpoint carries its own token embedding; otherwise the target's is used.
        own_head: the checkpoint carries its own head; otherwise the target's is used (full vocabulary only).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    boundaries: tuple[int, ...]
    fc: bool = True
    norm_before_fc: bool = False
    norm_each_boundary: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    family: Literal["eagle3"] = "eagle3"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        require(self.num_heads % self.num_kv_heads == 0, "drafter num_heads must be a multiple of num_kv_heads")
        require(len(self.boundaries) > 0, "an EAGLE-3 drafter needs at least one boundary")
        require(
            self.boundaries == (FINAL,) or min(self.boundaries) >= 0,
            f"boundaries {self.boundaries} are not all in 0..L",
        )
        require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}",
        )
        require(not (self.norm_before_fc and self.norm_each_boundary), "input_norm and fc_norm exclude each other")
        require(
            self.fc or not (self.norm_before_fc or self.norm_each_boundary),
            "input_norm and fc_norm need an fc behind them",
        )
        require(
            self.fc or (len(self.boundaries) == 1 and self.hidden_size == self.target_hidden_size),
            "a drafter without fc takes one state of the target, of its own hidden size",
        )
        require(
            self.own_head or self.draft_vocab_size == self.vocab_size,
            "a drafter without its own head must draft the full vocabulary",
        )
        require(
            self.hidden_size == self.target_hidden_size or (self.own_embedding and self.own_head),
            f"a drafter of hidden size {self.hidden_size} cannot borrow the embedding or head of a target of "
            f"hidden size {self.target_hidden_size}",
        )


@dataclass(frozen=True)
class MtpConfig:
    """DeepSeek's multi-token prediction module (docs/formats.md D).

    Attributes:
        layer: the target's config; the module's decoder layer is one of its sparse layers.
        recycle: what takes the place of the target's hidden state behind the first drafted token: the module's own,
            `normed` by its final norm or `raw`.
        own_embedding, own_head: the checkpoint carries its own; otherwise the target's are used.
    """

    layer: DeepseekV3Config
    recycle: Literal["normed", "raw"] = "normed"
    own_embedding: bool = False
    own_head: bool = False
    family: Literal["mtp"] = "mtp"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's residual stream."""
        return self.layer.hidden_size

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The state behind the target's final norm alone."""
        return (FINAL,)


DrafterConfig = Annotated[Eagle3Config | MtpConfig, pydantic.Field(discriminator="family")]


@dataclass(frozen=True)
class RoutingShape:
    """What a predictor predicts: `k` of `experts` experts in each of `layers` MoE layers."""

    layers: int
    experts: int
    k: int
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @staticmethod
    def of(target: ModelConfig) -> "RoutingShape":
        """The routing of a target."""
        return RoutingShape(len(target.moe_layers), target.num_experts, target.experts_per_token)


@dataclass(frozen=True)
class SpecConfig:
    """Size of the candidate tree and of the verify tree (docs/design.md section 2).

    Attributes:
        depth: token levels D of the candidate tree.
        branch: children k per expanded node, and the beam width.
        budget: candidate nodes verified beside the root; 0 verifies the root alone.
        eps: added to the count of new experts in the cost-aware score; small values favour free nodes more.
        buffer: experts that count as paid for before any node is chosen: none, those predicted for the root, or the
            true ones of the previous verification.
        shared_buffer: one expert buffer for the whole batch instead of one a sequence.
        device_experts: experts of each device, by ascending id, where the cost-aware score is to count those that a
            node adds to the busiest device; None counts all that it adds.
        probe_every: most plain steps after which methods that decide whether to draft try again.
        row_counts: methods that decide how many rows to verify compile these counts, and `rows`, which need not be
            named; each step takes the least that holds its rows.
    """

    depth: int = 3
    branch: int = 2
    budget: int = 4
    eps: float = 1.0
    buffer: Literal["empty", "root", "previous"] = "previous"
    shared_buffer: bool = False
    device_experts: int | None = None
    probe_every: int = 128
    row_counts: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        require(self.probe_every >= 1, f"probe_every must be at least 1, not {self.probe_every}")
        require(all(count >= 1 for count in self.row_counts), f"row counts must be at least 1, not {self.row_counts}")
        require(self.eps > 0, f"eps must be positive, not {self.eps}")
        require(self.buffer in ("empty", "root", "previous"), f"unknown expert buffer '{self.buffer}'")
        require(
            self.device_experts is None or self.device_experts >= 1,
            f"device_experts must be at least 1, not {self.device_experts}",
        )
        require(self.depth >= 1, f"depth must be at least 1, not {self.depth}")
        require(self.branch >= 1, f"branch must be at least 1, not {self.branch}")
        require(
            0 <= self.budget <= self.pool_size,
            f"budget must be in 0..{self.pool_size} for depth {self.depth} and branch {self.branch}, not {self.budget}",
        )

    @property
    def pool_size(self) -> int:
        """Candidate nodes: k on the first level, k^2 on each further one."""
        return self.branch + (self.depth - 1) * self.branch**2

    @property
    def rows(self) -> int:
        """Rows of one verification: the root and `budget` nodes."""
        return 1 + self.budget

    @property
    def compiled_rows(self) -> tuple[int, ...]:
        """Counts of rows that methods which decide on them can process, `rows` the last."""
        return (*sorted({count for count in self.row_counts if count < self.rows}), self.rows)

    @property
    def max_emitted(self) -> int:
        """Most tokens one verification can emit: the longest accepted path and the bonus token."""
        return 1 + min(self.depth, self.budget)


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn from the target's logits; the same for plain and speculative decoding.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: then keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature must not be negative, not {self.temperature}")
        require(self.top_k >= 0, f"top_k must not be negative, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
