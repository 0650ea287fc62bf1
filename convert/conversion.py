"""The conversion: check everything, then write piece by piece, resume where a killed run stopped, rename at the end."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from convert import deepseek_v3, eagle3, gpt_oss, qwen3_moe
from convert.assembly import Part
from convert.eagle3 import AuxOffset
from convert.hf_config import HFConfig
from convert.hub import TOKENIZER_FILES, local_folder
from ecospec_jax.checkpoint import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    PieceRecord,
    piece_name,
    read_manifest,
    save_piece,
    write_manifest,
)
from ecospec_jax.config import DrafterConfig, ModelConfig, from_json, to_json
from ecospec_jax.errors import UserError, reported_as_user_error
from ecospec_jax.tokenizer import Tokenizer

Progress = Callable[[list[str]], Iterable[str]]

_TARGETS: dict[str, Callable[[HFConfig], Part[ModelConfig]]] = {
    "qwen3_moe": qwen3_moe.open_target,
    "gpt_oss": gpt_oss.open_target,
    "deepseek_v3": deepseek_v3.open_target,
}
_JOURNAL = "journal.json"
_GENERATION = "generation_config.json"
_TEXT_FILES = (*TOKENIZER_FILES, _GENERATION)


def convert(
    source: str | Path,
    destination: Path,
    *,
    drafter: str | Path | None = None,
    tokenizer: str | Path | None = None,
    aux_offset: AuxOffset = "auto",
    progress: Progress = iter,
) -> Manifest:
    """Converts a Hugging Face checkpoint, and a drafter for it, into a folder that `Decoder.load` reads.

    The source is checked before anything is written, but for the numbers of FP8 tensors, which are checked as they are
    read. Then one piece at a time (a decoder layer, an expert matrix of all its experts, or all the rest) goes into
    `destination.partial`, which is renamed at the end. After an interruption the same call resumes.

    Args:
        source: folder, or Hub id as a string. If it is a folder that was converted before, the drafter alone is
            converted for it, into a folder that `Decoder.load` takes as `drafter`.
        destination: must not exist.
        drafter: folder or Hub id of an EAGLE-3 head, or of a DeepSeek-V3 checkpoint (`source` itself, for one) whose
            MTP module is meant.
        tokenizer: folder or Hub id with the tokenizer and `generation_config.json`; default `source`.
        aux_offset: what to add to the head's list of auxiliary layers; `auto` is the meaning its dialect documents.
        progress: wraps the list of pieces, as `rich.progress.track` does.
    """
    if destination.exists():
        raise UserError(f"{destination}: already exists; remove it or choose another name")
    target = _find_target(local_folder(source), tokenizer)
    head = None if drafter is None else _open_drafter(_read_config(local_folder(drafter)), target, aux_offset)
    parts = [part for part in (target.part, head) if part is not None]
    if not parts:
        raise UserError(f"{source}: was converted before; --drafter names a drafter to convert for it")
    pieces = _pieces(parts)
    partial = destination.with_name(f"{destination.name}.partial")
    with reported_as_user_error(f"{partial}: cannot write", OSError):
        journal = _resume(partial, _fingerprint(parts))
        for file in target.tokenizer_files:
            (partial / TOKENIZER).mkdir(exist_ok=True)
            shutil.copyfile(file, partial / TOKENIZER / file.name)
        for name in progress(list(pieces)):
            if name not in journal.pieces:
                part, paths = pieces[name]
                try:
                    tensors = {path: part.assemblies[path].read(part.reader) for path in paths}
                except UserError:  # the source is damaged, so nothing here is of use
                    shutil.rmtree(partial)
                    raise
                journal.pieces[name] = save_piece(partial / name, tensors)
                _write_journal(partial, journal)
        manifest = Manifest(
            format=FORMAT,
            source=str(source),
            drafter_source=None if drafter is None else str(drafter),
            source_hash=_hash([[to_json(part.config) for part in parts], _digests(journal)]),
            target=target.config,
            drafter=None if head is None else head.config,
            eos_token_ids=target.eos_token_ids,
            pieces=journal.pieces,
            versions={package: _version(package) for package in ("ecospec-jax", "jax", "flax", "orbax-checkpoint")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_manifest(partial, manifest)
        partial.rename(destination)
        (destination / _JOURNAL).unlink()
    return manifest


@dataclass(frozen=True)
class _Target:
    """A target, and the files of its tokenizer; `part` is None if it was converted before."""

    config: ModelConfig
    part: Part[ModelConfig] | None
    eos_token_ids: tuple[int, ...]
    tokenizer_files: tuple[Path, ...] = ()


def _find_target(folder: Path, tokenizer: str | Path | None) -> _Target:
    if (folder / MANIFEST).is_file():
        if tokenizer is not None:
            raise UserError(f"{folder}: was converted before; --tokenizer is for a first conversion")
        manifest = read_manifest(folder)
        return _Target(manifest.target, None, manifest.eos_token_ids)
    part = _open_target(_read_config(folder))
    text_folder = folder if tokenizer is None else local_folder(tokenizer, _TEXT_FILES)
    files = _tokenizer_files(part, text_folder)
    if tokenizer is not None and not files:
        raise UserError(f"{text_folder}: no tokenizer there")
    return _Target(part.config, part, _eos_token_ids(part, text_folder), files)


@dataclass(frozen=True)
class _Journal:
    """What an unfinished conversion has written, and of which source."""

    fingerprint: str
    pieces: dict[str, PieceRecord]


def _resume(partial: Path, fingerprint: str) -> _Journal:
    """The journal of an interrupted conversion of the same source, or a fresh one in an empty folder."""
    partial.mkdir(parents=True, exist_ok=True)
    journal = _Journal(fingerprint, {})
    if (partial / _JOURNAL).is_file():
        values = json.loads((partial / _JOURNAL).read_text())
        if values["fingerprint"] == fingerprint:
            journal = from_json(_Journal, values, str(partial / _JOURNAL))
    elif any(partial.iterdir()):
        raise UserError(f"{partial}: in the way, and not left by an interrupted conversion; remove it")
    _write_journal(partial, journal)
    for folder in partial.glob("*/*/"):
        if folder.relative_to(partial).as_posix() not in journal.pieces:  # unfinished, or of another source
            shutil.rmtree(folder)
    shutil.rmtree(partial / TOKENIZER, ignore_errors=True)
    return journal


def _write_journal(partial: Path, journal: _Journal) -> None:
    new = partial / f"{_JOURNAL}.new"
    new.write_text(json.dumps(to_json(journal)))
    new.replace(partial / _JOURNAL)


def _read_config(folder: Path) -> HFConfig:
    return HFConfig.read(folder / "config.json")


def _open_target(config: HFConfig) -> Part[ModelConfig]:
    if gpt_oss.is_original(config):
        return gpt_oss.open_original(config)
    model_type = config.need(str, "model_type")
    if model_type not in _TARGETS:
        config.refuse("model_type", f"'{model_type}' is not supported, only {', '.join(_TARGETS)}")
    return _TARGETS[model_type](config)


def _open_drafter(config: HFConfig, target: _Target, aux_offset: AuxOffset) -> Part[DrafterConfig]:
    if config.find(str, "model_type") != "deepseek_v3":
        return eagle3.open_drafter(config, target.config, aux_offset)
    if aux_offset != "auto":
        raise UserError(f"{config.file}: an MTP module, for which an auxiliary offset means nothing")
    return deepseek_v3.open_drafter(config, target.config, None if target.part is None else target.part.reader)


def _pieces(parts: Sequence[Part]) -> dict[str, tuple[Part, list[str]]]:
    """Each piece's part and parameter paths."""
    pieces: dict[str, tuple[Part, list[str]]] = {}
    for part in parts:
        for path in part.assemblies:
            pieces.setdefault(piece_name(part.role, path), (part, []))[1].append(path)
    return pieces


def _eos_token_ids(target: Part[ModelConfig], text_folder: Path) -> tuple[int, ...]:
    """From `generation_config.json`, else `config.json`: one id or several."""
    file = text_folder / _GENERATION
    configs = [HFConfig.read(file)] if file.is_file() else []
    for config in [*configs, target.source]:
        value = config.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and 0 <= token < target.config.vocab_size for token in ids):
            config.refuse("eos_token_id", f"{value!r} is no token id, or list of them, of the vocabulary")
        return tuple(ids)
    target.source.refuse(
        "eos_token_id", f"missing, and {_GENERATION} has none either; --tokenizer names another folder"
    )


def _tokenizer_files(target: Part[ModelConfig], folder: Path) -> tuple[Path, ...]:
    """The tokenizer's files, after loading it once; none for a folder without a tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return ()
    vocab_size = Tokenizer.load(folder).vocab_size
    if vocab_size > target.config.vocab_size:
        raise UserError(f"{folder}: the tokenizer has {vocab_size} ids, the model only {target.config.vocab_size}")
    return tuple(folder / name for name in _TEXT_FILES if (folder / name).is_file())


def _fingerprint(parts: Sequence[Part]) -> str:
    """Tells sources apart without reading their data: configs, and each file's header, size and time of change."""
    headers = [
        [file, hashlib.sha256(header).hexdigest(), size, changed]
        for part in parts
        for file, (header, size, changed) in part.reader.headers.items()
    ]
    return _hash([FORMAT, [to_json(part.config) for part in parts], headers])


def _digests(journal: _Journal) -> list[tuple[str, str]]:
    return sorted((name, record.sha256) for name, record in journal.pieces.items())


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # this package, run from a clone that is not installed
        return "not installed"
