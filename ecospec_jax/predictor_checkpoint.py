"""Trained expert predictors of one target: a manifest and one Orbax piece each.

FOLDER/manifest.json
FOLDER/backbone/top/          one folder a predictor
FOLDER/token_table/top/
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pydantic

from ecospec_jax.checkpoint import (
    MANIFEST,
    PieceRecord,
    borrow,
    borrowed_parameters,
    parameters,
    piece_name,
    restore,
    save_piece,
    stored_parameters,
)
from ecospec_jax.config import STRICT, RoutingShape, from_json, to_json
from ecospec_jax.errors import UserError, reported_as_user_error
from ecospec_jax.models.predictor import Predictor
from ecospec_jax.models.target import Target
from ecospec_jax.predictor_config import PredictorConfig
from ecospec_jax.sharding import Placement, spread

FORMAT = 1


@dataclass(frozen=True)
class PredictorManifest:
    """What a folder of predictors holds.

    Attributes:
        format: version of this layout.
        target_hash: of the target whose routing they predict (`Manifest.target_hash`).
        predictors: configs by name.
        overlap: held-out top-k overlap by name, one value a MoE layer.
        pieces: by folder, such as `backbone/top`.
        recipe: how they were made.
    """

    format: int
    target_hash: str
    predictors: dict[str, PredictorConfig]
    overlap: dict[str, tuple[float, ...]]
    pieces: dict[str, PieceRecord]
    recipe: dict[str, str]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


def save_predictors(
    folder: Path,
    models: Mapping[str, tuple[PredictorConfig, Any]],
    *,
    target_hash: str,
    overlap: Mapping[str, tuple[float, ...]],
    recipe: Mapping[str, str],
    dtype: jnp.dtype,
) -> PredictorManifest:
    """Writes predictors (config and module by name), floating-point parameters in `dtype`, into a new folder."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; remove it or choose another name")
    partial = folder.with_name(f"{folder.name}.partial")
    with reported_as_user_error(f"{partial}: cannot be written", OSError):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        pieces: dict[str, PieceRecord] = {}
        for name, (config, model) in models.items():
            grouped: dict[str, dict[str, np.ndarray]] = {}
            for path, variable in parameters(model).items():
                if path not in borrowed_parameters(config):
                    value = variable.get_value()
                    stored = value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
                    grouped.setdefault(piece_name(name, path), {})[path] = np.asarray(stored)
            pieces |= {piece: save_piece(partial / piece, tensors) for piece, tensors in grouped.items()}
        configs = {name: config for name, (config, _) in models.items()}
        manifest = PredictorManifest(FORMAT, target_hash, configs, dict(overlap), pieces, dict(recipe))
        (partial / MANIFEST).write_text(json.dumps(to_json(manifest), indent=1) + "\n")
        partial.rename(folder)
    return manifest


def read_predictor_manifest(folder: Path) -> PredictorManifest:
    """What a folder of predictors says it holds; a wrong file is a `UserError`."""
    file = folder / MANIFEST
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
        values = json.loads(file.read_text())
    manifest = from_json(PredictorManifest, values, str(file))
    if manifest.format != FORMAT:
        raise UserError(f"{file}: format {manifest.format} is not {FORMAT}; train the predictors again")
    return manifest


def load_predictors(
    folder: Path,
    target_hash: str,
    dtype: jnp.dtype,
    target: Target,
    placement: Placement | None = None,
    *,
    drafter_hash: str = "",
) -> dict[str, Predictor]:
    """Loads all predictors of a folder; they must have been made for this very target, and drafter if they read it."""
    file, manifest = folder / MANIFEST, read_predictor_manifest(folder)
    wanted = RoutingShape.of(target.config)
    for name, config in manifest.predictors.items():
        if config.routing != wanted:
            raise UserError(f"{file}: predictor '{name}' predicts {config.routing}, the target routes {wanted}")
        vocabulary = getattr(config, "vocab_size", target.config.vocab_size)
        if vocabulary != target.config.vocab_size:
            raise UserError(
                f"{file}: predictor '{name}' has a vocabulary of {vocabulary}, the target of {target.config.vocab_size}"
            )
    if manifest.target_hash != target_hash:
        raise UserError(f"{file}: the predictors were made for another target (hash {manifest.target_hash[:12]})")
    for name, config in manifest.predictors.items():
        reads = getattr(config, "drafter_hash", drafter_hash)
        if reads != drafter_hash:
            raise UserError(f"{file}: predictor '{name}' reads the states of another drafter (hash {reads[:12]})")
    loaded = {}
    for name, config in manifest.predictors.items():
        module, stored = stored_parameters(config, dtype)
        restore(folder, manifest.pieces, name, stored, placement)
        spread(module, placement)
        borrow(module, config, target)
        loaded[name] = module
    return loaded
