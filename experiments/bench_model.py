"""A whole Qwen3-MoE model on one CPU thread: a verification against what the thread can read, decoding against peers.

    python -m experiments.bench_model

Run it on an idle machine. The model has random weights of the size asked for; the peers get the same ones. llama.cpp
takes part where `llama-cpp-python` and `gguf` are installed; its copy of the weights is written to a temporary file.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax import lax
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Column, Table

from ecospec_jax import Decoder, SamplingConfig, SpecConfig, UserError
from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.decoding import DecodeState, StepPlan, Weights, prefill, verify
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.expert_bits import count, union
from ecospec_jax.kernels import native
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.presets import get_preset
from ecospec_jax.selection import likelihood
from ecospec_jax.tree import Selection, build_tree
from ecospec_jax.verification import sequence_keys
from experiments.environment import environment
from experiments.kernel_peers import package_versions
from experiments.model_peers import PEERS, open_peer
from experiments.one_thread import one_thread
from experiments.options import require_positive
from experiments.read_ceiling import ReadCeiling, beyond_cache
from experiments.tables import markdown_table, write_text

TARGET_RATIO = 1.5
PROMPT = 32
VOCABULARY = 32768
# A root, two children, and a child of each: as a step of budget 4 verifies.
PARENTS = (-1, -1, 0, 1)


@dataclass(frozen=True)
class Settings:
    """Time a whole model on one CPU thread."""

    layers: int = 4
    """Layers of the model, otherwise shaped like qwen3-30b-a3b with a smaller vocabulary."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations."""
    verifications: int = 8
    """Verifications of one timing, all with different tokens."""
    new_tokens: int = 32
    """Tokens of one timing of plain decoding."""
    repeats: int = 5
    """Timings that medians are taken of."""
    peers: bool = True
    """Time other implementations too."""
    core: int | None = None
    """The core to run on; the last allowed one if not given."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A tiny model that says nothing about speed, as a test of this script."""
    out: Path = Path("results/bench_model")
    """Folder for results.jsonl and table.md."""

    @property
    def config(self) -> Qwen3MoeConfig:
        shape = get_preset("qwen3-30b-a3b")
        assert isinstance(shape, Qwen3MoeConfig)
        config = replace(shape, num_layers=self.layers, vocab_size=VOCABULARY, max_positions=4096)
        if not self.quick:
            return config
        tiny = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "moe_intermediate_size": 32}
        return replace(config, **tiny, num_experts=8, experts_per_token=2, vocab_size=256)


@dataclass(frozen=True)
class Verifications:
    """Several verifications of 5 rows in one compiled loop.

    Attributes:
        plan: what `decoding.verify` runs.
        weights: of the model.
        state: after a prompt.
    """

    plan: StepPlan
    weights: Weights
    state: DecodeState

    @staticmethod
    def create(model: Qwen3Moe) -> "Verifications":
        target_def, target_state = nnx.split(model)
        spec = SpecConfig(depth=2, branch=2, budget=len(PARENTS))
        plan = StepPlan(target_def, None, likelihood, spec, SamplingConfig(), ())
        weights = Weights(target_state, None)
        prompt_BT, one_B = jnp.arange(PROMPT)[None], jnp.ones(1, jnp.int32)
        keys_B = sequence_keys(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        start = jax.jit(partial(prefill, plan), static_argnames=("capacity",))
        state = start(weights, prompt_BT, PROMPT * one_B, 2 * PROMPT * one_B, keys_B, capacity=4 * PROMPT)
        return Verifications(plan, weights, jax.block_until_ready(state))

    def compiled(self, *, experts: bool = True) -> Callable[[np.ndarray], Array]:
        """A function of tokens `[N, 5]` that gives the distinct experts of every layer, `[N, L]`.

        Without `experts` all rows are dead, so that no expert is read.
        """
        plan = self.plan

        def run(weights: Weights, state: DecodeState, tokens_NR: Int[Array, "verifications rows"]) -> Any:
            state = replace(state, finished_B=jnp.full_like(state.finished_B, not experts))

            def one(i: Array, carry: tuple[DecodeState, Array, Array]) -> Any:
                state, distinct_NL, drawn = carry
                root, nodes_BN = tokens_NR[i, 0], tokens_NR[i, 1:][None]
                state = replace(state, tokens_BS=state.tokens_BS.at[0, state.length_B[0]].set(root))
                depths_N = jnp.array([1 if parent < 0 else 2 for parent in PARENTS])
                tree = build_tree(nodes_BN, jnp.array([PARENTS]), depths_N, jnp.zeros(nodes_BN.shape))
                everything = Selection(jnp.arange(len(PARENTS))[None], jnp.full(1, len(PARENTS)))
                verified, state = verify(plan, weights, state, tree, everything)
                distinct_L = count(union(verified.experts_BRLW, axis=1))[0]
                return state, distinct_NL.at[i].set(distinct_L), drawn + verified.drawn_BR.sum()

            distinct_NL = jnp.zeros((len(tokens_NR), state.last_BLW.shape[1]), jnp.int32)
            return lax.fori_loop(0, len(tokens_NR), one, (state, distinct_NL, jnp.int32(0)))[1:]

        jitted = jax.jit(run)
        return lambda tokens_NR: jax.block_until_ready(jitted(self.weights, self.state, jnp.asarray(tokens_NR)))[0]

    def compiled_head(self) -> Callable[[np.ndarray], Array]:
        """The head alone, on as many rows as often."""

        def run(weights: Weights, tokens_NR: Int[Array, "verifications rows"]) -> Array:
            target: Qwen3Moe = nnx.merge(self.plan.target, weights.target)

            def one(i: Array, total: Array) -> Array:
                rows_RD = jnp.broadcast_to(
                    (tokens_NR[i, :, None] + total) % 7, (tokens_NR.shape[1], target.config.hidden_size)
                )
                return total + target.logits(rows_RD.astype(target.dtype)).argmax()

            return lax.fori_loop(0, len(tokens_NR), one, jnp.int32(0))

        jitted = jax.jit(run)
        return lambda tokens_NR: jax.block_until_ready(jitted(self.weights, jnp.asarray(tokens_NR)))


def measure_verification(settings: Settings, model: Qwen3Moe) -> dict[str, Any]:
    """Time of a verification, bytes it reads, time of reading as many; what experts and head take of it."""
    verifications = Verifications.create(model)
    whole, no_experts = verifications.compiled(), verifications.compiled(experts=False)
    head = verifications.compiled_head()
    random = np.random.default_rng(0)
    model_bytes = byte_model(model.config, model.dtype.itemsize)
    ceiling = ReadCeiling(1 << 20 if settings.quick else beyond_cache())

    def draw() -> np.ndarray:
        return random.integers(0, model.config.vocab_size, (settings.verifications, 1 + len(PARENTS))).astype(np.int32)

    def timed(call: Callable[[np.ndarray], Array], tokens_NR: np.ndarray) -> tuple[float, Array]:
        started = time.perf_counter()
        result = call(tokens_NR)
        return (time.perf_counter() - started) / settings.verifications, result

    for call in (whole, no_experts, head):
        call(draw())
    samples = []
    for _ in range(settings.repeats):
        tokens_NR = draw()
        seconds, distinct_NL = timed(whole, tokens_NR)
        u = float(np.mean(np.asarray(distinct_NL)))
        read = ceiling.seconds(int(model_bytes.step(u)))
        sample = {"u": u, "bytes": model_bytes.step(u), "ms": 1e3 * seconds, "ratio": seconds / read.best}
        sample |= {"read_gb_per_s": model_bytes.step(u) / read.best / 1e9}
        sample["share_experts"] = 1 - timed(no_experts, tokens_NR)[0] / seconds
        sample["share_head"] = timed(head, tokens_NR)[0] / seconds
        samples.append(sample)
    with native.count_traffic() as counted:
        distinct_NL = whole(draw())
    experts = int(np.sum(np.asarray(distinct_NL)))
    figures = {name: median(sample[name] for sample in samples) for name in samples[0]}
    figures["share_rest"] = 1 - figures["share_experts"] - figures["share_head"]
    facts = {"experts_counted": counted[0].experts, "experts_expected": experts}
    facts |= {"bytes_counted": counted[0].weight_bytes / settings.verifications}
    return {"part": "verification", "rows": 1 + len(PARENTS), **figures, **facts, "target": TARGET_RATIO}


def measure_decoding(settings: Settings, model: Qwen3Moe) -> list[dict[str, Any]]:
    """Plain decoding by this project, and by each peer right beside it."""
    decoder = Decoder(model, None, eos_ids=())
    prompt = list(range(PROMPT))

    def ours() -> tuple[float, tuple[int, ...]]:
        result = decoder.generate([prompt], method="ar", max_new_tokens=settings.new_tokens)
        return result.stats.tokens_per_second, result.generations[0].tokens

    _, tokens = ours()
    records = [{"part": "decoding", "name": "ours", "tokens_per_second": median(ours()[0] for _ in range(3))}]
    for name in PEERS if settings.peers else ():
        with open_peer(name, model) as peer:
            if isinstance(peer, str):
                records.append({"part": "decoding", "name": name, "missing": peer})
                continue
            theirs = peer(prompt, settings.new_tokens)  # warms up
            same = next((i for i, (a, b) in enumerate(zip(tokens, theirs.tokens, strict=False)) if a != b), len(tokens))
            pairs = [(ours()[0], peer(prompt, settings.new_tokens).tokens_per_second) for _ in range(settings.repeats)]
        records.append(
            {
                "part": "decoding",
                "name": name,
                "tokens_per_second": median(theirs for _, theirs in pairs),
                "ours_tokens_per_second": median(mine for mine, _ in pairs),
                "ours_times_as_fast": median(mine / theirs for mine, theirs in pairs),
                "same_first_tokens": same,
            }
        )
    return records


def report(settings: Settings, records: list[dict[str, Any]], common: dict[str, Any], console: Console) -> None:
    one = records[0]
    lines = [
        f"a verification of {one['rows']} rows: {one['ms']:.2f} ms for {one['bytes'] / 1e6:.1f} MB "
        f"(U {one['u']:.1f}): {one['ratio']:.2f} times a read of as many bytes (target: at most {TARGET_RATIO})",
        f"of it: experts {one['share_experts']:.0%}, head {one['share_head']:.0%}, the rest {one['share_rest']:.0%}",
        f"{settings.dtype}, {settings.layers} layers, plain decoding of {settings.new_tokens} tokens:",
    ]
    if one["experts_counted"] != one["experts_expected"]:
        lines.append(f"ERROR: {one['experts_counted']} experts read, {one['experts_expected']} expected")
    header = ["decoding", "tokens/s", "ours is faster by", "same first tokens"]
    cells = [
        [record["name"], record["missing"], "-", "-"]
        if "missing" in record
        else [
            record["name"],
            f"{record['tokens_per_second']:.2f}",
            f"{record['ours_times_as_fast']:.2f}x" if "ours_times_as_fast" in record else "-",
            str(record.get("same_first_tokens", "-")),
        ]
        for record in records[1:]
    ]
    table = Table(*(Column(title, justify="left" if at == 0 else "right") for at, title in enumerate(header)))
    for line in cells:
        table.add_row(*line)
    for line in lines:
        console.print(line, style="bold red" if line.startswith("ERROR") else None, soft_wrap=True)
    console.print(table)
    facts = [*lines, *(f"{name}: `{value}`" for name, value in common.items())]
    write_text(
        settings.out / "table.md", markdown_table(header, cells) + "\n" + "".join(f"- {fact}\n" for fact in facts)
    )


def run(settings: Settings) -> None:
    require_positive(settings, "layers", "verifications", "repeats", "new_tokens")
    core = one_thread(settings.core)
    if (reason := native.unavailable()) is not None:
        raise UserError(f"there is nothing to time: {reason}")
    console = Console()
    common = {
        "core": core,
        "variant": native.variant(),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings), default=str)),
        "peer_versions": package_versions("torch", "transformers", "llama_cpp_python", "gguf"),
        **environment(),
    }
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        results = (settings.out / "results.jsonl").open("w", encoding="utf-8")
    with results:
        model = Qwen3Moe(settings.config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(0))
        records = [measure_verification(settings, model), *measure_decoding(settings, model)]
        for record in records:
            results.write(json.dumps(record | common) + "\n")
    report(settings, records, common, console)
    if records[0]["experts_counted"] != records[0]["experts_expected"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
