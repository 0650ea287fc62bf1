"""Record what any method would see at every position of a target's answers, once, for studies without the models.

    python -m experiments.recording --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --prompts my_prompts.jsonl --out recordings/tiny

The answers are decoded plainly. At each position the drafter drafts, every predictor speaks, and the target verifies
the whole candidate tree as an observation only: its true routing and the token it draws behind every node. What is
cached at a position depends on the committed tokens alone, so a method finds there what was recorded, wherever its
steps begin.
An interrupted run continues with the first shard that is missing.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import tyro
from flax import nnx
from jax import lax
from jaxtyping import Array
from rich.progress import track

from ecospec_jax import Decoder, SamplingConfig, SpecConfig, UserError
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import STRICT, DrafterConfig, ModelConfig, RoutingShape, from_json, to_json
from ecospec_jax.decoding import DecodeState, StepPlan, Verified, Weights, commit, draft, predict, verify
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.generation import bucket
from ecospec_jax.models.predictor import Evidence, Predictor, Previous
from ecospec_jax.predictor_checkpoint import load_predictors
from ecospec_jax.predictor_config import PredictorConfig
from ecospec_jax.program import Program
from ecospec_jax.tree import Selection, verify_tree, whole_pool
from ecospec_jax.verification import sequence_keys
from experiments.environment import environment
from experiments.options import require_positive
from experiments.prompts import read_prompts

FORMAT = 1
CHUNK = 32  # positions a device call
ARRAYS = ("starts", "previous", "roots", "tokens", "parents", "log_probs", "drawn", "experts")


@dataclass(frozen=True)
class Header:
    """What was recorded.

    Attributes:
        format: version of this layout.
        target_hash, drafter_hash: see `Manifest`.
        target, drafter, predictors: configs; `previous` has none.
        bytes_per_weight: of the recorded models.
        temperature: of the draws; 0 is greedy.
        depth, branch: of the candidate tree.
        max_new_tokens: of an answer.
        seed: prompt i of the file draws with seed + i.
        eos_ids: tokens that end an answer.
        prompts: ids.
        versions: of the packages that took part.
    """

    format: int
    target_hash: str
    drafter_hash: str
    target: ModelConfig
    drafter: DrafterConfig
    predictors: dict[str, PredictorConfig | None]
    bytes_per_weight: int
    temperature: float
    depth: int
    branch: int
    max_new_tokens: int
    seed: int
    eos_ids: tuple[int, ...]
    prompts: tuple[str, ...]
    versions: dict[str, str | None]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def routing(self) -> RoutingShape:
        return RoutingShape.of(self.target)

    def spec(self, **changes: Any) -> SpecConfig:
        return replace(SpecConfig(depth=self.depth, branch=self.branch, budget=0), **changes)


@dataclass(frozen=True)
class Recording:
    """Positions of all answers, one behind the other. Row 0 of a verification is the root, row i + 1 node i.

    Attributes:
        header: what was recorded.
        starts: `[P + 1]` first position of each prompt's answer.
        previous: `[P, L, W]` true experts of the last token of each prompt.
        roots: `[X]` the token that a step at this position begins with.
        tokens, parents, log_probs: `[X, N]` the candidate tree.
        drawn: `[X, R]` the token that the target draws behind every row.
        experts: `[X, R, L, W]` true routing of every row.
        forecasts: the same of each predictor.
    """

    header: Header
    starts: np.ndarray
    previous: np.ndarray
    roots: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray
    drawn: np.ndarray
    experts: np.ndarray
    forecasts: dict[str, np.ndarray]

    @property
    def depths(self) -> np.ndarray:
        """Token level of each node of the pool."""
        levels = np.arange(1, self.header.depth)
        return np.concatenate([np.ones(self.header.branch, int), np.repeat(levels + 1, self.header.branch**2)])


class Ensemble(nnx.Module):
    """Several predictors as one: their sets one behind the other on the axis of layers, their caches in one list."""

    def __init__(self, members: Mapping[str, Predictor]) -> None:
        self.members = nnx.List([*members.values()])

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        caches = [cache for member in self.members if (cache := member.empty_cache(batch, capacity)) is not None]
        return KVCache([k for cache in caches for k in cache.keys], [v for cache in caches for v in cache.values])

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[Array, KVCache | None]:
        assert cache is not None
        sets, after, first = [], KVCache([], []), 0
        for member in self.members:
            own = member.empty_cache(1, 1)
            if own is None and evidence.before_BR is None:  # caches are caught up; nobody else is asked
                sets.append(jnp.zeros((*rows.tokens_BR.shape, *evidence.last_BLW.shape[1:]), jnp.uint32))
                continue
            if own is not None:
                last = first + len(own.keys)
                own, first = KVCache(cache.keys[first:last], cache.values[first:last]), last
            sets_BRLW, own = member(rows, own, evidence)
            sets.append(sets_BRLW)
            if own is not None:
                after = KVCache(after.keys + own.keys, after.values + own.values)
        return jnp.concatenate(sets, axis=2), after


def observe(plan: StepPlan, weights: Weights, state: DecodeState) -> tuple[DecodeState, dict[str, Array]]:
    """One plain step that looks at the whole candidate tree; the arrays of one position, `[B, ..]`."""
    live_B, root_B = ~state.finished_B, jnp.take_along_axis(state.tokens_BS, state.length_B[:, None], axis=1)[:, 0]
    tree, drafted = draft(plan, weights, state)
    forecast, predicted = predict(plan, weights, drafted, tree)
    pool, checked = verify(plan, weights, predicted, tree, whole_pool(tree))
    nothing = Selection(jnp.zeros((len(root_B), 0), jnp.int32), jnp.zeros(len(root_B), jnp.int32))
    root = Verified(
        tree=verify_tree(tree, nothing, root_B, state.length_B, state.finished_B),
        features_BRF=pool.features_BRF[:, :1],
        experts_BRLW=pool.experts_BRLW[:, :1],
        drawn_BR=pool.drawn_BR[:, :1],
    )
    seen = {
        "live": live_B,
        "roots": root_B,
        "tokens": tree.tokens_BN,
        "parents": tree.parents_BN,
        "log_probs": tree.log_probs_BN,
        "drawn": pool.drawn_BR,
        "experts": pool.experts_BRLW,
    }
    if forecast is not None:
        seen["forecasts"] = jnp.concatenate([forecast.root_BLW[:, None], forecast.nodes_BNLW], axis=1)
    return commit(plan, checked, root, None), seen


class Recorder:
    """Records one prompt after the other; compiled once for all."""

    def __init__(
        self,
        decoder: Decoder,
        predictors: Mapping[str, Predictor],
        header: Header,
        longest_prompt: int,
    ) -> None:
        """`header` says how to decode; `longest_prompt` is the most tokens of a prompt."""
        spec = header.spec()
        program, weights = decoder.program("likelihood", spec, SamplingConfig(header.temperature))
        plan = replace(program.plan, eos_ids=header.eos_ids)
        if predictors:
            predictor_def, predictor_state = nnx.split(Ensemble(predictors))
            plan, weights = replace(plan, predictor=predictor_def), replace(weights, predictor=predictor_state)
        self._header, self._names, self._weights = header, tuple(predictors), weights
        scratch = replace(plan, spec=replace(spec, budget=spec.pool_size)).scratch_slots()
        self._bucket = bucket(longest_prompt)
        self._capacity = bucket(max(longest_prompt + header.max_new_tokens + scratch, self._bucket))
        self._prefill = Program(plan).prefill
        body = partial(observe, plan)
        self._observe = jax.jit(
            lambda weights, state: lax.scan(lambda state, _: body(weights, state), state, length=CHUNK),
            donate_argnames=("state",),
        )

    def prompt(self, ids: Sequence[int], seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Experts of the prompt's last token, and the arrays of every position of its answer."""
        tokens_BT = np.zeros((1, self._bucket), np.int32)
        tokens_BT[0, : len(ids)] = ids
        state = self._prefill(
            self._weights,
            jnp.asarray(tokens_BT),
            jnp.array([len(ids)], jnp.int32),
            jnp.array([len(ids) + self._header.max_new_tokens], jnp.int32),
            sequence_keys(jnp.array([seed]), jnp.array([0])),
            capacity=self._capacity,
        )
        previous_LW = np.asarray(state.previous_BLW[0])
        chunks = []
        while True:
            state, seen = self._observe(self._weights, state)
            chunks.append(jax.device_get(seen))
            if bool(state.finished_B[0]):
                break
        joined = {name: np.concatenate([chunk[name][:, 0] for chunk in chunks]) for name in chunks[0]}
        live_X = joined.pop("live")
        return previous_LW, {name: values[live_X] for name, values in joined.items()}

    def record(self, prompts: Sequence[tuple[str, Sequence[int], int]]) -> Recording:
        """Records prompts given as (id, tokens, seed)."""
        previous, parts = zip(*(self.prompt(ids, seed) for _, ids, seed in prompts), strict=True)
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        both = arrays.pop("forecasts", None)
        split = [] if both is None else np.split(both, len(self._names), axis=2)
        lengths = [len(part["roots"]) for part in parts]
        return Recording(
            header=replace(self._header, prompts=tuple(name for name, _, _ in prompts)),
            starts=np.concatenate([[0], np.cumsum(lengths)]),
            previous=np.stack(previous),
            forecasts=dict(zip(self._names, split, strict=True)),
            **arrays,
        )


def header_of(
    decoder: Decoder,
    predictors: Mapping[str, Predictor],
    *,
    temperature: float,
    spec: SpecConfig,
    max_new_tokens: int,
    seed: int,
) -> Header:
    """The header of a recording yet to be made."""
    if decoder.drafter is None:
        raise UserError("a recording needs a drafter; this model was converted without one")
    versions = environment()["versions"]
    assert isinstance(versions, dict)
    return Header(
        format=FORMAT,
        target_hash=decoder.target_hash,
        drafter_hash=decoder.drafter_hash,
        target=decoder.target.config,
        drafter=getattr(decoder.drafter, "config"),  # noqa: B009
        predictors={name: getattr(one, "config", None) for name, one in predictors.items()},
        bytes_per_weight=decoder.dtype.itemsize,
        temperature=temperature,
        depth=spec.depth,
        branch=spec.branch,
        max_new_tokens=max_new_tokens,
        seed=seed,
        eos_ids=decoder.eos_ids,
        prompts=(),
        versions=versions,
    )


def write_recording(path: Path, recording: Recording) -> None:
    """Writes the file whole or not at all."""
    arrays: dict[str, Any] = {name: getattr(recording, name) for name in ARRAYS}
    arrays |= {f"forecast_{name}": sets for name, sets in recording.forecasts.items()}
    with reported_as_user_error(f"{path}: cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as stream:
            np.savez_compressed(stream, header=np.array(json.dumps(to_json(recording.header))), **arrays)
        unfinished.replace(path)


def _header(path: Path, values: str) -> Header:
    header = from_json(Header, json.loads(values), str(path))
    if header.format != FORMAT:
        raise UserError(f"{path}: format {header.format}, this version reads {FORMAT}")
    return header


def read_recording(path: Path) -> Recording:
    """Reads what `write_recording` wrote; a wrong file is a `UserError`."""
    wrong = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with reported_as_user_error(f"{path}: is no recording", *wrong), np.load(path) as stored:
        header = _header(path, str(stored["header"]))
        arrays = {name: stored[name] for name in ARRAYS}
        forecasts = {name: stored[f"forecast_{name}"] for name in header.predictors}
    nodes, positions = header.spec().pool_size, int(arrays["starts"][-1])
    shapes = [arrays["tokens"].shape == (positions, nodes), arrays["experts"].shape[:2] == (positions, nodes + 1)]
    if not all(shapes) or len(arrays["starts"]) != len(header.prompts) + 1:
        raise UserError(f"{path}: arrays do not fit its header")
    return Recording(header=header, forecasts=forecasts, **arrays)


def read_recordings(paths: Sequence[Path]) -> Recording:
    """Several files of the same models and settings as one."""
    if not paths:
        raise UserError("there are no recordings")
    parts = [read_recording(path) for path in paths]
    first = parts[0].header
    for path, part in zip(paths, parts, strict=True):
        other = replace(part.header, prompts=first.prompts, seed=first.seed, versions=first.versions)
        differing = [name for name in vars(first) if getattr(first, name) != getattr(other, name)]
        if differing:
            raise UserError(f"{path}: differs from {paths[0]} in {', '.join(differing)}")
    prompts = [prompt for part in parts for prompt in part.header.prompts]
    if twice := sorted({prompt for prompt in prompts if prompts.count(prompt) > 1}):
        raise UserError(f"prompt '{twice[0]}' is in two recordings")
    offsets = np.cumsum([0] + [part.starts[-1] for part in parts])
    starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS if name != "starts"}
    return Recording(
        header=replace(first, prompts=tuple(prompts)),
        starts=np.concatenate([*starts, offsets[-1:]]),
        forecasts={name: np.concatenate([part.forecasts[name] for part in parts]) for name in first.predictors},
        **joined,
    )


@dataclass(frozen=True)
class Settings:
    """Record what any method would see at every position of a target's answers."""

    target: Path
    """Folder that `python -m convert` wrote."""
    prompts: Path
    """Prompt file; first turns are used."""
    out: Path
    """Folder for the shards, `recording-0000.npz` and so on."""
    drafter: Path | None = None
    """Take the drafter from this converted folder instead of the target's own."""
    predictor: tuple[Path, ...] = ()
    """Folders of expert predictors; all of them are recorded, and the previous token's experts. With several folders
    theirs are called FOLDER/NAME, by the folder's own name."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    temperature: float = 0.0
    """0 is greedy."""
    depth: int = SpecConfig.depth
    """Token levels of the candidate tree."""
    branch: int = SpecConfig.branch
    """Children of each expanded node."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    shard_prompts: int = 32
    """Prompts in a file."""
    seed: int = 0
    """Seed of sampling; prompt i draws with seed + i."""


def named_predictors(folders: Sequence[Path], decoder: Decoder) -> dict[str, Predictor]:
    """`previous`, and the predictors of some folders by the names they are recorded under."""
    found: dict[str, Predictor] = {"previous": Previous()}
    for folder in folders:
        loaded = load_predictors(
            folder, decoder.target_hash, decoder.dtype, decoder.target, drafter_hash=decoder.drafter_hash
        )
        named = loaded if len(folders) == 1 else {f"{folder.name}/{name}": one for name, one in loaded.items()}
        if twice := found.keys() & named.keys():
            raise UserError(f"{folder}: another predictor is called '{min(twice)}' already")
        found |= named
    return found


def shards(settings: Settings) -> Iterator[Path]:
    """Records what is missing; yields the file of every shard."""
    prompts = read_prompts(settings.prompts, settings.limit)
    decoder = Decoder.load(settings.target, drafter=settings.drafter)
    predictors = named_predictors(settings.predictor, decoder)
    for prompt in prompts:
        decoder.check_fits(prompt.turns[0], settings.max_new_tokens, where=f"{settings.prompts}: {prompt.id}")
    header = header_of(
        decoder,
        predictors,
        temperature=settings.temperature,
        spec=SpecConfig(depth=settings.depth, branch=settings.branch, budget=0),
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )
    encoded = [
        (prompt.id, decoder.encode(prompt.turns[0]), settings.seed + index) for index, prompt in enumerate(prompts)
    ]
    recorder = Recorder(decoder, predictors, header, max(len(ids) for _, ids, _ in encoded))
    for index, first in enumerate(range(0, len(encoded), settings.shard_prompts)):
        part = encoded[first : first + settings.shard_prompts]
        path = settings.out / f"recording-{index:04d}.npz"
        if not path.exists():
            write_recording(path, recorder.record(part))
        elif read_recording(path).header != replace(header, prompts=tuple(name for name, _, _ in part)):
            raise UserError(f"{path}: recorded with other models, prompts, settings or versions; choose another --out")
        yield path


def run(settings: Settings) -> None:
    require_positive(settings, "limit", "max_new_tokens", "shard_prompts")
    files = list(track(shards(settings), description="shards"))
    recording = read_recordings(files)
    prompts, positions = len(recording.header.prompts), len(recording.roots)
    print(f"{settings.out}: {prompts} prompts, {positions} positions, {len(files)} files")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
