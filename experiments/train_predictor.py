"""Train expert predictors on routing traces, and judge them on prompts they have not seen.

    python -m experiments.train_predictor --target converted/tiny-qwen3-moe --traces traces/tiny --out predictors/tiny

Writes the trained backbone, the token table and the frequency prior, with their held-out top-k overlap per layer beside
that of the previous token's experts. An interrupted training resumes exactly where its last checkpoint was.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from convert.bridge import BridgeKind, published_predictor
from ecospec_jax import Decoder, UserError, expert_bits
from ecospec_jax.config import (
    BackboneConfig,
    BackbonePredictorConfig,
    FrequencyConfig,
    PredictorConfig,
    RopeConfig,
    RoutingShape,
    TokenTableConfig,
)
from ecospec_jax.errors import run_command
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.predictor import Frequency, TokenTable
from ecospec_jax.predictor_checkpoint import save_predictors
from ecospec_jax.training.predictor import Examples, multi_label_loss, optimiser, pack, top_k_overlap
from ecospec_jax.training.sequences import batches
from ecospec_jax.training.tables import best_experts, expert_counts, layer_prior, token_scores
from ecospec_jax.training.traces import Trace, read_manifest, read_traces, split_by_prompt
from ecospec_jax.training.trainer import Trainer
from experiments.options import require_positive
from experiments.resuming import open_training, train, training_folder


@dataclass(frozen=True)
class Settings:
    """Train expert predictors on routing traces."""

    target: Path
    """Folder that `python -m convert` wrote; its token embedding is shared, frozen."""
    traces: Path
    """Folder that `python -m experiments.collect_traces` wrote."""
    out: Path
    """Folder for the predictors; must not exist."""
    width: int = 192
    """Hidden size of the backbone."""
    depth: int = 2
    """Layers of the backbone."""
    heads: int = 4
    """Attention heads of the backbone; half as many key/value heads."""
    steps: int = 2000
    """Optimiser steps."""
    batch_size: int = 16
    """Sequences per step."""
    length: int = 256
    """Tokens of a sequence; longer ones are cut."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.01
    """AdamW's."""
    held_out: float = 0.2
    """Share of prompts kept for judging."""
    seed: int = 0
    """Seed of initial weights, order and split."""
    checkpoint_every: int = 200
    """Steps between checkpoints, with a held-out overlap each."""
    backbone: Path | None = None
    """Published Qwen3 or Qwen2 folder (safetensors) to take the backbone from, in place of a new small one."""
    bridge: BridgeKind | None = None
    """With --backbone, how it reads the target's tokens: `shared` vocabulary, `target_embedding`, or `retokenise`."""
    frozen: bool = False
    """Train heads and projection only, not the published backbone."""

    def small_backbone(self, target: Decoder) -> BackbonePredictorConfig:
        config = target.target.config
        return BackbonePredictorConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.hidden_size,
            backbone=BackboneConfig(
                hidden_size=self.width,
                num_layers=self.depth,
                num_heads=self.heads,
                num_kv_heads=max(1, self.heads // 2),
                head_dim=self.width // self.heads,
                intermediate_size=3 * self.width,
                rms_norm_eps=1e-6,
                rope=RopeConfig(theta=1e4),
            ),
            routing=RoutingShape.of(config),
        )


def load_traces(settings: Settings, decoder: Decoder) -> tuple[list[Trace], list[Trace]]:
    """Training and held-out traces of this very target."""
    manifest = read_manifest(settings.traces)
    if manifest.target_hash != decoder.target_hash:
        raise UserError(f"{settings.traces}: traces of another target (hash {manifest.target_hash[:12]})")
    traces = list(read_traces(settings.traces, manifest))
    train, held_out = split_by_prompt(traces, settings.held_out, settings.seed)
    if not train or not held_out:
        raise UserError(f"{settings.traces}: {len(manifest.prompts)} prompts are too few to hold some out")
    return train, held_out


def make_backbone(settings: Settings, decoder: Decoder) -> BackbonePredictor:
    """The predictor before its training: of a published backbone, or of a small new one."""
    target, dtype, rngs = decoder.target, jnp.dtype(jnp.float32), nnx.Rngs(settings.seed)
    if settings.backbone is not None and settings.bridge is not None:
        folder, bridge = settings.backbone, settings.bridge
        return published_predictor(folder, bridge, target, decoder.tokenizer, dtype=dtype, rngs=rngs)
    model = BackbonePredictor(settings.small_backbone(decoder), dtype=dtype, rngs=rngs)
    model.embedding.weight.set_value(target.embedding.weight.get_value().astype(dtype))
    return model


def train_backbone(
    settings: Settings, model: BackbonePredictor, training: list[Trace], held_out: list[Trace], console: Console
) -> BackbonePredictor:
    """Trains with checkpoints, from the last one there on."""
    transformation = optimiser(settings.learning_rate, settings.steps, settings.warmup, settings.weight_decay)
    frozen = ("embedding", "backbone") if settings.frozen else ()
    trainer = Trainer(model, transformation, multi_label_loss, frozen=frozen)

    def feed(first: int) -> Iterator[Examples]:
        upcoming = batches(training, settings.batch_size, settings.seed, first)
        return (pack(part, settings.length, model.config.routing) for part in upcoming)

    def report(step: int, loss: float) -> None:
        overlap = top_k_overlap(trainer.model, held_out[:64], settings.batch_size, settings.length)
        console.print(f"step {step}: loss {loss:.3f}, held-out overlap {overlap.mean():.3f}")

    train(
        trainer,
        feed,
        steps=settings.steps,
        checkpoints=training_folder(settings.out) / "checkpoints",
        every=settings.checkpoint_every,
        report=report,
        console=console,
    )
    return trainer.model


def recipe(settings: Settings, decoder: Decoder) -> dict[str, Any]:
    """What a training must have in common with one that it continues."""
    traces = {shard.file: shard.sha256 for shard in read_manifest(settings.traces).shards}
    free = ("target", "traces", "out", "checkpoint_every")
    options = {name: value for name, value in asdict(settings).items() if name not in free}
    options["backbone"] = str(settings.backbone)
    return {"target_hash": decoder.target_hash, "traces": traces, "settings": options}


def chosen(trace: Trace, routing: RoutingShape) -> np.ndarray:
    """Which experts each token uses, bool `[T, L, E]`."""
    used_TLE = np.zeros((len(trace.tokens_T), routing.layers, routing.experts), bool)
    np.put_along_axis(used_TLE, trace.experts_TLK.astype(np.int64), True, axis=-1)
    return used_TLE


def table_overlap(ranked_VLK: np.ndarray, traces: list[Trace], routing: RoutingShape) -> tuple[float, ...]:
    """Held-out top-k overlap per layer of a predictor that depends on the token id alone."""
    hits, tokens = np.zeros(routing.layers), 0
    for trace in traces:
        predicted_TLK = ranked_VLK[trace.tokens_T]
        hits += np.take_along_axis(chosen(trace, routing), predicted_TLK, axis=-1).sum(axis=(0, 2))
        tokens += len(trace.tokens_T)
    return tuple((hits / (tokens * routing.k)).tolist())


def previous_overlap(traces: list[Trace], routing: RoutingShape) -> tuple[float, ...]:
    """Held-out overlap per layer of a token's experts with the previous token's."""
    hits, tokens = np.zeros(routing.layers), 0
    for trace in traces:
        used_TLE = chosen(trace, routing)
        hits += (used_TLE[1:] & used_TLE[:-1]).sum(axis=(0, 2))
        tokens += len(used_TLE) - 1
    return tuple((hits / (tokens * routing.k)).tolist())


def check(settings: Settings) -> None:
    """Refuses impossible settings before anything is written."""
    require_positive(settings, "width", "depth", "heads", "steps", "batch_size", "length", "checkpoint_every")
    if settings.width % (2 * settings.heads):
        raise UserError(f"--width {settings.width} is not a multiple of twice --heads {settings.heads}")
    if (settings.backbone is None) != (settings.bridge is None):
        raise UserError("--backbone and --bridge need each other: a bridge is how a published backbone reads tokens")
    if settings.backbone is None and settings.frozen:
        raise UserError("--frozen needs --backbone: a new backbone has nothing to keep")
    if settings.backbone is not None:
        for name in ("width", "depth", "heads"):
            if getattr(settings, name) != getattr(Settings, name):
                raise UserError(f"--{name} is of a new backbone; the one of --backbone has its own")
    if not 0 <= settings.warmup < settings.steps:
        raise UserError(f"--warmup {settings.warmup} is not in 0..{settings.steps - 1}, the steps before the last")


def run(settings: Settings) -> None:
    console = Console()
    check(settings)
    if settings.out.exists():
        raise UserError(f"{settings.out}: already exists; remove it or choose another name")
    decoder = Decoder.load(settings.target)
    training, held_out = load_traces(settings, decoder)
    routing = RoutingShape.of(decoder.target.config)
    vocabulary = decoder.target.config.vocab_size

    counts_VLE = expert_counts(training, vocabulary, routing)
    table_VLK = best_experts(token_scores(counts_VLE), routing.k)
    frequency_LK = best_experts(layer_prior(counts_VLE), routing.k)
    table, frequency = TokenTable(TokenTableConfig(vocabulary, routing)), Frequency(FrequencyConfig(routing))
    table.bits_VLW.set_value(expert_bits.from_ids(jnp.asarray(table_VLK), routing.experts))
    frequency.bits_LW.set_value(expert_bits.from_ids(jnp.asarray(frequency_LK), routing.experts))
    backbone = make_backbone(settings, decoder)
    open_training(training_folder(settings.out), recipe(settings, decoder))
    backbone = train_backbone(settings, backbone, training, held_out, console)

    overlap = {
        "backbone": tuple(top_k_overlap(backbone, held_out, settings.batch_size, settings.length).tolist()),
        "token_table": table_overlap(table_VLK, held_out, routing),
        "frequency": table_overlap(np.broadcast_to(frequency_LK, table_VLK.shape), held_out, routing),
        "previous": previous_overlap(held_out, routing),
    }
    models: dict[str, tuple[PredictorConfig, object]] = {
        "backbone": (backbone.config, backbone),
        "token_table": (TokenTableConfig(vocabulary, routing), table),
        "frequency": (FrequencyConfig(routing), frequency),
    }
    made_with = {
        "steps": str(settings.steps),
        "batch_size": str(settings.batch_size),
        "learning_rate": str(settings.learning_rate),
        "backbone": str(settings.backbone or "new"),
        "frozen": str(settings.frozen),
        "training_tokens": str(sum(len(trace.tokens_T) for trace in training)),
        "held_out_tokens": str(sum(len(trace.tokens_T) for trace in held_out)),
    }
    save_predictors(
        settings.out,
        models,
        target_hash=decoder.target_hash,
        overlap=overlap,
        recipe=made_with,
        dtype=jnp.dtype("bfloat16"),
    )
    shutil.rmtree(training_folder(settings.out))
    report(overlap, console)
    console.print(f"written to {settings.out}")


def report(overlap: dict[str, tuple[float, ...]], console: Console) -> None:
    table = Table(title="held-out top-k overlap by MoE layer")
    table.add_column("predictor")
    table.add_column("mean", justify="right")
    for layer in range(len(next(iter(overlap.values())))):
        table.add_column(str(layer), justify="right")
    for name, values in overlap.items():
        table.add_row(name, f"{np.mean(values):.3f}", *(f"{value:.3f}" for value in values))
    console.print(table)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
