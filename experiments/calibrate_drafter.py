"""Find out which boundaries of the target an EAGLE-3 head was made for, by how often it proposes the target's choice.

    python -m experiments.calibrate_drafter --target converted/tiny-qwen3-moe --prompts experiments/prompts/demo.jsonl

The converted head is fed the states of its own boundaries, and of those one lower and one higher, over the same text.
That is what `--aux-offset` of `python -m convert` moves (docs/formats.md C.2), so nothing needs to be converted twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Bool, Int
from rich.progress import track

from ecospec_jax import Decoder, UserError
from ecospec_jax.config import FINAL
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.training.sequences import PADDING, Packed, document_rows
from experiments.intervals import ratio_interval
from experiments.options import require_positive
from experiments.prompts import read_prompts
from experiments.tables import markdown_table

PIECE = 128  # tokens; pieces are what the intervals resample
FEWEST_TOKENS = 1000
SHIFTS = (-1, 0, 1)
HINTS = {
    -1: "convert the drafter again with the --aux-offset one lower",
    0: "as converted",
    1: "convert the drafter again with the --aux-offset one higher",
}


@dataclass(frozen=True)
class Settings:
    """Measure a drafter's agreement with its target at its boundaries and at their neighbours."""

    target: Path
    """Folder that `python -m convert` wrote."""
    drafter: Path | None = None
    """Take the drafter from this converted folder instead of the target's own."""
    prompts: Path | None = None
    """Prompt file; the first turn of each prompt is used, in the chat template. 1000 tokens are needed."""
    text: Path | None = None
    """Instead of a prompt file: a file of plain text."""
    limit: int | None = None
    """Use only the first prompts of the file."""


@dataclass(frozen=True)
class Agreement:
    """Of one choice of boundaries.

    Attributes:
        boundaries: whose states the drafter was fed.
        hits: in each piece, proposals that were the target's choice.
    """

    boundaries: tuple[int, ...]
    hits: np.ndarray


@partial(jax.jit, static_argnums=(0, 1, 2))
def hits_of(
    target_def: nnx.GraphDef,
    drafter_def: nnx.GraphDef,
    choices: tuple[tuple[int, ...], ...],
    target_state: nnx.State,
    drafter_state: nnx.State,
    tokens_BT: Int[Array, "batch tokens"],
    length_B: Int[Array, " batch"],
) -> Bool[Array, "choices batch tokens"]:
    """Whether entry t, which holds token t + 1, proposes what the target chooses behind that token."""
    target, drafter = nnx.merge(target_def, target_state), nnx.merge(drafter_def, drafter_state)
    batch, length = tokens_BT.shape
    place_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
    boundaries = tuple(sorted({boundary for choice in choices for boundary in choice}))
    rows = document_rows(Packed(tokens_BT, jnp.where(place_BT < length_B[:, None], 0, PADDING)))
    output, _ = target(rows, target.empty_cache(batch, length), boundaries)
    states = dict(zip(boundaries, jnp.split(output.features_BRF, len(boundaries), axis=-1), strict=True))
    chosen_BT = jnp.roll(jnp.argmax(target.logits(output.hidden_BRD), axis=-1), -1, axis=1)
    live_BT = place_BT < length_B[:, None] - 1
    entries = replace(rows, tokens_BR=jnp.roll(tokens_BT, -1, axis=1), live_BR=live_BT)

    def hits(choice: tuple[int, ...]) -> Bool[Array, "batch tokens"]:
        features_BTF = jnp.concatenate([states[boundary] for boundary in choice], axis=-1)
        state_BTH, _ = drafter.catch_up(entries, features_BTF, drafter.empty_cache(batch, length))
        return (drafter.propose(state_BTH, 1)[0][..., 0] == chosen_BT) & live_BT

    return jnp.stack([hits(choice) for choice in choices])


def measure(decoder: Decoder, texts: Sequence[Sequence[int]]) -> tuple[list[Agreement], np.ndarray]:
    """The agreement of every shift that the target has boundaries for, and the proposals made in each piece."""
    drafter, layers = decoder.drafter, decoder.target.config.num_layers
    assert drafter is not None
    shifted = [tuple(boundary + shift for boundary in drafter.boundaries) for shift in SHIFTS]
    choices = tuple(choice for choice in shifted if min(choice) >= 0 and max(choice) <= layers)
    if len(choices) == 1:
        raise UserError(f"boundaries {_listed(choices[0])} of {layers} layers have no neighbours to compare with")
    pieces = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    made_P = np.array([len(piece) - 1 for piece in pieces])
    if made_P.sum() < FEWEST_TOKENS:
        raise UserError(f"{made_P.sum()} tokens to compare are too few; give a text of {FEWEST_TOKENS} or more")
    (target_def, target_state), (drafter_def, drafter_state) = nnx.split(decoder.target), nnx.split(drafter)
    hits_PC = []
    for piece in track(pieces, description="pieces"):
        tokens_BT = jnp.asarray([[*piece, *[0] * (PIECE - len(piece))]], jnp.int32)
        lengths_B = jnp.array([len(piece)])
        hits_CBT = hits_of(target_def, drafter_def, choices, target_state, drafter_state, tokens_BT, lengths_B)
        hits_PC.append(np.asarray(jnp.sum(hits_CBT, axis=(1, 2))))
    return [
        Agreement(choice, hits_P) for choice, hits_P in zip(choices, np.stack(hits_PC, axis=1), strict=True)
    ], made_P


def verdict(agreements: Sequence[Agreement], made_P: np.ndarray, converted: tuple[int, ...]) -> str:
    """Which boundaries are right: those that agree most often, if the paired interval of their lead is above zero."""
    best, second = sorted(agreements, key=lambda one: one.hits.sum(), reverse=True)[:2]
    lead = ratio_interval(best.hits - second.hits, made_P)
    numbers = f"{lead.cell()} above {_listed(second.boundaries)}"
    if lead.low <= 0:
        return f"undecided: {_listed(best.boundaries)} is only {numbers}; give more text"
    return f"right: {_listed(best.boundaries)}, {HINTS[best.boundaries[0] - converted[0]]}; {numbers}"


def _listed(boundaries: tuple[int, ...]) -> str:
    return " ".join(map(str, boundaries))


def run(settings: Settings) -> None:
    require_positive(settings, "limit")
    if (settings.prompts is None) == (settings.text is None):
        raise UserError("give either --prompts or --text")
    decoder = Decoder.load(settings.target, drafter=settings.drafter)
    if decoder.drafter is None:
        raise UserError(f"{settings.target}: was converted without a drafter")
    if FINAL in decoder.drafter.boundaries:
        raise UserError(
            f"{settings.drafter or settings.target}: the drafter reads the last hidden state, which has no neighbours"
        )
    agreements, made_P = measure(decoder, read_texts(settings, decoder))
    cells = []
    for one in agreements:
        share = ratio_interval(one.hits, made_P)
        counts = f"{one.hits.sum()} of {made_P.sum()}"
        cells.append([_listed(one.boundaries), counts, share.cell()])
    print(markdown_table(["boundaries", "the target's choice", "share [95 % interval]"], cells))
    print(verdict(agreements, made_P, decoder.drafter.boundaries))


def read_texts(settings: Settings, decoder: Decoder) -> list[list[int]]:
    """Token ids of the prompts in the chat template, or of the plain text."""
    if settings.prompts is not None:
        return [decoder.encode(prompt.turns[0]) for prompt in read_prompts(settings.prompts, settings.limit)]
    if decoder.tokenizer is None:
        raise UserError("a text needs a tokenizer; this model was converted without one")
    assert settings.text is not None
    with reported_as_user_error(f"{settings.text}: cannot be read", OSError, ValueError):
        return [decoder.tokenizer.encode(settings.text.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
