"""Tiny random models, a drafter whose proposals a test dictates, and a byte tokenizer.

All dimensions are unequal, weights come from numpy (nothing is compiled to make them), norm weights are not constant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import (
    DeepseekV3Config,
    Eagle3Config,
    GptOssConfig,
    Qwen3MoeConfig,
    RopeConfig,
    SamplingConfig,
    SpecConfig,
)
from ecospec_jax.decoding import DecodeState, StepPlan, Verified, Weights, commit, draft, select, verify
from ecospec_jax.generation import Answer, Batch, Generation
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.program import Program
from ecospec_jax.selection import Policy, likelihood
from ecospec_jax.tokenizer import TextStream
from ecospec_jax.tree import CandidateTree, Selection
from ecospec_jax.verification import AcceptedPath, accept_path, sequence_keys

TARGET = Qwen3MoeConfig(
    vocab_size=29,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=14,
    moe_intermediate_size=10,
    num_experts=7,
    experts_per_token=3,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_positions=96,
)
DRAFTER = Eagle3Config(
    hidden_size=12,
    target_hidden_size=12,
    intermediate_size=18,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=29,
    draft_vocab_size=17,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e3),
    boundaries=(0, 1, 2),
)
DEEPSEEK = DeepseekV3Config(
    vocab_size=29,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    q_lora_rank=9,
    kv_lora_rank=7,
    qk_nope_head_dim=6,
    qk_rope_head_dim=2,
    v_head_dim=5,
    intermediate_size=14,
    moe_intermediate_size=10,
    num_experts=8,
    experts_per_token=3,
    shared_experts=1,
    groups=4,
    groups_per_token=3,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    first_sparse_layer=1,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e3, "yarn", 4.0, 16, mscale=1.0, mscale_all_dim=1.0),
    max_positions=96,
    storage="plain",
)
GPT_OSS = GptOssConfig(
    vocab_size=29,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    moe_intermediate_size=10,
    num_experts=7,
    experts_per_token=3,
    sliding_window=4,
    sliding_layers=(0, 2),
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=24, truncate=False),
    max_positions=96,
    expert_storage="plain",
)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "processed": SamplingConfig(temperature=0.8, top_k=20, top_p=0.9),
    "plain": SamplingConfig(temperature=1.0),
}
BUCKET, CAPACITY = 32, 128
PLAIN = SpecConfig(depth=1, branch=1, budget=0)
SCRIPT_WIDTH = 4


@contextmanager
def compiling_quickly() -> Iterator[None]:
    """Compiles in half the time and runs a little slower; results are the same up to rounding."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """`compiling_quickly` throughout a test file that imports this."""
    with compiling_quickly():
        yield


def randomised(build: Callable[[], Any], seed: int) -> Any:
    """The module that `build` describes, with random weights."""
    random = np.random.default_rng(seed)
    module = nnx.eval_shape(build)
    for path, variable in parameters(module).items():
        shape, dtype = variable.get_value().shape, variable.get_value().dtype
        if path == "target_ids":  # a draft vocabulary with gaps
            value = np.sort(random.choice(module.config.vocab_size, shape, replace=False))
        elif not jnp.issubdtype(dtype, jnp.floating):
            value = np.zeros(shape)
        elif len(shape) == 1 and path.endswith("weight"):  # of a norm
            value = random.uniform(0.5, 1.5, shape)
        elif len(shape) == 1:
            value = random.normal(size=shape) * 0.3
        else:
            value = random.normal(size=shape) * shape[-1] ** -0.5
        variable.set_value(jnp.asarray(value, dtype))
    return module


@cache
def make_target(config: Qwen3MoeConfig = TARGET, seed: int = 0) -> Qwen3Moe:
    return randomised(lambda: Qwen3Moe(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed)


@cache
def make_drafter(config: Eagle3Config = DRAFTER, seed: int = 1) -> Eagle3:
    return randomised(lambda: Eagle3(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed)


class ScriptedEagle3(Eagle3):
    """EAGLE-3 with its own cache and layer, whose proposals come from a script where one is set.

    The script is indexed by (sequence, absolute position of the proposed token). One compiled program serves every
    script, since scripts are variables. A state carries its position and sequence behind the hidden channels.
    """

    def __init__(self, config: Eagle3Config, *, batch: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        shape = (batch, CAPACITY, SCRIPT_WIDTH)
        self.script_tokens = nnx.Variable(jnp.zeros(shape, jnp.int32), logical_axes=("batch", "slots", "rank"))
        self.script_log_probs = nnx.Variable(jnp.zeros(shape), logical_axes=("batch", "slots", "rank"))
        self.follows_script = nnx.Variable(jnp.zeros((), bool), logical_axes=())

    def catch_up(self, rows: Rows, features_BRF: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        state_BRH, cache = super().catch_up(rows, features_BRF, cache)
        return self._signed(state_BRH, rows), cache

    def extend(self, rows: Rows, state_BRH: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        state_BRH, cache = super().extend(rows, state_BRH[..., :-2], cache)
        return self._signed(state_BRH, rows), cache

    def propose(self, state: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        own = super().propose(state[..., :-2], k)
        position, sequence = state[..., -2].astype(jnp.int32), state[..., -1].astype(jnp.int32)
        # The entry at position p holds the token of position p + 1 and proposes that of p + 2.
        script = (
            self.script_tokens[...][sequence, position + 2, :k],
            self.script_log_probs[...][sequence, position + 2, :k],
        )
        return jax.tree.map(partial(jnp.where, self.follows_script[...]), script, own)

    def _signed(self, state_BRH: jax.Array, rows: Rows) -> jax.Array:
        sequence_BR = jnp.broadcast_to(jnp.arange(rows.tokens_BR.shape[0])[:, None], rows.tokens_BR.shape)
        signature_BR2 = jnp.stack([rows.positions_BR, sequence_BR], axis=-1).astype(state_BRH.dtype)
        return jnp.concatenate([state_BRH, signature_BR2], axis=-1)


@cache
def scripted_drafter(batch: int) -> ScriptedEagle3:
    return randomised(lambda: ScriptedEagle3(DRAFTER, batch=batch, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=1)


TARGET_DEF, TARGET_STATE = nnx.split(make_target())


def make_plan(
    method: str = "likelihood",
    spec: SpecConfig = SpecConfig(),
    sampling: SamplingConfig = SamplingConfig(),
    *,
    batch: int = 3,
    eos_ids: tuple[int, ...] = (),
    policy: Policy = likelihood,
    target: nnx.GraphDef = TARGET_DEF,
) -> StepPlan:
    """A plan for a tiny target and, unless `method` is `ar`, a scripted drafter for this batch size."""
    if method == "ar":
        return StepPlan(target, None, likelihood, PLAIN, sampling, eos_ids)
    return StepPlan(target, nnx.graphdef(scripted_drafter(batch)), policy, spec, sampling, eos_ids)


compiled = cache(Program)


def make_program(*arguments: Any, **options: Any) -> Program:
    """The compiled functions of `make_plan`, shared by all tests of a process."""
    return compiled(make_plan(*arguments, **options))


@dataclass
class Script:
    """What a scripted drafter proposes: `[batch, CAPACITY, SCRIPT_WIDTH]` each."""

    tokens: np.ndarray
    log_probs: np.ndarray


def weights_with(script: Script | None = None, *, batch: int = 3, target: nnx.State = TARGET_STATE) -> Weights:
    """Weights of target and scripted drafter; without a script the drafter proposes what its random weights say."""
    drafter = scripted_drafter(batch)
    state = jax.tree.map(lambda leaf: leaf, nnx.state(drafter))
    if script is not None:
        state["script_tokens"].set_value(jnp.asarray(script.tokens, jnp.int32))
        state["script_log_probs"].set_value(jnp.asarray(script.log_probs, jnp.float32))
        state["follows_script"].set_value(jnp.asarray(True))
    return Weights(target, state)


def plain_weights(target: nnx.State = TARGET_STATE) -> Weights:
    return Weights(target, None)


def prompt(length: int, seed: int, vocabulary: int = TARGET.vocab_size) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


PROMPTS = [prompt(length, seed) for length, seed in ((7, 10), (3, 11), (12, 12))]


def decode(
    program: Program,
    weights: Weights,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    seeds: Sequence[tuple[int, int]] | None = None,
    max_new_tokens: int = 20,
    batch_size: int | None = None,
) -> tuple[list[Generation], DecodeStats]:
    """Decodes one batch to its end."""
    seeds = [(5, index) for index in range(len(prompts))] if seeds is None else seeds
    batch = Batch(
        program,
        weights,
        prompts,
        seeds,
        max_new_tokens=max_new_tokens,
        capacity=CAPACITY,
        batch_size=len(prompts) if batch_size is None else batch_size,
    )
    answers = [Answer(None, (), program.plan.eos_ids) for _ in prompts]
    for _ in batch.run(answers, steps_per_call=32):
        pass
    return [answer.result() for answer in answers], batch.stats()


def tokens_of(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.tokens for generation in generations]


def prefilled(
    program: Program,
    weights: Weights,
    sequences: Sequence[Sequence[int]] = PROMPTS,
    *,
    limits: Sequence[int] | None = None,
    seed: int = 5,
) -> DecodeState:
    """The state after prefill."""
    batch = len(sequences)
    tokens = np.zeros((batch, BUCKET), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = jnp.array([len(sequence) for sequence in sequences], jnp.int32)
    limits_B = jnp.full(batch, BUCKET, jnp.int32) if limits is None else jnp.array(limits, jnp.int32)
    keys = sequence_keys(jnp.full(batch, seed), jnp.arange(batch))
    return program.prefill(weights, jnp.asarray(tokens), lengths, limits_B, keys, capacity=CAPACITY)


@dataclass
class Observed:
    """What one step saw and did."""

    tree: CandidateTree
    selection: Selection
    verified: Verified
    path: AcceptedPath
    after: DecodeState


jax.tree_util.register_dataclass(Observed)


@cache
def observer(plan: StepPlan) -> Callable[[Weights, DecodeState], Observed]:
    """One step, with everything in between; the state is not donated."""

    def observe(weights: Weights, state: DecodeState) -> Observed:
        tree, drafted = draft(plan, weights, state)
        selection = select(plan, drafted, tree, None)
        verified, checked = verify(plan, weights, drafted, tree, selection)
        path = accept_path(verified.tree, verified.drawn_BR, plan.spec.max_emitted)
        return Observed(tree, selection, verified, path, commit(plan, checked, verified, None))

    return jax.jit(observe)


def answers_script(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, right: float, first: float, seed: int = 3
) -> Script:
    """Proposes the true continuation with probability `right`, at the first place with probability `first`.

    Where it is not first it is second, with a lower or an equal log-probability.
    """
    random = np.random.default_rng(seed)
    shape = (len(prompts), CAPACITY, SCRIPT_WIDTH)
    tokens = random.integers(0, TARGET.vocab_size, shape)
    log_probs = np.sort(random.choice([-0.25, -0.5, -0.75, -1.0, -1.5, -2.0], shape))[..., ::-1]
    for sequence, (start, answer) in enumerate(zip(prompts, answers, strict=True)):
        for index, token in enumerate(answer):
            at = (sequence, len(start) + index)
            wrong = [other for other in range(TARGET.vocab_size) if other != token]
            tokens[at] = random.choice(wrong, SCRIPT_WIDTH, replace=False)
            if random.random() < right:
                tokens[at][0 if random.random() < first else 1] = token
    return Script(tokens, log_probs)


class ByteTokenizer:
    """Stands in for `ecospec_jax.tokenizer.Tokenizer`. Tokens are a few bytes each, so characters span tokens."""

    SPECIAL = 0

    def __init__(self, vocabulary: int = TARGET.vocab_size) -> None:
        letters = [bytes([97 + i]) for i in range(14)] + [b"no", b"pq", b"rst", b" u", b"v ", b"\n"]
        halves = [b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80"]
        self._bytes = [b""] + (letters + halves)[: vocabulary - 1]
        self._bytes += [b"w%d" % i for i in range(vocabulary - len(self._bytes))]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        return [self._bytes.index(bytes([byte])) for byte in text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [self.SPECIAL, *(token for message in messages for token in self.encode(message["content"]))]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[token] for token in ids).decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        return TextStream(self)  # pyright: ignore[reportArgumentType]
