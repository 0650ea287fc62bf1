"""Batches of prompts decoded by several contenders in turn, and their figures by prompt."""

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.progress import track

from ecospec_jax import Decoder
from ecospec_jax.cost import byte_model
from ecospec_jax.metrics import DecodeStats
from experiments import decode
from experiments.harness import Measurement, Results, Scalar
from experiments.intervals import Interval, median_interval
from experiments.prompts import Prompt


@dataclass(frozen=True)
class Contender:
    """A method, how it decodes, and what tells it from others in the results."""

    method: str
    settings: decode.Settings
    case: Mapping[str, Scalar]


def check_contenders(decoder: Decoder, contenders: Iterable[Contender]) -> None:
    """Refuses contenders that lack a drafter or predictor, or whose options are impossible."""
    for one in contenders:
        decoder.program(one.method, one.settings.spec, one.settings.sampling, ignore_eos=one.settings.ignore_eos)


def measure_batches(
    results: Results,
    decoder: Decoder,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    case: Mapping[str, Scalar],
    *,
    repeats: int,
    staged: bool = False,
) -> None:
    """Decodes batch by batch, the contenders in turn on each, so that a drifting machine hits them alike.

    With `staged`, milliseconds of the stages are measured as well, on the batch's first turns.
    """
    capacity = max(
        decode.whole_length(decoder, prompt, one.settings.max_new_tokens) for prompt in prompts for one in contenders
    )
    console, batch_size = Console(), contenders[0].settings.batch_size
    numbered = list(enumerate(prompts))
    batches = [numbered[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    rounds = [(batch, repeat) for batch in batches for repeat in range(repeats)]
    for batch, repeat in track(rounds, description=" ".join(map(str, case.values())), console=console):
        for one in contenders:

            def measure(one: Contender = one, batch: Sequence[tuple[int, Prompt]] = batch) -> dict[str, float]:
                talks, stats = decode.converse(decoder, one.settings, one.method, list(batch), capacity, console)
                found = figures(decoder, stats) | {"checksum": checksum(talks)}
                return found | (stages(decoder, one, batch) if staged else {})

            results.measure(
                {**case, "method": one.method, **one.case},
                measure,
                seed=one.settings.seed,
                repeat=repeat,
                prompt=batch[0][1].id,
            )


def stages(decoder: Decoder, contender: Contender, batch: Sequence[tuple[int, Prompt]]) -> dict[str, float]:
    """Milliseconds of the stages by `NAME_ms`."""
    found = decoder.stage_milliseconds(
        [decode.Conversation(prompt, 0).next_input(decoder) for _, prompt in batch],
        method=contender.method,
        spec=contender.settings.spec,
        sampling=contender.settings.sampling,
    )
    return {f"{name}_ms": value for name, value in found.items()}


def figures(decoder: Decoder, stats: DecodeStats) -> dict[str, float]:
    """What is kept of a batch; docs/design.md section 4 defines the figures."""
    step = byte_model(decoder.target.config, decoder.dtype.itemsize).step(stats.u)
    return {
        "tokens_per_second": stats.tokens_per_second,
        "step_ms": 1e3 * stats.decode_seconds / stats.verifications if stats.verifications else math.nan,
        "tau": stats.tau,
        "u": stats.u,
        "overlap": stats.overlap,
        "rows": stats.rows,
        "bytes_per_step": step,
        "bytes_per_token": step * stats.verifications / stats.emitted if stats.emitted else math.nan,
        "emitted": stats.emitted,
        "prefill_ms": 1e3 * stats.prefill_seconds,
    }


def checksum(conversations: Sequence[decode.Conversation]) -> int:
    """The same for the same tokens: whether a contender changed an answer can be told from results."""
    tokens = [token for one in conversations for answer in one.answers for token in (*answer.tokens, -1)]
    return zlib.crc32(np.array(tokens, np.int64).tobytes())


def by_prompt(measurements: Iterable[Measurement], value: str, **case: Scalar) -> dict[tuple[str, str], float]:
    """A value by data set and prompt: the median over repeats and seeds of the cases that agree with `case`."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in measurements:
        if one.prompt is not None and all(one.case.get(name) == wanted for name, wanted in case.items()):
            number = one.values.get(value)
            key = (str(one.case.get("data_set")), one.prompt)
            found.setdefault(key, []).append(math.nan if number is None else number)
    return {key: statistics.median(values) for key, values in found.items()}


def median_of(measurements: Iterable[Measurement], value: str, **case: Scalar) -> Interval:
    """Median of a value over the prompts of the cases that agree with `case`."""
    return median_interval(list(by_prompt(measurements, value, **case).values()))


def paired(mine: Mapping[tuple[str, str], float], theirs: Mapping[tuple[str, str], float]) -> np.ndarray:
    """Both values of each prompt, `[prompts, 2]`; the two must be of the same prompts."""
    if mine.keys() != theirs.keys():
        raise ValueError("not of the same prompts")
    return np.array([(value, theirs[key]) for key, value in mine.items()], np.float64).reshape(-1, 2)


def median_ratio(both: np.ndarray) -> Interval:
    """Of the first values of pairs over the second."""
    return median_interval(list(both[:, 0] / both[:, 1]))


def median_difference(both: np.ndarray) -> Interval:
    """Of the first values of pairs less the second."""
    return median_interval(list(both[:, 0] - both[:, 1]))


def contender(method: str, settings: decode.Settings, case: Mapping[str, Scalar], **changes: object) -> Contender:
    """A contender with changes of its settings, which are its case as well."""
    return Contender(method, replace(settings, **changes), {**case, **changes})  # pyright: ignore[reportArgumentType]
