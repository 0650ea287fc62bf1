"""Train expert predictors on routing traces, and judge them on prompts they have not seen.

    python -m experiments.train_predictor --target converted/tiny-qwen3-moe --traces traces/tiny --out predictors/tiny

Writes the predictors that `--predictors` names, with their held-out top-k overlap per layer beside that of the previous
token's experts. An interrupted training resumes exactly where its last checkpoint was. `drafter_features` and
`target_gates` read the drafter's states: traces for them are collected with `--drafter-states`.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
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

from convert.bridge import BridgeKind, published_predictor
from ecospec_jax import Decoder, UserError, expert_bits
from ecospec_jax.checkpoint import borrow, borrowed_parameters, parameters
from ecospec_jax.config import RopeConfig, RoutingShape, to_json
from ecospec_jax.errors import run_command
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.predictor import Frequency, TokenPairs, TokenTable
from ecospec_jax.models.state_predictors import DrafterFeatures, TargetGates
from ecospec_jax.predictor_checkpoint import save_predictors
from ecospec_jax.predictor_config import (
    BackboneConfig,
    BackbonePredictorConfig,
    DrafterFeaturesConfig,
    FrequencyConfig,
    PredictorConfig,
    TargetGatesConfig,
    TokenPairsConfig,
    TokenTableConfig,
)
from ecospec_jax.sharding import data_parallel
from ecospec_jax.training.corpus import Corpus
from ecospec_jax.training.overlap import Overlap, judge_of, judge_of_previous, overlaps, top_k_overlap
from ecospec_jax.training.predictor import Examples, live_tokens, multi_label_loss, optimiser, pack
from ecospec_jax.training.states import TOO_EARLY, choice_loss
from ecospec_jax.training.tables import (
    best_experts,
    expert_counts,
    frequent_pairs,
    layer_prior,
    pair_counts,
    pair_scores,
    token_scores,
)
from ecospec_jax.training.traces import StateShape, TraceManifest, read_manifest_of
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
    predictors: tuple[str, ...] = ("backbone", "token_table", "frequency")
    """What to make: backbone, drafter_features, target_gates, token_table, token_pairs, frequency."""
    rank: int = 64
    """Width between the drafter's states and what is made of them."""
    pairs: int = 20000
    """Most pairs of tokens that `token_pairs` knows."""
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


def open_corpus(settings: Settings, decoder: Decoder) -> Corpus:
    """Traces of this very target."""
    manifest = read_manifest_of(settings.traces, decoder.target_hash)
    return Corpus(settings.traces, manifest, settings.held_out, settings.leave_out, settings.seed)


def make_backbone(settings: Settings, decoder: Decoder, states: StateShape | None) -> BackbonePredictor:
    """The backbone before its training: a published one, or a small new one."""
    dtype, rngs = jnp.dtype(settings.dtype), nnx.Rngs(settings.seed)
    if settings.backbone is not None and settings.bridge is not None:
        folder, bridge = settings.backbone, settings.bridge
        return published_predictor(folder, bridge, decoder.target, decoder.tokenizer, dtype=dtype, rngs=rngs)
    return BackbonePredictor(settings.small_backbone(decoder), dtype=dtype, rngs=rngs)


def make_drafter_features(settings: Settings, decoder: Decoder, states: StateShape | None) -> DrafterFeatures:
    """Heads on the drafter's states before their training."""
    assert states is not None
    target = decoder.target.config
    config = DrafterFeaturesConfig(
        vocab_size=target.vocab_size,
        embedding_size=target.hidden_size,
        state_size=states.hidden,
        rank=settings.rank,
        drafter_hash=states.drafter_hash,
        routing=RoutingShape.of(target),
    )
    return DrafterFeatures(config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(settings.seed))


def make_target_gates(settings: Settings, decoder: Decoder, states: StateShape | None) -> TargetGates:
    """The target's routers behind a guess that has yet to be trained."""
    assert states is not None
    config = TargetGatesConfig(decoder.target.config, states.hidden, settings.rank, states.drafter_hash)
    return TargetGates(config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(settings.seed))


@dataclass(frozen=True)
class Kind:
    """A predictor that is trained.

    Attributes:
        make: the module.
        loss: what is minimised.
        first: number of the first token of a sequence that it can be judged on.
    """

    make: Callable[[Settings, Decoder, StateShape | None], Any]
    loss: Callable[[Any, Examples], Array]
    first: int = 0

    @property
    def reads_states(self) -> bool:
        """Whether it needs the drafter's states."""
        return self.first > 0


TRAINED = {
    "backbone": Kind(make_backbone, multi_label_loss),
    "drafter_features": Kind(make_drafter_features, choice_loss, TOO_EARLY),
    "target_gates": Kind(make_target_gates, choice_loss, TOO_EARLY),
}
COUNTED = ("token_table", "token_pairs", "frequency")


def make_model(settings: Settings, name: str, decoder: Decoder, corpus: Corpus) -> Any:
    """A predictor before its training, with what it borrows from the target."""
    model = TRAINED[name].make(settings, decoder, corpus.manifest.states)
    borrow(model, model.config, decoder.target)
    for path in borrowed_parameters(model.config):
        value = parameters(model)[path]
        value.set_value(value.get_value().astype(settings.dtype))
    return model


def train_predictor(settings: Settings, name: str, model: Any, corpus: Corpus, console: Console) -> Made:
    """Trains with checkpoints, from the last one there on."""
    kind = TRAINED[name]
    console.print(name)
    trainer = Trainer(
        model,
        optimiser(settings.learning_rate, settings.steps, settings.warmup, settings.weight_decay),
        kind.loss,
        parts=settings.accumulate,
        weigh=live_tokens,
        devices=settings.devices,
        frozen=("embedding", "backbone") if settings.frozen and name == "backbone" else (),
    )
    patience = Patience(trainer, settings.patience) if settings.patience else None
    judged = corpus.sample(JUDGED)

    def feed(first: int) -> Iterator[Examples]:
        upcoming = corpus.batches(settings.batch_size * settings.accumulate, first)
        return (pack(part, settings.length, model.config.routing) for part in upcoming)

    def report(step: int, loss: float) -> None:
        size, length = settings.batch_size, settings.length
        overlap = top_k_overlap(trainer.model, judged, size, length, first=kind.first).mean()
        console.print(f"step {step}: loss {loss:.3f}, held-out overlap {overlap:.3f}")
        if patience is not None:
            patience.judge(overlap)

    train(
        trainer,
        feed,
        steps=settings.steps,
        checkpoints=training_folder(settings.out) / name,
        every=settings.checkpoint_every,
        report=report,
        console=console,
        patience=patience,
    )
    if patience is not None:
        patience.take_best()
    return model.config, trainer.model


def count_tables(settings: Settings, decoder: Decoder, corpus: Corpus) -> tuple[dict[str, Made], int]:
    """The predictors that are counted; and how many tokens were counted."""
    routing, vocabulary = RoutingShape.of(decoder.target.config), decoder.target.config.vocab_size
    counts_VLE = expert_counts(corpus.learned(), vocabulary, routing)
    scores_VLE = token_scores(counts_VLE)

    def sets(scores: np.ndarray) -> Array:
        return expert_bits.from_ids(jnp.asarray(best_experts(scores, routing.k)), routing.experts)

    table_config, frequency_config = TokenTableConfig(vocabulary, routing), FrequencyConfig(routing)
    table, frequency = TokenTable(table_config), Frequency(frequency_config)
    table.bits_VLW.set_value(sets(scores_VLE))
    frequency.bits_LW.set_value(sets(layer_prior(counts_VLE)))
    made: dict[str, Made] = {"token_table": (table_config, table), "frequency": (frequency_config, frequency)}
    if "token_pairs" in settings.predictors:
        pairs_P2 = frequent_pairs(corpus.learned(), settings.pairs)
        config = TokenPairsConfig(vocabulary, len(pairs_P2), routing)
        pairs = TokenPairs(config)
        counts_PLE = pair_counts(corpus.learned(), pairs_P2, vocabulary, routing)
        pairs.alone_VLW.set_value(table.bits_VLW.get_value())
        pairs.first_U.set_value(jnp.asarray(np.searchsorted(pairs_P2[:, 0], np.arange(vocabulary + 1)), jnp.int32))
        pairs.before_P.set_value(jnp.asarray(pairs_P2[:, 1]))
        pairs.bits_PLW.set_value(sets(pair_scores(counts_PLE, scores_VLE[pairs_P2[:, 0]])))
        made["token_pairs"] = (config, pairs)
    tokens = round(counts_VLE[:, 0].sum(dtype=np.float64) / routing.k)
    return {name: one for name, one in made.items() if name in settings.predictors}, tokens


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
    require_positive(settings, "length", "checkpoint_every", "rank", "pairs")
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
    if settings.batch_size % settings.devices:
        raise UserError(f"--batch-size {settings.batch_size} is not a multiple of --devices {settings.devices}")
    for name in settings.predictors:
        if name not in (*TRAINED, *COUNTED):
            raise UserError(f"unknown predictor '{name}'; known: {', '.join((*TRAINED, *COUNTED))}")
    if not settings.predictors:
        raise UserError("--predictors names no predictor")
    data_parallel(settings.devices)  # refuses more than there are


def check_states(kinds: Iterable[str], decoder: Decoder, traces: Path, manifest: TraceManifest) -> None:
    """Predictors that read the drafter's states need traces that hold them, of this drafter."""
    states = manifest.states
    for name in kinds:
        if name in TRAINED and TRAINED[name].reads_states:
            if states is None:
                raise UserError(f"{traces}: no drafter's states, which '{name}' needs; collect them with them")
            if states.drafter_hash != decoder.drafter_hash:
                raise UserError(f"{traces}: states of another drafter (hash {states.drafter_hash[:12]})")


def run(settings: Settings) -> None:
    console = Console()
    check(settings)
    if settings.out.exists():
        raise UserError(f"{settings.out}: already exists; remove it or choose another name")
    decoder = Decoder.load(settings.target)
    corpus = open_corpus(settings, decoder)
    check_states(settings.predictors, decoder, settings.traces, corpus.manifest)
    counted, tokens = count_tables(settings, decoder, corpus)
    untrained = {name: make_model(settings, name, decoder, corpus) for name in settings.predictors if name in TRAINED}
    open_training(training_folder(settings.out), recipe(settings, decoder, corpus))
    trained = {name: train_predictor(settings, name, model, corpus, console) for name, model in untrained.items()}
    models = counted | trained

    routing = RoutingShape.of(decoder.target.config)
    judges = {
        name: judge_of(module, routing, first=TRAINED[name].first if name in TRAINED else 0)
        for name, (_, module) in models.items()
    }
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
            "held_out_tokens": str(max(found.tokens for found in held_out.values())),
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
