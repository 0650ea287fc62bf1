"""Train expert predictors on routing traces, and judge them on prompts they have not seen.

    python -m experiments.train_predictor --target converted/tiny-qwen3-moe --traces traces/tiny --out predictors/tiny

Writes the trained backbone, the token table and the frequency prior, with their held-out top-k overlap per layer beside
that of the previous token's experts. An interrupted training resumes exactly where its last checkpoint was.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from ecospec_jax import Decoder, UserError, expert_bits
from ecospec_jax.config import (
    BackboneConfig,
    BackbonePredictorConfig,
    FrequencyConfig,
    PredictorConfig,
    RopeConfig,
    RoutingShape,
    TokenTableConfig,
    to_json,
)
from ecospec_jax.errors import run_command
from ecospec_jax.models.predictor import BackbonePredictor, Frequency, TokenTable
from ecospec_jax.predictor_checkpoint import save_predictors
from ecospec_jax.sharding import data_parallel
from ecospec_jax.training.corpus import Corpus
from ecospec_jax.training.overlap import Overlap, judge_of, judge_of_previous, overlaps, top_k_overlap
from ecospec_jax.training.predictor import Examples, live_tokens, multi_label_loss, optimiser, pack
from ecospec_jax.training.tables import best_experts, expert_counts, layer_prior, token_scores
from ecospec_jax.training.traces import read_manifest
from ecospec_jax.training.trainer import Trainer
from experiments.options import require_positive
from experiments.resuming import Patience, open_training, train, training_folder

JUDGED = 64  # held-out sequences of a judgement in between
Made: TypeAlias = tuple[PredictorConfig, Any]  # a predictor's config and module


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
    """Optimiser steps, at most."""
    patience: int | None = None
    """Stop after so many judgements without a better held-out overlap; in any case keep the best then."""
    batch_size: int = 16
    """Sequences of a batch."""
    accumulate: int = 1
    """Batches of an optimiser step; their gradients are added up."""
    devices: int = 1
    """Devices that share each batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation; weights and the optimiser's state are float32."""
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
    leave_out: tuple[str, ...] = ()
    """Data sets to learn nothing from; each is judged apart."""
    seed: int = 0
    """Seed of initial weights, order and split."""
    checkpoint_every: int = 200
    """Steps between checkpoints, with a held-out overlap each."""

    def backbone(self, target: Decoder) -> BackbonePredictorConfig:
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


def open_corpus(settings: Settings, decoder: Decoder) -> Corpus:
    """Traces of this very target."""
    manifest = read_manifest(settings.traces)
    if manifest.target_hash != decoder.target_hash:
        raise UserError(f"{settings.traces}: traces of another target (hash {manifest.target_hash[:12]})")
    return Corpus(settings.traces, manifest, settings.held_out, settings.leave_out, settings.seed)


def train_backbone(settings: Settings, decoder: Decoder, corpus: Corpus, console: Console) -> Made:
    """Trains with checkpoints, from the last one there on."""
    model = BackbonePredictor(settings.backbone(decoder), dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(settings.seed))
    model.embedding.weight.set_value(decoder.target.embedding.weight.get_value().astype(settings.dtype))
    trainer = Trainer(
        model,
        optimiser(settings.learning_rate, settings.steps, settings.warmup, settings.weight_decay),
        multi_label_loss,
        parts=settings.accumulate,
        weigh=live_tokens,
        devices=settings.devices,
    )
    patience = Patience(trainer, settings.patience) if settings.patience else None
    judged = corpus.sample(JUDGED)

    def feed(first: int) -> Iterator[Examples]:
        upcoming = corpus.batches(settings.batch_size * settings.accumulate, first)
        return (pack(part, settings.length, model.config.routing) for part in upcoming)

    def report(step: int, loss: float) -> None:
        overlap = top_k_overlap(trainer.model, judged, settings.batch_size, settings.length).mean()
        console.print(f"step {step}: loss {loss:.3f}, held-out overlap {overlap:.3f}")
        if patience is not None:
            patience.judge(overlap)

    train(
        trainer,
        feed,
        steps=settings.steps,
        checkpoints=training_folder(settings.out) / "checkpoints",
        every=settings.checkpoint_every,
        report=report,
        console=console,
        patience=patience,
    )
    if patience is not None:
        patience.take_best()
    return model.config, trainer.model


# What is trained: its part of the result, by name.
TRAINED: dict[str, Callable[[Settings, Decoder, Corpus, Console], Made]] = {"backbone": train_backbone}


def count_tables(decoder: Decoder, corpus: Corpus) -> tuple[dict[str, Made], int]:
    """The predictors that are counted, in one pass; and how many tokens were counted."""
    routing, vocabulary = RoutingShape.of(decoder.target.config), decoder.target.config.vocab_size
    counts_VLE = expert_counts(corpus.learned(), vocabulary, routing)

    def sets(scores: np.ndarray) -> Array:
        return expert_bits.from_ids(jnp.asarray(best_experts(scores, routing.k)), routing.experts)

    table_config, frequency_config = TokenTableConfig(vocabulary, routing), FrequencyConfig(routing)
    table, frequency = TokenTable(table_config), Frequency(frequency_config)
    table.bits_VLW.set_value(sets(token_scores(counts_VLE)))
    frequency.bits_LW.set_value(sets(layer_prior(counts_VLE)))
    tokens = round(counts_VLE[:, 0].sum(dtype=np.float64) / routing.k)
    return {"token_table": (table_config, table), "frequency": (frequency_config, frequency)}, tokens


def recipe(settings: Settings, decoder: Decoder, corpus: Corpus) -> dict[str, Any]:
    """What a training must have in common with one that it continues."""
    traces = {shard.file: shard.sha256 for shard in corpus.manifest.shards}
    # With patience, when it is judged decides what is kept.
    free = ("target", "traces", "out", *(("checkpoint_every",) if settings.patience is None else ()))
    options = {name: value for name, value in to_json(settings).items() if name not in free}
    return {"target_hash": decoder.target_hash, "traces": traces, "settings": options}


def check(settings: Settings) -> None:
    """Refuses impossible settings before anything is written."""
    require_positive(settings, "width", "depth", "heads", "steps", "patience", "batch_size", "accumulate", "devices")
    require_positive(settings, "length", "checkpoint_every")
    if settings.width % (2 * settings.heads):
        raise UserError(f"--width {settings.width} is not a multiple of twice --heads {settings.heads}")
    if not 0 <= settings.warmup < settings.steps:
        raise UserError(f"--warmup {settings.warmup} is not in 0..{settings.steps - 1}, the steps before the last")
    if settings.batch_size % settings.devices:
        raise UserError(f"--batch-size {settings.batch_size} is not a multiple of --devices {settings.devices}")
    data_parallel(settings.devices)  # refuses more than there are


def run(settings: Settings) -> None:
    console = Console()
    check(settings)
    if settings.out.exists():
        raise UserError(f"{settings.out}: already exists; remove it or choose another name")
    decoder = Decoder.load(settings.target)
    corpus = open_corpus(settings, decoder)
    counted, tokens = count_tables(decoder, corpus)
    open_training(training_folder(settings.out), recipe(settings, decoder, corpus))
    trained = {name: make(settings, decoder, corpus, console) for name, make in TRAINED.items()}
    models = trained | counted

    routing = RoutingShape.of(decoder.target.config)
    judges = {name: judge_of(module, routing) for name, (_, module) in models.items()}
    judges["previous"] = judge_of_previous(routing)
    judge = partial(overlaps, judges, size=settings.batch_size, length=settings.length, routing=routing)
    held_out = judge(corpus.held_out())
    left_out = {name: judge(corpus.of(name)) for name in settings.leave_out}

    save_predictors(
        settings.out,
        models,
        target_hash=decoder.target_hash,
        overlap={name: tuple(found.share(routing.k).tolist()) for name, found in held_out.items()},
        recipe={
            "steps": str(settings.steps),
            "patience": str(settings.patience),
            "dtype": settings.dtype,
            "batch_size": str(settings.batch_size * settings.accumulate),
            "learning_rate": str(settings.learning_rate),
            "training_tokens": str(tokens),
            "held_out_tokens": str(held_out["token_table"].tokens),
        }
        | {f"left out {name}": spelled(found, routing.k) for name, found in left_out.items()},
        dtype=jnp.dtype("bfloat16"),
    )
    shutil.rmtree(training_folder(settings.out))
    for title, found in {"held-out": held_out, **left_out}.items():
        report(title, found, routing.k, console)
    console.print(f"written to {settings.out}")


def spelled(found: dict[str, Overlap], k: int) -> str:
    """Mean overlaps in one line."""
    return ", ".join(f"{name} {each.share(k).mean():.4f}" for name, each in found.items())


def report(title: str, found: dict[str, Overlap], k: int, console: Console) -> None:
    table = Table(title=f"{title}: top-k overlap by MoE layer")
    table.add_column("predictor")
    table.add_column("mean", justify="right")
    for layer in range(len(found["previous"].hits_L)):
        table.add_column(str(layer), justify="right")
    for name, each in found.items():
        share_L = each.share(k)
        table.add_row(name, f"{share_L.mean():.3f}", *(f"{share:.3f}" for share in share_L))
    console.print(table)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
