"""Configurations of expert predictors."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pydantic

from ecospec_jax.config import STRICT, ModelConfig, RopeConfig, RoutingShape, require


@dataclass(frozen=True)
class BackboneConfig:
    """Dense Qwen3 or Qwen2 transformer (docs/formats.md A.5, A.6), without embedding and head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    family: Literal["qwen3", "qwen2"] = "qwen3"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        require(self.num_heads % self.num_kv_heads == 0, "backbone num_heads must be a multiple of num_kv_heads")


@dataclass(frozen=True)
class TargetEmbedding:
    """Bridge: the target's token embedding, frozen, through a learned projection."""

    kind: Literal["target_embedding"] = "target_embedding"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class SharedVocabulary:
    """Bridge: the backbone's own token embedding, which knows the target's ids."""

    kind: Literal["shared"] = "shared"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class Retokenise:
    """Bridge: the backbone's own token embedding, which reads each target token as tokens of the backbone.

    Attributes:
        vocab_size: the backbone's vocabulary.
        subtokens: most of its tokens that a target token is read as.
    """

    vocab_size: int
    subtokens: int
    kind: Literal["retokenise"] = "retokenise"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        require(self.subtokens >= 1, f"a token is read as at least 1 sub-token, not {self.subtokens}")


Bridge = Annotated[TargetEmbedding | SharedVocabulary | Retokenise, pydantic.Field(discriminator="kind")]


@dataclass(frozen=True)
class BackbonePredictorConfig:
    """Trained expert predictor: token embedding, backbone, one head per MoE layer.

    Attributes:
        vocab_size: the target's vocabulary.
        embedding_size: width of the token embedding.
        backbone: the transformer.
        routing: what is predicted.
        bridge: how the backbone reads the target's tokens.
    """

    vocab_size: int
    embedding_size: int
    backbone: BackboneConfig
    routing: RoutingShape
    bridge: Bridge = TargetEmbedding()
    family: Literal["backbone"] = "backbone"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        width, hidden = self.embedding_size, self.backbone.hidden_size
        require(
            isinstance(self.bridge, TargetEmbedding) or width == hidden,
            f"the backbone's own embedding has its hidden size {hidden}, not {width}",
        )


@dataclass(frozen=True)
class TokenTableConfig:
    """Predictor that looks experts up by token id."""

    vocab_size: int
    routing: RoutingShape
    family: Literal["token_table"] = "token_table"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class FrequencyConfig:
    """Predictor that names each layer's most frequent experts."""

    routing: RoutingShape
    family: Literal["frequency"] = "frequency"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class TokenPairsConfig:
    """Predictor that looks experts up by a token and the one before it.

    Attributes:
        vocab_size: the target's vocabulary.
        pairs: how many pairs are known; a token behind any other is looked up alone.
        routing: what is predicted.
    """

    vocab_size: int
    pairs: int
    routing: RoutingShape
    family: Literal["token_pairs"] = "token_pairs"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class DrafterFeaturesConfig:
    """Predictor with low-rank heads on the drafter's states.

    Attributes:
        vocab_size: the target's vocabulary.
        embedding_size: width of the token embedding, which is the target's own, frozen.
        state_size: width of the drafter's states.
        rank: width between them and the experts.
        drafter_hash: whose states they are (`Manifest.drafter_hash`).
        routing: what is predicted.
    """

    vocab_size: int
    embedding_size: int
    state_size: int
    rank: int
    drafter_hash: str
    routing: RoutingShape
    family: Literal["drafter_features"] = "drafter_features"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class TargetGatesConfig:
    """Predictor that guesses what the target's routers will see from the drafter's states, and asks the routers.

    Attributes:
        target: whose routers are used, frozen.
        state_size: width of the drafter's states.
        rank: width between them and the guess.
        drafter_hash: whose states they are (`Manifest.drafter_hash`).
    """

    target: ModelConfig
    state_size: int
    rank: int
    drafter_hash: str
    family: Literal["target_gates"] = "target_gates"
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    @property
    def embedding_size(self) -> int:
        """The target's."""
        return self.target.hidden_size

    @property
    def routing(self) -> RoutingShape:
        """The target's."""
        return RoutingShape.of(self.target)


PredictorConfig = (
    BackbonePredictorConfig
    | TokenTableConfig
    | TokenPairsConfig
    | FrequencyConfig
    | DrafterFeaturesConfig
    | TargetGatesConfig
)
