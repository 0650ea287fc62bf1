"""What a step reads, in bytes, from the configuration alone (docs/design.md section 4)."""

from dataclasses import dataclass

from ecospec_jax.config import ModelConfig


@dataclass(frozen=True)
class ByteModel:
    """Weight bytes of one target pass: `fixed + experts_touched * per_expert`.

    Attributes:
        fixed: bytes every pass reads: attention, routers, norms, dense layers, head (of the embedding only rows).
        per_expert: bytes of one expert.
        moe_layers: layers that have experts.
    """

    fixed: float
    per_expert: float
    moe_layers: int

    def step(self, u: float) -> float:
        """Bytes of a verification that touches `u` distinct experts in the mean MoE layer."""
        return self.fixed + u * self.moe_layers * self.per_expert


def byte_model(config: ModelConfig, bytes_per_weight: float) -> ByteModel:
    """The byte model of a target whose weights are stored in `bytes_per_weight` bytes each."""
    hidden, layers = config.hidden_size, config.num_layers
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (2 * heads + 2 * kv_heads) + 2 * config.head_dim + 2 * hidden
    if config.attention_bias:
        attention += heads + 2 * kv_heads + hidden
    moe_layers = len(config.moe_layers)
    routers = moe_layers * config.num_experts * hidden
    dense = (layers - moe_layers) * 3 * hidden * config.intermediate_size
    weights = layers * attention + routers + dense + hidden + config.vocab_size * hidden
    return ByteModel(
        fixed=weights * bytes_per_weight,
        per_expert=3 * hidden * config.moe_intermediate_size * bytes_per_weight,
        moe_layers=moe_layers,
    )
