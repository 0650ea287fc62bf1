"""Sweep the settings of a speculative method: acceptance length against distinct experts, with the Pareto front.

    python -m experiments.sweep --target converted/tiny-qwen3-moe --predictor checkpoints/tiny-qwen3-moe/predictor \
        --prompts experiments/prompts/demo.jsonl

An interrupted sweep continues: settings that are in `sweep.jsonl` already are not measured again.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.progress import track

from ecospec_jax import Decoder, SamplingConfig, SpecConfig, UserError
from ecospec_jax.checkpoint import MANIFEST
from ecospec_jax.cost import byte_model
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.methods import get_method
from experiments.environment import environment
from experiments.harness import finished_lines
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.prompts import Prompt, read_prompts
from experiments.tables import markdown_table, write_text


@dataclass(frozen=True)
class Settings:
    """Sweep the settings of a speculative method."""

    target: Path
    """Folder that `python -m convert` wrote."""
    prompts: Path
    """Prompt file; first turns are used."""
    predictor: Path | None = None
    """Folder of expert predictors."""
    methods: tuple[str, ...] = ("likelihood", "ecospec")
    """Methods to sweep; eps and buffer are swept only where a predictor informs the policy."""
    eps: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0, 64.0)
    """Added to the count of new experts in the cost-aware score."""
    buffer: tuple[Literal["empty", "root", "previous"], ...] = ("empty", "root", "previous")
    """Experts that count as paid for before any node is chosen."""
    budget: tuple[int, ...] = (1, 2, 4, 6)
    """Candidate nodes verified."""
    depth: tuple[int, ...] = (3,)
    """Token levels of the candidate tree."""
    branch: tuple[int, ...] = (2,)
    """Children of each expanded node."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    batch_size: int = 1
    """Prompts decoded together."""
    out: Path = Path("results/sweep")
    """Folder for sweep.jsonl, sweep.md and pareto.png."""


@dataclass(frozen=True)
class Point:
    """One setting of one method."""

    method: str
    spec: SpecConfig

    @property
    def key(self) -> str:
        return json.dumps([self.method, asdict(self.spec)], sort_keys=True)


def grid(settings: Settings) -> list[Point]:
    """Every setting once; settings a method does not read stay at their defaults."""
    points: dict[str, Point] = {}
    for method in settings.methods:
        informed = get_method(method).predictor is not None
        eps = settings.eps if informed else (SpecConfig.eps,)
        buffers = settings.buffer if informed else (SpecConfig.buffer,)
        for depth, branch, budget, one_eps, buffer in itertools.product(
            settings.depth, settings.branch, settings.budget, eps, buffers
        ):
            spec = SpecConfig(depth=depth, branch=branch, budget=budget, eps=one_eps, buffer=buffer)
            point = Point(method, spec)
            points[point.key] = point
    return list(points.values())


def measure(decoder: Decoder, settings: Settings, texts: list[str], point: Point) -> dict[str, Any]:
    stats = decoder.generate(
        texts,
        method=point.method,
        spec=point.spec,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
    ).stats
    bytes_read = byte_model(decoder.target.config, decoder.dtype.itemsize)
    per_token = bytes_read.step(stats.u) * stats.verifications / max(stats.emitted, 1)
    return {"method": point.method, **asdict(point.spec), "tau": stats.tau, "u": stats.u, "bytes_per_token": per_token}


def pareto(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that no other row beats in both tau and U, by rising U."""
    front, best = [], float("-inf")
    for row in sorted(rows, key=lambda row: (row["u"], -row["tau"])):
        if row["tau"] > best:
            front.append(row)
            best = row["tau"]
    return front


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        (line,) = axis.plot([r["u"] for r in pareto(mine)], [r["tau"] for r in pareto(mine)], label=f"{method} front")
        axis.scatter([r["u"] for r in mine], [r["tau"] for r in mine], s=12, color=line.get_color())
    axis.set_xlabel("U: distinct experts per MoE layer and verification")
    axis.set_ylabel("tau: tokens per verification")
    axis.legend()
    save_figure(figure, path)


def identity(settings: Settings, decoder: Decoder, prompts: list[Prompt]) -> dict[str, Any]:
    """What all rows of a sweep must have in common."""
    asked = json.dumps([[prompt.id, prompt.turns[0]] for prompt in prompts]).encode()
    predictor = None if settings.predictor is None else (settings.predictor / MANIFEST).read_bytes()
    return {
        "target_hash": decoder.target_hash,
        "predictor_hash": None if predictor is None else hashlib.sha256(predictor).hexdigest(),
        "prompts": len(prompts),
        "prompts_hash": hashlib.sha256(asked).hexdigest(),
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        **environment(),
    }


def read_done(file: Path, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run of the same sweep; a run with other prompts or another target is refused.

    A last line that an interruption cut off is dropped from the file.
    """
    if not file.exists():
        return {}
    done = {}
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError, KeyError):
        for values in finished_lines(file):
            if values["common"] != common:
                raise UserError(
                    f"{file}: holds a sweep of another target, predictor, prompt set or version; choose another --out"
                )
            done[values["key"]] = values["row"]
    return done


def run(settings: Settings) -> None:
    require_positive(settings, "limit", "max_new_tokens", "batch_size")
    prompts = read_prompts(settings.prompts, settings.limit)
    points = grid(settings)
    if not points:
        raise UserError("there are no settings to sweep: every option needs at least one value")
    decoder = Decoder.load(settings.target, predictor=settings.predictor)
    for point in points:  # refuses what is missing before anything is written
        decoder.program(point.method, point.spec, SamplingConfig())
    for prompt in prompts:
        decoder.check_fits(prompt.turns[0], settings.max_new_tokens, where=f"{settings.prompts}: {prompt.id}")
    texts = [prompt.turns[0] for prompt in prompts]
    common = identity(settings, decoder, prompts)
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        file = settings.out / "sweep.jsonl"
        done = read_done(file, common)
        with file.open("a") as stream:
            for point in track([p for p in points if p.key not in done], description="settings"):
                done[point.key] = measure(decoder, settings, texts, point)
                stream.write(json.dumps({"key": point.key, "row": done[point.key], "common": common}) + "\n")
                stream.flush()
        rows = [done[point.key] for point in points]
        front = pareto(rows)
        header = ["method", "depth", "branch", "budget", "eps", "buffer", "tau", "U", "MB/token", "on the front"]
        cells = [
            [
                row["method"],
                *(str(row[name]) for name in ("depth", "branch", "budget", "eps", "buffer")),
                f"{row['tau']:.3f}",
                f"{row['u']:.2f}",
                f"{row['bytes_per_token'] / 1e6:.3f}",
                "yes" if row in front else "",
            ]
            for row in sorted(rows, key=lambda row: row["bytes_per_token"])
        ]
        write_text(settings.out / "sweep.md", markdown_table(header, cells))
        plot(settings.out / "pareto.png", rows)
    print(f"written to {settings.out}: sweep.jsonl, sweep.md, pareto.png")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
