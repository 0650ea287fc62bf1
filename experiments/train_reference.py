"""Train a small target and its drafter from scratch, and write both as published checkpoints are laid out.

    python -m experiments.train_reference --config tiny-gpt-oss --text gsm8k.jsonl math.jsonl code.jsonl --out trained

Text comes as prompt files whose prompts have answers. An interrupted training resumes exactly where its last checkpoint
was.
"""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import tyro
from flax import nnx
from rich.console import Console

from convert.export import export_drafter, export_target
from ecospec_jax import UserError
from ecospec_jax.checkpoint import TOKENIZER, borrow
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.models import DRAFTERS, TARGETS
from ecospec_jax.tokenizer import Tokenizer
from ecospec_jax.training.drafter import Lessons, agreement, drafter_loss, lessons, most_frequent
from ecospec_jax.training.experts import prepare
from ecospec_jax.training.language_model import next_token_loss, optimiser, training_loss
from ecospec_jax.training.quantise import published
from ecospec_jax.training.sequences import PADDING, Packed, batches, pack_documents
from ecospec_jax.training.trainer import Trainer, evaluate
from experiments.options import require_positive
from experiments.prompts import Prompt, read_prompts
from experiments.reference_tokenizer import TOKENIZER_FILES, train_tokenizer
from experiments.references import REFERENCES, Reference
from experiments.resuming import open_training, train, training_folder


@dataclass(frozen=True)
class Settings:
    """Train a small target and its drafter."""

    text: tuple[Path, ...]
    """Prompt files; every prompt needs an answer."""
    out: Path
    """Folder for the checkpoints; must not exist."""
    config: str = "tiny-gpt-oss"
    """What to train, by name."""
    tokenizer: Path | None = None
    """Folder of a tokenizer with the special tokens and chat template of the config; without it one is trained."""
    tokens: int = 7_000_000
    """Tokens that the target sees."""
    drafter_tokens: int = 2_000_000
    """Tokens that the drafter sees."""
    batch_size: int = 16
    """Sequences per step."""
    length: int = 256
    """Tokens of a sequence; longer documents are cut."""
    muon_rate: float = 0.02
    """Learning rate of matrices."""
    adam_rate: float = 3e-3
    """Learning rate of everything else."""
    held_out: int = 40
    """Last prompts of each file that are kept for judging."""
    seed: int = 0
    """Seed of initial weights and order."""
    checkpoint_every: int = 100
    """Steps between checkpoints, with a loss on held-out text each."""


@dataclass(frozen=True)
class Text:
    """Packed documents: those to train on, and held-out ones by file."""

    training: Packed
    held_out: dict[str, Packed]


def load_prompts(settings: Settings) -> dict[str, list[Prompt]]:
    """Prompts by file name."""
    prompts = {}
    for file in settings.text:
        if file.stem in prompts:
            raise UserError(f"--text: two files are called '{file.stem}'")
        prompts[file.stem] = read_prompts(file)
        for prompt in prompts[file.stem]:
            if prompt.answer is None or len(prompt.turns) > 1:
                raise UserError(f"{file}: {prompt.id}: one turn with an answer is needed to train on")
        if len(prompts[file.stem]) <= settings.held_out:
            raise UserError(f"{file}: {len(prompts[file.stem])} prompts, of which --held-out keeps {settings.held_out}")
    return prompts


def open_tokenizer(
    settings: Settings, folder: Path, prompts: dict[str, list[Prompt]], reference: Reference
) -> Tokenizer:
    """The tokenizer of this training, trained or copied if it is not there yet."""
    size, chat = reference.target.vocab_size, reference.chat
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        if settings.tokenizer is None:
            texts = (text for part in prompts.values() for one in part for text in (*one.turns, one.answer or ""))
            with reported_as_user_error("--text", ValueError):
                train_tokenizer(texts, size, chat, reference.target.max_positions, unfinished)
        else:
            with reported_as_user_error(f"--tokenizer {settings.tokenizer}", OSError):
                for name in TOKENIZER_FILES:
                    shutil.copyfile(settings.tokenizer / name, unfinished / name)
        unfinished.rename(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > size or any(len(tokenizer.encode(token)) != 1 for token in (chat.padding, chat.end)):
        raise UserError(f"{folder}: not a tokenizer of at most {size} ids with tokens {chat.padding} and {chat.end}")
    return tokenizer


def pack_text(settings: Settings, prompts: dict[str, list[Prompt]], tokenizer: Tokenizer, end: str) -> Text:
    """Each prompt and its answer as the chat template writes them is a document."""

    def documents(part: list[Prompt]) -> list[list[int]]:
        return [
            [
                *tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}]),
                *tokenizer.encode(f"{prompt.answer}{end}"),
            ]
            for prompt in part
        ]

    training = [document for part in prompts.values() for document in documents(part[: -settings.held_out])]
    held_out = {
        name: pack_documents(documents(part[-settings.held_out :]), settings.length) for name, part in prompts.items()
    }
    return Text(pack_documents(training, settings.length), held_out)


def train_target(settings: Settings, reference: Reference, text: Text, folder: Path, console: Console) -> Any:
    """The target with plain matrices, trained at first as it is, then perhaps with its experts' numbers rounded."""
    config = reference.target
    steps = settings.tokens // (settings.batch_size * settings.length)
    model = TARGETS[config.family](config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(settings.seed))
    form = nnx.graphdef(model)  # that of decoding, in which the model is judged

    def report(step: int, loss: float) -> None:
        judged = nnx.merge(form, nnx.state(trainer.model))
        console.print(f"step {step}: loss {loss:.3f}; held out: {spelled(losses(judged, text.held_out))}")

    rates = {"muon_rate": settings.muon_rate, "adam_rate": settings.adam_rate}
    feed, every = partial(shuffled, settings, text), settings.checkpoint_every
    plain = round((1 - reference.rounded_share) * steps)
    for quantised, last in ((False, plain), (True, steps)) if plain < steps else ((False, steps),):
        console.print(f"target, {'rounded' if quantised else 'plain'} experts")
        trainer = Trainer(prepare(model, quantised=quantised), optimiser(steps=steps, **rates), training_loss)
        train(trainer, feed, steps=last, checkpoints=folder / "target", every=every, report=report, console=console)
        model = trainer.model
    return model


def spelled(by_file: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in by_file.items())


def train_drafter(
    settings: Settings, reference: Reference, target: Any, text: Text, folder: Path, console: Console
) -> tuple[Any, dict[str, tuple[float, ...]]]:
    """A drafter for the frozen target, and by file and draft step how often it agrees with it on held-out text.

    The drafter as published; what it borrows from the target is the target's.
    """
    config = reference.drafter
    steps = settings.drafter_tokens // (settings.batch_size * settings.length)
    drafter = DRAFTERS[config.family](config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(settings.seed))
    borrow(drafter, config, target)
    form = nnx.graphdef(drafter)  # that of decoding, in which the drafter is judged
    prepare(drafter, quantised=False)
    if drafter.proposable < target.config.vocab_size:
        commonest = most_frequent(text.training, target.config.vocab_size, drafter.proposable)
        drafter.target_ids.set_value(jnp.array(commonest, jnp.int32))

    def teach(packed: Packed) -> Lessons:
        return evaluate(lessons, target, packed, drafter.boundaries)

    def feed(first: int) -> Iterator[Lessons]:
        return (teach(packed) for packed in shuffled(settings, text, first))

    def agreements(model: Any) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(evaluate(agreement, model, teach(packed)).tolist()) for name, packed in text.held_out.items()
        }

    def report(step: int, loss: float) -> None:
        judged = nnx.merge(form, nnx.state(trainer.model))
        shares = ", ".join(
            f"{name} {' '.join(f'{share:.2f}' for share in by)}" for name, by in agreements(judged).items()
        )
        console.print(f"step {step}: loss {loss:.3f}; agreement: {shares}")

    rates = {"muon_rate": settings.muon_rate, "adam_rate": settings.adam_rate}
    every = settings.checkpoint_every
    trainer = Trainer(drafter, optimiser(steps=steps, **rates), drafter_loss)
    console.print("drafter")
    train(trainer, feed, steps=steps, checkpoints=folder / "drafter", every=every, report=report, console=console)
    result = published(trainer.model, reference.published_drafter)
    return result, agreements(result)


def shuffled(settings: Settings, text: Text, first: int) -> Iterator[Packed]:
    """Endless batches of the training text from step `first` on."""
    sequences = range(len(text.training.tokens_BT))
    return (text.training.take(batch) for batch in batches(sequences, settings.batch_size, settings.seed, first))


def losses(model: Any, held_out: dict[str, Packed]) -> dict[str, float]:
    """A model's loss on held-out text, by file."""
    return {name: float(evaluate(next_token_loss, model, packed)) for name, packed in held_out.items()}


def write_checkpoints(
    settings: Settings, reference: Reference, target: Any, drafter: Any, tokenizer: Tokenizer, folder: Path
) -> None:
    """Writes `target` and, unless it is an MTP module, `drafter`, all or nothing."""
    unfinished = settings.out.with_name(f"{settings.out.name}.partial")
    with reported_as_user_error(f"{unfinished}: cannot be written", OSError):
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder / TOKENIZER, unfinished / "target")
        end, padding = (tokenizer.encode(token)[0] for token in (reference.chat.end, reference.chat.padding))
        mtp = drafter if reference.drafter.family == "mtp" else None  # which is a layer of the target's checkpoint
        export_target(target, unfinished / "target", mtp=mtp, eos_token_ids=[end, padding], pad_token_id=padding)
        if mtp is None:
            export_drafter(drafter, unfinished / "drafter")
        unfinished.rename(settings.out)


def check(settings: Settings) -> Reference:
    """Refuses impossible settings before anything is written."""
    require_positive(settings, "batch_size", "length", "held_out", "checkpoint_every")
    for name in ("tokens", "drafter_tokens"):
        if getattr(settings, name) < settings.batch_size * settings.length:
            raise UserError(f"--{name.replace('_', '-')} {getattr(settings, name)} are less than one step's")
    if settings.config not in REFERENCES:
        raise UserError(f"unknown --config '{settings.config}'; known: {', '.join(REFERENCES)}")
    if settings.out.exists():
        raise UserError(f"{settings.out}: already exists; remove it or choose another name")
    return REFERENCES[settings.config]


def recipe(settings: Settings) -> dict[str, Any]:
    """What a training must have in common with one that it continues."""

    def digest(file: Path) -> str:
        with reported_as_user_error(f"{file}: cannot be read", OSError):
            return hashlib.sha256(file.read_bytes()).hexdigest()

    free = ("text", "tokenizer", "out", "checkpoint_every")
    return {
        "text": {file.stem: digest(file) for file in settings.text},
        "tokenizer": settings.tokenizer and digest(settings.tokenizer / TOKENIZER_FILES[0]),
        "settings": {name: value for name, value in asdict(settings).items() if name not in free},
    }


def run(settings: Settings) -> None:
    console = Console()
    reference = check(settings)
    prompts = load_prompts(settings)
    folder = training_folder(settings.out)
    open_training(folder, recipe(settings))
    tokenizer = open_tokenizer(settings, folder / TOKENIZER, prompts, reference)
    text = pack_text(settings, prompts, tokenizer, reference.chat.end)
    in_use = float(jnp.mean(text.training.documents_BT != PADDING))
    console.print(f"{text.training.tokens_BT.size} tokens of text, {in_use:.1%} in use")

    trained = train_target(settings, reference, text, folder, console)
    exact, target = published(trained, reference.target), published(trained, reference.published)
    for name, model in (("matrices not rounded", exact), ("as published", target)):
        console.print(f"loss on held-out text, {name}: {spelled(losses(model, text.held_out))}")
    drafter, shares = train_drafter(settings, reference, target, text, folder, console)
    write_checkpoints(settings, reference, target, drafter, tokenizer, folder)
    shutil.rmtree(folder)
    for name, by_step in shares.items():
        console.print(f"agreement by draft step, {name}: {' '.join(f'{share:.3f}' for share in by_step)}")
    console.print(f"written to {settings.out}")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
