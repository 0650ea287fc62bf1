"""Fit how likely the target accepts a drafted node, and keep it with the drafter: `FOLDER/acceptance.json`.

    python -m experiments.fit_acceptance --target converted/tiny-qwen3-moe --prompts my_prompts.jsonl

or from `--recording` files. Every position of a recorded answer tells the outcome of the edges along the accepted path.
Every second prompt is held out to judge the fit by. Methods that calibrate begin with it at this temperature.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from scipy.optimize import minimize

from ecospec_jax import Decoder, SpecConfig, UserError
from ecospec_jax.acceptance import ACCEPTANCE, FORMAT, Acceptance, AcceptanceFit, read_acceptance, write_acceptance
from ecospec_jax.calibration import FEATURES, edge_features, outcomes
from ecospec_jax.checkpoint import Manifest, read_manifest
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.tree import build_tree, verify_tree, whole_pool
from ecospec_jax.verification import accept_path
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.prompts import read_prompts
from experiments.recording import Recorder, Recording, header_of, read_recordings
from experiments.tables import markdown_table

BINS = 10
RIDGE = 1.0  # pseudo-observations that take the drafter at its word
FEWEST_EDGES = 200
MOST_CERTAINTY = 200.0  # observations that the fit may count for against what decoding goes on to learn
TRUSTING = np.array([1.0 if name == "logit" else 0.0 for name in FEATURES])


@dataclass(frozen=True)
class Settings:
    """Fit how likely the target accepts a drafted node."""

    target: Path
    """Folder that `python -m convert` wrote."""
    drafter: Path | None = None
    """Take the drafter from this converted folder instead of the target's own; the fit is written there."""
    recording: tuple[Path, ...] = ()
    """Files that `python -m experiments.recording` wrote."""
    prompts: Path | None = None
    """Instead of recordings: a prompt file to record first."""
    temperature: float | None = None
    """Of the decoding; with recordings it must be theirs. Default: theirs, or 0."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    max_new_tokens: int = 128
    """With a prompt file: most tokens of an answer."""
    plot: Path = Path("results/acceptance.png")
    """Reliability plot of the held-out edges."""


@dataclass(frozen=True)
class Edges:
    """Edges with a known outcome, `X` of them.

    Attributes:
        features_XF: see `calibration.edge_features`.
        accepted_X: whether the target drew the node's token.
        prompt_X: index of the prompt.
    """

    features_XF: np.ndarray
    accepted_X: np.ndarray
    prompt_X: np.ndarray

    def of(self, mask_X: np.ndarray) -> "Edges":
        return Edges(self.features_XF[mask_X], self.accepted_X[mask_X], self.prompt_X[mask_X])


def edges_of(recording: Recording) -> Edges:
    """All edges whose outcome the recording tells."""
    positions = len(recording.roots)
    tree = build_tree(
        jnp.asarray(recording.tokens),
        jnp.asarray(recording.parents),
        jnp.asarray(recording.depths, jnp.int32),
        jnp.asarray(recording.log_probs),
    )
    length_B, nothing_B = jnp.zeros(positions, jnp.int32), jnp.zeros(positions, bool)
    pool = verify_tree(tree, whole_pool(tree), jnp.asarray(recording.roots), length_B, nothing_B)
    path = accept_path(pool, jnp.asarray(recording.drawn), recording.header.depth + 1)
    seen = outcomes(tree, path, pool.pool_rows_BR, ~nothing_B)
    features_BNF, known_BN, accepted_BN = jax.device_get((edge_features(tree), seen.known_BN, seen.accepted_BN))
    prompt_B = np.repeat(np.arange(len(recording.starts) - 1), np.diff(recording.starts))
    prompt_BN = np.broadcast_to(prompt_B[:, None], known_BN.shape)
    return Edges(features_BNF[known_BN].astype(np.float64), accepted_BN[known_BN], prompt_BN[known_BN])


def probabilities(features_XF: np.ndarray, weights_F: np.ndarray) -> np.ndarray:
    """Of the logistic model."""
    return 1 / (1 + np.exp(-np.clip(features_XF @ weights_F, -30, 30)))


def fit(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Weights, that of the logit not negative, and their precision: at most that of `MOST_CERTAINTY` observations."""
    signs_X = np.where(edges.accepted_X, 1.0, -1.0)

    def loss(weights_F: np.ndarray) -> tuple[float, np.ndarray]:
        margin_X, off_F = signs_X * (edges.features_XF @ weights_F), weights_F - TRUSTING
        slope_X = -signs_X / (1 + np.exp(np.clip(margin_X, -30, 30)))
        value = np.logaddexp(0, -margin_X).sum() + 0.5 * RIDGE * off_F @ off_F
        return float(value), edges.features_XF.T @ slope_X + RIDGE * off_F

    bounds = [(0, None) if name == "logit" else (None, None) for name in FEATURES]
    weights_F = np.asarray(minimize(loss, TRUSTING, jac=True, method="L-BFGS-B", bounds=bounds).x)
    p_X = probabilities(edges.features_XF, weights_F)
    hessian_FF = (edges.features_XF * (p_X * (1 - p_X))[:, None]).T @ edges.features_XF
    scale = min(1.0, MOST_CERTAINTY / len(p_X))
    return weights_F, scale * hessian_FF + RIDGE * np.eye(len(FEATURES))


def reliability(probability_X: np.ndarray, accepted_X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean probability, accepted share and count of each of `BINS` bins of equal count."""
    bins = np.array_split(np.argsort(probability_X, kind="stable"), min(BINS, len(probability_X)))
    said = np.array([probability_X[one].mean() for one in bins])
    true = np.array([accepted_X[one].mean() for one in bins])
    return said, true, np.array([len(one) for one in bins])


def calibration_error(probability_X: np.ndarray, accepted_X: np.ndarray) -> float:
    """Expected calibration error: the mean gap between said and true, over bins of equal count."""
    said, true, count = reliability(probability_X, accepted_X)
    return float((np.abs(said - true) * count).sum() / count.sum())


def load_recording(settings: Settings, manifest: Manifest, drafter_hash: str) -> Recording:
    """The recordings, checked against target, drafter and temperature; or one made of the prompts."""
    if bool(settings.recording) == (settings.prompts is not None):
        raise UserError("give either --recording files or --prompts (a file)")
    if settings.prompts is not None:
        return make_recording(settings)
    recording = read_recordings(settings.recording)
    header = recording.header
    for what, own, other in (
        ("target", header.target_hash, manifest.target_hash),
        ("drafter", header.drafter_hash, drafter_hash),
    ):
        if own != other:
            raise UserError(f"{settings.recording[0]}: was recorded with another {what}")
    if settings.temperature is not None and settings.temperature != header.temperature:
        raise UserError(
            f"{settings.recording[0]}: was recorded at temperature {header.temperature:g}, not {settings.temperature:g}"
        )
    return recording


def make_recording(settings: Settings) -> Recording:
    """Records the prompts, without predictors."""
    assert settings.prompts is not None
    prompts = read_prompts(settings.prompts, settings.limit)
    decoder = Decoder.load(settings.target, drafter=settings.drafter)
    for prompt in prompts:
        decoder.check_fits(prompt.turns[0], settings.max_new_tokens, where=f"{settings.prompts}: {prompt.id}")
    header = header_of(
        decoder,
        {},
        temperature=settings.temperature or 0.0,
        spec=SpecConfig(),
        max_new_tokens=settings.max_new_tokens,
        seed=0,
    )
    encoded = [(prompt.id, decoder.encode(prompt.turns[0]), index) for index, prompt in enumerate(prompts)]
    return Recorder(decoder, {}, header, max(len(ids) for _, ids, _ in encoded)).record(encoded)


def plot(path: Path, curves: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """Said against true."""
    figure, axis = plt.subplots(figsize=(4.5, 4), layout="constrained")
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for label, (said, true, _) in curves.items():
        axis.plot(said, true, marker="o", label=label)
    axis.set_xlabel("probability of acceptance, as said")
    axis.set_ylabel("share accepted")
    axis.legend()
    with reported_as_user_error(f"{path}: cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, path)


def with_fit(path: Path, drafter_hash: str, new: AcceptanceFit) -> Acceptance:
    """What is there already, with the new fit in its place; a wrong file, or another drafter's, is a `UserError`."""
    if path.exists():
        try:
            return read_acceptance(path, drafter_hash).with_fit(new)
        except UserError as error:
            raise UserError(f"{error}; remove it to fit anew") from error
    return Acceptance(FORMAT, drafter_hash, ()).with_fit(new)


def run(settings: Settings) -> None:
    require_positive(settings, "limit", "max_new_tokens")
    manifest = read_manifest(settings.target)
    folder = settings.target if settings.drafter is None else settings.drafter
    drafter_hash = read_manifest(folder).drafter_hash
    if not drafter_hash:
        raise UserError(f"{folder}: was converted without a drafter")
    recording = load_recording(settings, manifest, drafter_hash)
    edges = edges_of(recording)
    train_X = edges.prompt_X % 2 == 0
    fewest = min(int(train_X.sum()), int((~train_X).sum()))
    if fewest < FEWEST_EDGES:
        raise UserError(f"{fewest} edges of known outcome in one half of the prompts; a fit needs {FEWEST_EDGES}")
    weights_F, precision_FF = fit(edges.of(train_X))
    held = edges.of(~train_X)
    said = {
        name: probabilities(held.features_XF, weights) for name, weights in (("drafter", TRUSTING), ("fit", weights_F))
    }
    errors = {name: calibration_error(one, held.accepted_X) for name, one in said.items()}
    new = AcceptanceFit(
        temperature=recording.header.temperature,
        weights=tuple(weights_F.tolist()),
        precision=tuple(tuple(row) for row in precision_FF.tolist()),
        edges=int(train_X.sum()),
        error_before=errors["drafter"],
        error_after=errors["fit"],
    )
    path = folder / ACCEPTANCE
    write_acceptance(path, with_fit(path, drafter_hash, new))
    plot(settings.plot, {name: reliability(one, held.accepted_X) for name, one in said.items()})
    print(markdown_table(FEATURES, [[f"{weight:.3f}" for weight in weights_F]]), end="")
    print(
        f"expected calibration error on {len(held.accepted_X)} held-out edges: "
        f"{new.error_before:.3f} of the drafter, {new.error_after:.3f} of the fit on {new.edges} edges"
    )
    print(f"written: {path} (temperature {new.temperature:g}), {settings.plot}")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
