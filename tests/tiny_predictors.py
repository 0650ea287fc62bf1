"""Tiny predictors, a target with two words of experts a layer, and decoding of one batch with any of them.

A `Cast` holds every kind of predictor and lets one speak, so one compiled program serves them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ecospec_jax import decoding, expert_bits, program
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.checkpoint import (
    FORMAT,
    Manifest,
    borrowed_parameters,
    parameters,
    piece_name,
    save_piece,
    write_manifest,
)
from ecospec_jax.config import Qwen3MoeConfig, RopeConfig, RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.decoding import DecodeState, StepPlan, Verified, Weights
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.predictor import Evidence, Frequency, Oracle, Previous, TokenTable
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.predictor_checkpoint import save_predictors
from ecospec_jax.predictor_config import (
    BackboneConfig,
    BackbonePredictorConfig,
    FrequencyConfig,
    PredictorConfig,
    Retokenise,
    SharedVocabulary,
    TokenTableConfig,
)
from ecospec_jax.selection import ExpertForecast, Policy, cost_aware, likelihood
from ecospec_jax.tree import CandidateTree, Selection
from ecospec_jax.verification import sequence_keys
from tests import tiny
from tests.tiny import BUCKET, PROMPTS, Script

TARGET = replace(tiny.TARGET, num_experts=37)
ROUTING = RoutingShape.of(TARGET)
BACKBONE = BackboneConfig(
    hidden_size=10,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=14,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=2e3),
)
PREDICTOR = BackbonePredictorConfig(TARGET.vocab_size, TARGET.hidden_size, BACKBONE, ROUTING)
OWN = replace(PREDICTOR, embedding_size=BACKBONE.hidden_size, bridge=SharedVocabulary())
BRIDGES = {
    "target_embedding": PREDICTOR,
    "shared": OWN,
    "retokenise": replace(OWN, bridge=Retokenise(vocab_size=23, subtokens=3)),
}
NEW_TOKENS = 20
LONGEST = 12 + NEW_TOKENS  # of `PROMPTS` and their answers
PLAIN = SpecConfig(depth=1, branch=1, budget=0)


def make_target(config: Qwen3MoeConfig = TARGET) -> Qwen3Moe:
    return tiny.make_target(config, seed=35)


def make_backbone(config: BackbonePredictorConfig = PREDICTOR, seed: int = 2) -> BackbonePredictor:
    model = tiny.randomised(lambda: BackbonePredictor(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed)
    if isinstance(config.bridge, Retokenise):
        random, vocab_size, most = np.random.default_rng(seed), config.bridge.vocab_size, config.bridge.subtokens
        ids_VS = random.integers(0, vocab_size, (config.vocab_size, most), np.int32)
        model.subtokens.ids_VS.set_value(jnp.asarray(ids_VS))
        model.subtokens.counts_V.set_value(jnp.asarray(random.integers(1, most + 1, config.vocab_size, np.int32)))
    return model


def random_ids(shape: tuple[int, ...], routing: RoutingShape, seed: int) -> np.ndarray:
    """Sets of `k` expert ids, `[*shape, k]`."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((*shape, routing.experts)))[..., : routing.k].astype(np.int32)


def make_table(ids_VLK: np.ndarray, routing: RoutingShape = ROUTING) -> TokenTable:
    table = TokenTable(TokenTableConfig(len(ids_VLK), routing))
    table.bits_VLW.set_value(expert_bits.from_ids(jnp.asarray(ids_VLK), routing.experts))
    return table


def make_frequency(ids_LK: np.ndarray, routing: RoutingShape = ROUTING) -> Frequency:
    frequency = Frequency(FrequencyConfig(routing))
    frequency.bits_LW.set_value(expert_bits.from_ids(jnp.asarray(ids_LK), routing.experts))
    return frequency


class Cast(nnx.Module):
    """Every predictor, and three that lie: all bits, none, and random ones in each call. `speaker` chooses."""

    SPEAKERS = ("backbone", "token_table", "frequency", "previous", "oracle", "all", "none", "random")

    def __init__(self) -> None:
        self.backbone = make_backbone()
        self.token_table = make_table(random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, 3))
        self.frequency = make_frequency(random_ids((ROUTING.layers,), ROUTING, 4))
        self.previous, self.oracle = Previous(), Oracle()
        self.speaker = nnx.Variable(jnp.zeros((), jnp.int32))

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        return self.backbone.empty_cache(batch, capacity)

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[jax.Array, KVCache | None]:
        sets_BRLW, cache = self.backbone(rows, cache, evidence)
        said = [lambda: sets_BRLW]
        for other in (self.token_table, self.frequency, self.previous, self.oracle):
            said.append(lambda other=other: other(rows, None, evidence)[0])
        said += [
            lambda: jnp.full_like(sets_BRLW, 0xFFFFFFFF),
            lambda: jnp.zeros_like(sets_BRLW),
            lambda: jax.random.bits(jax.random.key(jnp.sum(rows.context_B)), sets_BRLW.shape, jnp.uint32),
        ]
        return lax.switch(self.speaker[...], said), cache


TARGET_DEF, TARGET_STATE = nnx.split(make_target())
CAST_DEF, CAST_STATE = nnx.split(Cast())


def make_plan(
    spec: SpecConfig = SpecConfig(),
    sampling: SamplingConfig = SamplingConfig(),
    *,
    batch: int = 3,
    predictor: nnx.GraphDef | None = CAST_DEF,
    policy: Policy = cost_aware,
    target: nnx.GraphDef = TARGET_DEF,
    eos_ids: tuple[int, ...] = (),
) -> StepPlan:
    """A plan with a scripted drafter for this batch size."""
    drafter = nnx.graphdef(tiny.scripted_drafter(batch))
    return StepPlan(target, drafter, policy, spec, sampling, eos_ids, predictor)


def make_weights(
    speaker: str | None = None,
    script: Script | None = None,
    *,
    batch: int = 3,
    predictor: nnx.State | None = None,
    target: nnx.State = TARGET_STATE,
) -> Weights:
    """The cast with this speaker, or the weights of a predictor alone."""
    drafter = tiny.weights_with(script, batch=batch).drafter
    if speaker is not None:
        predictor = jax.tree.map(lambda leaf: leaf, CAST_STATE)
        predictor["speaker"].set_value(jnp.int32(Cast.SPEAKERS.index(speaker)))
    return Weights(target, drafter, predictor)


_prefill = jax.jit(decoding.prefill, static_argnames=("plan", "capacity"))
decode_steps = jax.jit(program.decode_steps, static_argnames="plan")


def prefilled(
    plan: StepPlan,
    weights: Weights,
    sequences: Sequence[Sequence[int]] = PROMPTS,
    *,
    limits: Sequence[int] | None = None,
    seed: int = 5,
    adaptation: Adaptation | None = None,
) -> DecodeState:
    """The state after prefill, with no cache slot to spare."""
    batch = len(sequences)
    tokens = np.zeros((batch, BUCKET), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    limits_B = lengths + NEW_TOKENS if limits is None else np.asarray(limits, np.int32)
    keys_B = sequence_keys(jnp.full(batch, seed), jnp.arange(batch))
    assert max(map(len, PROMPTS)) + NEW_TOKENS == LONGEST <= BUCKET
    capacity = LONGEST + plan.scratch_slots()
    arrays = jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(limits_B), keys_B
    return _prefill(plan, weights, *arrays, capacity=capacity, adaptation=adaptation)


def decode(
    plan: StepPlan, weights: Weights, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> tuple[list[tuple[int, ...]], DecodeStats]:
    """Decodes one batch to its end: the answers and the figures."""
    state = decode_steps(plan, weights, prefilled(plan, weights, prompts, **options), jnp.int32(10_000))
    return answers_of(state, prompts), DecodeStats.create(state.counters, len(prompts), 0.0, 1.0)


def answers_of(state: DecodeState, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """What was generated behind each prompt."""
    tokens_BS, length_B = jax.device_get((state.tokens_BS, state.length_B))
    return [
        tuple(row[len(prompt) : length + 1].tolist())
        for row, prompt, length in zip(tokens_BS, prompts, length_B, strict=True)
    ]


@cache
def plain_answers(sampling: SamplingConfig = SamplingConfig()) -> list[tuple[int, ...]]:
    """What plain decoding gives to `PROMPTS`; an answer does not depend on its batch mates."""
    return decode(StepPlan(TARGET_DEF, None, likelihood, PLAIN, sampling, ()), Weights(TARGET_STATE, None))[0]


def helpful(sampling: SamplingConfig = SamplingConfig(), batch: int = 3) -> Script:
    """A drafter that is often right, and not always in the first place."""
    return tiny.answers_script(PROMPTS[:batch], plain_answers(sampling)[:batch], right=0.9, first=0.6)


@dataclass
class Observed:
    """What one step saw and did."""

    tree: CandidateTree
    forecast: ExpertForecast | None
    selection: Selection
    verified: Verified
    after: DecodeState


jax.tree_util.register_dataclass(Observed)


def _observe(plan: StepPlan, weights: Weights, state: DecodeState) -> Observed:
    tree, drafted = decoding.draft(plan, weights, state)
    forecast, predicted = decoding.predict(plan, weights, drafted, tree)
    selection = decoding.select(plan, state, tree, forecast)
    verified, checked = decoding.verify(plan, weights, predicted, tree, selection)
    return Observed(tree, forecast, selection, verified, decoding.commit(plan, checked, verified, forecast))


observe = jax.jit(_observe, static_argnames="plan")


def sets_of(bits_LW: Any) -> frozenset[tuple[int, int]]:
    """The (layer, expert) pairs of bit words, one bit at a time."""
    return frozenset(
        (layer, 32 * word + bit)
        for layer, words in enumerate(np.asarray(bits_LW).tolist())
        for word, value in enumerate(words)
        for bit in range(32)
        if value >> bit & 1
    )


def token_routed(target: Qwen3Moe) -> Qwen3Moe:
    """The target with a residual stream that is the token's embedding everywhere, so that routing knows no context."""
    rigged = nnx.clone(target)
    for layer in rigged.layers:
        outputs = [
            layer.attention.o.weight,
            layer.mlp.down.weight if layer.moe is None else layer.moe.experts.down.weight,
        ]
        for weight in outputs:
            weight.set_value(jnp.zeros_like(weight.get_value()))
    return rigged


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """One id a letter, without merges; the ids of `TARGET`'s vocabulary that it does not have decode to nothing."""
    vocabulary = {token: i for i, token in enumerate("abcdefghijklmnopqrstuvwx\u0120")}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_converted(folder: Path, target: Qwen3Moe | None = None, eos_ids: tuple[int, ...] = ()) -> tuple[Path, str]:
    """A folder as `python -m convert` leaves it, and the target's hash."""
    target = make_target() if target is None else target
    pieces = {}
    for role, module, config in (("target", target, target.config), ("drafter", tiny.make_drafter(), tiny.DRAFTER)):
        tensors: dict[str, dict[str, np.ndarray]] = {}
        for path, variable in parameters(module).items():
            if path not in borrowed_parameters(config):
                tensors.setdefault(piece_name(role, path), {})[path] = np.asarray(variable.get_value())
        pieces |= {name: save_piece(folder / name, values) for name, values in tensors.items()}
    manifest = Manifest(FORMAT, "tiny", "tiny", "0" * 64, target.config, tiny.DRAFTER, eos_ids, pieces, {}, "today")
    write_manifest(folder, manifest)
    write_tokenizer(folder / "tokenizer")
    return folder, manifest.target_hash


def some_predictors() -> dict[str, tuple[PredictorConfig, Any]]:
    """A backbone that ends up with the target's embedding, a table and a prior, with their configs."""
    backbone = make_backbone()
    backbone.embedding.weight.set_value(make_target().embedding.weight.get_value())
    table = make_table(random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, 0))
    frequency = make_frequency(random_ids((ROUTING.layers,), ROUTING, 1))
    return {
        "backbone": (PREDICTOR, backbone),
        "token_table": (TokenTableConfig(TARGET.vocab_size, ROUTING), table),
        "frequency": (FrequencyConfig(ROUTING), frequency),
    }


def write_predictors(folder: Path, target_hash: str, dtype: Any = jnp.float32) -> Path:
    """A folder of `some_predictors` as training leaves it."""
    overlap = {"backbone": (0.75, 0.5), "token_table": (0.25, 0.125)}
    models, dtype = some_predictors(), jnp.dtype(dtype)
    save_predictors(folder, models, target_hash=target_hash, overlap=overlap, recipe={"steps": "3"}, dtype=dtype)
    return folder
