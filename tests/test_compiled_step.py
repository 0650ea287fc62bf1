"""Guards on what XLA makes of a step: no copy of expert weights or of a cache, and few compilations."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ecospec_jax import Decoder, decoding
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.calibration import Calibration
from ecospec_jax.config import Eagle3Config, Qwen3MoeConfig, RopeConfig, RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.decoding import StepPlan, Weights
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.predictor_config import BackboneConfig, BackbonePredictorConfig
from ecospec_jax.program import Program
from ecospec_jax.rate import rate
from ecospec_jax.selection import likelihood
from tests import tiny

# One layer's experts: 31 MB in f32, 16 MB in bf16. One cache buffer: 21 MB. Everything else is small.
BATCH, CAPACITY = 2, 8192
TARGET = Qwen3MoeConfig(
    vocab_size=301,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=160,
    intermediate_size=224,
    moe_intermediate_size=128,
    num_experts=160,
    experts_per_token=4,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_positions=CAPACITY,
)
DRAFTER = Eagle3Config(
    hidden_size=128,
    target_hidden_size=128,
    intermediate_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=40,
    vocab_size=301,
    draft_vocab_size=201,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    boundaries=(0, 1, 2),
)

BACKBONE = BackboneConfig(
    hidden_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=40,
    intermediate_size=192,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
)
PREDICTOR = BackbonePredictorConfig(301, 128, BACKBONE, RoutingShape.of(TARGET))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*itertools.product(["ar", "likelihood"], ["float32", "bfloat16"]), ("rate", "float32")],
)
def test_a_step_copies_no_expert_weights_and_no_cache(method: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "CATCH_UP", 8)  # so that the rows of a catch-up are small beside the caches
    target = nnx.eval_shape(lambda: Qwen3Moe(TARGET, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    drafter = nnx.eval_shape(lambda: Eagle3(DRAFTER, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    (graph, target_state), (head_graph, head_state) = nnx.split(target), nnx.split(drafter)
    if method == "ar":
        plan = StepPlan(graph, None, likelihood, tiny.PLAIN, SamplingConfig(), (3,))
        weights = Weights(target_state, None)
    else:
        plan = StepPlan(graph, head_graph, likelihood, SpecConfig(), SamplingConfig(0.8, 20, 0.9), (3,))
        weights = Weights(target_state, head_state)
    adaptation = None
    if method == "rate":
        predictor = nnx.eval_shape(lambda: BackbonePredictor(PREDICTOR, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
        predictor_graph, predictor_state = nnx.split(predictor)
        plan = replace(plan, policy=rate, predictor=predictor_graph, cost=byte_model(TARGET, 4))
        plan = replace(plan, calibrated=True, adaptive=True, spec=SpecConfig(depth=2, budget=2, probe_every=4))
        weights = replace(weights, predictor=predictor_state)
        fresh = partial(Adaptation.fresh, plan.cost, PREDICTOR.routing, BATCH)
        adaptation = jax.eval_shape(lambda: fresh(Calibration.trusting()))
    program = Program(plan)

    shape = jax.ShapeDtypeStruct
    numbers = shape((BATCH,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    state = jax.eval_shape(
        lambda *arguments: program.prefill(*arguments[:-1], capacity=CAPACITY, adaptation=arguments[-1]),
        *(weights, shape((BATCH, 32), jnp.int32), numbers, numbers, keys, adaptation),
    )
    compiled = program.decode_steps.lower(weights, state, shape((), jnp.int32)).compile()
    memory = compiled.memory_analysis()

    size = lambda leaf: leaf.size * leaf.dtype.itemsize  # noqa: E731
    experts_bytes = 3 * size(target.layers[0].moe.experts.gate.weight.get_value())
    buffer_bytes, draft_buffer_bytes = size(state.target_cache.keys[0]), BATCH * 2 * CAPACITY * 40 * 4
    # all rows, heads and slots; after plain steps, the entries that wait are rows
    scores_bytes = BATCH * 4 * (decoding.CATCH_UP if method == "rate" else 5) * CAPACITY * 4
    # Beyond 16 rows dense layers are XLA's, which on CPU widens bf16 weights ahead of the loop: few bytes, no experts
    dense_bytes = 3.5e6 if dtype == "bfloat16" and method == "rate" else 0
    few_bytes = 3 * scores_bytes + dense_bytes
    assert few_bytes < 0.5 * min(experts_bytes, buffer_bytes)
    assert memory.temp_size_in_bytes < few_bytes
    # The caches are updated in place: what goes in is what comes out.
    assert memory.alias_size_in_bytes >= 4 * buffer_bytes + (0 if method == "ar" else 2 * draft_buffer_bytes)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e5


def test_what_is_learned_survives_an_abandoned_stream() -> None:
    """Steps may reuse the memory of their state, but not of what the program keeps for the next batch."""
    with tiny.compiling_quickly():
        decoder = Decoder(tiny.make_target(), tiny.make_drafter(), eos_ids=(), tokenizer=tiny.ByteTokenizer())  # pyright: ignore[reportArgumentType]
        stream = decoder.stream(tiny.PROMPTS[0], method="rate-oracle", max_new_tokens=30)
        next(stream), next(stream)
        stream.close()
        program, _ = decoder.program("rate-oracle", SpecConfig(), SamplingConfig())
        assert int(program.adaptation.trials) == 0  # nothing was booked
        answers = decoder.generate(tiny.PROMPTS, method="rate-oracle", max_new_tokens=30)
        assert int(program.adaptation.trials) > 0
        assert answers.generations == decoder.generate(tiny.PROMPTS, method="ar", max_new_tokens=30).generations
        assert program.decode_steps._cache_size() == 1  # pyright: ignore


@tiny.compiling_quickly()
def test_one_compilation_for_all_prompts_of_a_bucket() -> None:
    """Of different lengths, limits and seeds, streamed or not, ended on the host by stop strings, in padded batches."""
    decoder = Decoder(tiny.make_target(), tiny.make_drafter(), eos_ids=(1,), tokenizer=tiny.ByteTokenizer())  # pyright: ignore[reportArgumentType]
    sampling = SamplingConfig(temperature=1.0)
    program, _ = decoder.program("likelihood", SpecConfig(), sampling)
    prompts = [tiny.prompt(length, seed=length) for length in (9, 14, 20, 27, 32)]  # with 20 more: 64 slots

    def compilations() -> tuple[int, int]:
        return program.prefill._cache_size(), program.decode_steps._cache_size()  # pyright: ignore

    decoder.generate(prompts[:1], sampling=sampling, max_new_tokens=20)
    assert compilations() == (1, 1)
    decoder.generate(prompts, sampling=sampling, max_new_tokens=20, seed=3)
    decoder.generate(prompts, sampling=sampling, max_new_tokens=24, seed=[1, 2, 3, 4, 5], stop=["a", "n"])
    for prompt in prompts:
        for _ in decoder.stream(prompt, sampling=sampling, max_new_tokens=20, stop=["o"]):
            pass
    assert compilations() == (1, 1)
    assert decoder.program("likelihood", SpecConfig(), sampling)[0] is program

    # Another batch size is another compilation, one for full and padded batches; ends on the host leave it at that.
    answers = decoder.generate(
        prompts, sampling=sampling, max_new_tokens=20, batch_size=3, stop=["a"], ignore_eos=False
    ).generations
    assert "stop" in {answer.finish for answer in answers}
    assert compilations() == (2, 2)
    decoder.generate(prompts, sampling=sampling, max_new_tokens=5, batch_size=3)
    assert compilations() == (2, 2)
