"""Every layout gives the tokens of one device, on eight virtual ones: caches lie where it says, no weights travel.

One process a family, since the number of devices is fixed when JAX starts. Compilation takes the time, so not every
combination is tried: in `CASES` each layout occurs, and each family meets three of them, both methods and two batch
sizes or more. Plain answers of one device are the reference for all, since tokens depend neither on the method nor on
the batch.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ecospec_jax.checkpoint import borrow, parameters
from ecospec_jax.config import MtpConfig, RopeConfig, RoutingShape, SpecConfig
from ecospec_jax.decoding import DecodeState, StepPlan, Weights
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.models.mtp import Mtp
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.program import Program
from ecospec_jax.selection import cost_aware, likelihood
from ecospec_jax.sharding import Layout, Placement, spread
from experiments.mesh_layouts import collective_results
from tests import tiny, tiny_predictors

ROOT = Path(__file__).parents[1]
SPEC = SpecConfig(depth=3, branch=4, budget=8)
NEW_TOKENS = 12
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((7, 3, 12, 5, 9, 4, 6, 11))]
# Whatever is split divides among eight; every split matrix is larger than any activation of a step.
SIZES = {"vocab_size": 64, "hidden_size": 40, "num_heads": 8, "moe_intermediate_size": 64, "num_experts": 16}
FAMILIES = {
    "qwen3_moe": (Qwen3Moe, replace(tiny.TARGET, num_kv_heads=4, head_dim=10, **SIZES)),
    "gpt_oss": (GptOss, replace(tiny.GPT_OSS, num_kv_heads=8, head_dim=10, rope=RopeConfig(theta=1e4), **SIZES)),
    "deepseek_v3": (DeepseekV3, replace(tiny.DEEPSEEK, intermediate_size=56, qk_nope_head_dim=14, **SIZES)),
}
CASES = {  # layout, method, batch size
    "qwen3_moe": [("dp_attn+ep4", "ar", 4), ("tp8", "ecospec", 1), ("tp4ep2", "ecospec", 4)],
    "gpt_oss": [("ep8", "ecospec", 4), ("tp2ep4", "ecospec", 1), ("tp8", "ar", 4)],
    "deepseek_v3": [("dp_attn+ep8", "ar", 8), ("dp_attn+tp2ep2", "ecospec", 4), ("ep8", "ecospec", 1)],
}
KV_HEADS = {("qwen3_moe", "tp8"): 4}  # on each device, where it is not one


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_tokens_of_one_device(family: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.test_mesh_tokens", family]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join(map(str, case)) for case in CASES[family]]


@dataclass
class Models:
    """A target on one device, and the drafter and predictor that go with it."""

    target: Any
    drafter: Any
    predictor: Any


def make(family: str, batch: int) -> Models:
    kind, config = FAMILIES[family]
    target = tiny.randomised(lambda: kind(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=4)
    routing = RoutingShape.of(config)
    table = tiny_predictors.make_table(
        tiny_predictors.random_ids((config.vocab_size, routing.layers), routing, 3), routing
    )
    if family == "deepseek_v3" and batch == 1:
        drafter = tiny.randomised(lambda: Mtp(MtpConfig(config), dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=42)
    else:
        size = config.hidden_size
        head = replace(tiny.DRAFTER, hidden_size=size, target_hidden_size=size, vocab_size=config.vocab_size)
        build = lambda: tiny.ScriptedEagle3(head, batch=batch, dtype=jnp.float32, rngs=nnx.Rngs(0))  # noqa: E731
        drafter = tiny.randomised(build, seed=1)
    return Models(target, drafter, table)


def place(module: nnx.Module, placement: Placement) -> None:
    """Puts a module's values where a layout has them."""
    spread(module, placement)
    for variable in parameters(module).values():
        value = variable.get_value()
        variable.set_value(
            jax.device_put(value, placement.sharding(variable.get_metadata()["logical_axes"], value.shape))
        )


def least_split(module: nnx.Module) -> int:
    """Numbers of the smallest matrix that no device has as a whole."""
    values = [variable.get_value() for path, variable in parameters(module).items() if path.endswith("weight")]
    return min(value.size for value in values if not value.sharding.is_fully_replicated)


class Watched:
    """The compiled loop over steps: what it leaves must lie where it found it, and what was compiled can be read."""

    def __init__(self, decode_steps: Any) -> None:
        self.decode_steps, self.hlo = decode_steps, ""
        self.last: DecodeState

    def __call__(self, weights: Weights, state: DecodeState, steps: jax.Array) -> DecodeState:
        if not self.hlo:
            self.compiled = self.decode_steps.lower(weights, state, steps).compile()
            self.hlo = self.compiled.as_text()
        before = jax.tree.map(lambda part: part.sharding, state)
        after = self.compiled(weights, state, steps)
        moved = jax.tree.map(lambda at, part: not part.sharding.is_equivalent_to(at, part.ndim), before, after)
        assert not any(jax.tree.leaves(moved)), moved
        self.last = after
        return after


def assert_no_weights_travel(hlo: str, least: int) -> None:
    kinds = set()
    for kind, results in collective_results(hlo):
        kinds.add(kind)
        if kind != "all-reduce":
            assert all(size < least for _, size in results), (kind, results, least)
    assert "all-reduce" in kinds  # of the experts, so collectives were found


def assert_cache_is_split(family: str, layout: str, state: DecodeState) -> None:
    devices = Layout.named(layout).devices
    for buffer in [*state.target_cache.keys, *state.target_cache.values]:
        batch, heads, *_ = buffer.shape
        expected = batch, KV_HEADS.get((family, layout), 1)
        if layout.startswith("dp_attn"):
            expected = batch // devices, heads
        shards = buffer.addressable_shards
        assert len(shards) == devices and {shard.data.shape for shard in shards} == {(*expected, *buffer.shape[2:])}


@tiny.compiling_quickly()
def compare(family: str) -> None:
    graph, values = nnx.split(make(family, 1).target)
    alone = Program(StepPlan(graph, None, likelihood, tiny.PLAIN, tiny.SAMPLINGS["greedy"], ()))
    reference, _ = tiny.decode(alone, Weights(values, None), PROMPTS, max_new_tokens=NEW_TOKENS)
    answers = tiny.tokens_of(reference)
    assert len(set(answers)) == len(answers)
    for layout, method, batch in CASES[family]:
        placement = Placement.create(layout).for_model(FAMILIES[family][1])
        models = make(family, batch)
        prompts = PROMPTS[:batch]
        place(models.target, placement)
        place(models.drafter, placement.replicated)
        place(models.predictor, placement.replicated)
        if isinstance(models.drafter, Mtp):
            borrow(models.drafter, models.drafter.config, models.target)
        else:
            script = tiny.answers_script(prompts, answers[:batch], right=0.9, first=0.6)
            models.drafter.script_tokens.set_value(jnp.asarray(script.tokens, jnp.int32))
            models.drafter.script_log_probs.set_value(jnp.asarray(script.log_probs, jnp.float32))
            models.drafter.follows_script.set_value(jnp.asarray(True))
        (target, values), (drafter, head), (predictor, table) = map(
            nnx.split, (models.target, models.drafter, models.predictor)
        )
        plan = StepPlan(target, None, likelihood, tiny.PLAIN, tiny.SAMPLINGS["greedy"], (), placement=placement)
        weights = Weights(values, None)
        if method == "ecospec":
            plan = replace(plan, drafter=drafter, predictor=predictor, policy=cost_aware, spec=SPEC)
            weights = Weights(values, head, table)
        program = Program(plan)
        watched = Watched(program.decode_steps)
        program.decode_steps = watched  # pyright: ignore[reportAttributeAccessIssue]
        ours, stats = tiny.decode(program, weights, prompts, max_new_tokens=NEW_TOKENS)
        assert tiny.tokens_of(ours) == answers[:batch], (layout, method, batch)
        assert method == "ar" or isinstance(models.drafter, Mtp) or stats.tau > 1.5
        assert_no_weights_travel(watched.hlo, least_split(models.target))
        assert_cache_is_split(family, layout, watched.last)
        print(layout, method, batch, flush=True)


if __name__ == "__main__":
    compare(*sys.argv[1:])
