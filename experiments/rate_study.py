"""Where selection by rate pays, in one command: recordings, replays under the costs of full targets, wall clock.

    python -m experiments.rate_study --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --prompts experiments/prompts/demo.jsonl

Every combination of pool, temperature and batch size is a part, kept in `--out`/parts: an interrupted or extended run
goes on with those that are missing. `--quick` is a small run; `--measure` adds wall clock in memory-bound mode.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ecospec_jax import SamplingConfig, SpecConfig, UserError
from ecospec_jax.checkpoint import read_manifest
from ecospec_jax.errors import reported_as_user_error, run_command
from experiments import decode, recording, replay
from experiments.environment import environment
from experiments.intervals import Interval, difference_interval, error_bars
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.prompts import Prompt, read_prompts
from experiments.rate_measure import candidates, fitted_cost, time_batches
from experiments.recording import Recording, read_recordings
from experiments.replay_costs import TARGETS, cost_model
from experiments.tables import markdown_table, notes, write_text

RIVALS = ("likelihood", "ecospec")  # that the others are compared with, each at its own best setting
PLOTTED = ("likelihood", "ecospec", "size by C", "rate token_table", "rate backbone")
FULL_TARGETS = ("qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3.1")


@dataclass(frozen=True)
class Settings:
    """Where selection by rate pays."""

    target: Path
    """Folder that `python -m convert` wrote."""
    prompts: tuple[Path, ...]
    """Prompt files; first turns are used."""
    predictor: Path | None = None
    """Folder of expert predictors; without it only those that need no training take part."""
    limit: int = 48
    """Use only the first prompts of each file."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    pools: tuple[str, ...] = ("2x3",)
    """Candidate trees, branch x depth."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Prompts that step together."""
    costs: tuple[str, ...] = FULL_TARGETS
    """Targets whose costs the replay takes; `own` are those of the recorded model."""
    budgets: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Sizes of fixed trees."""
    eps: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0)
    """Of the cost-aware score."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    measure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Measure wall clock as well; the machine should do nothing else."""
    pad_ffn: int = 2600
    """With --measure: hidden units added to every expert, so that no cache holds them all."""
    measured_limit: int = 32
    """With --measure: prompts, taken from all files in turn."""
    measured_tokens: int = 64
    """With --measure: most tokens of an answer."""
    measured_budgets: tuple[int, ...] = (1, 4)
    """With --measure: sizes of fixed trees; the largest caps the others."""
    recordings: Path | None = None
    """Folder of recordings to use and to add to. Default: `--out`/recordings."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A small run: 8 prompts a file, greedy, batches of 1 and 4, answers of 32 tokens, few settings."""
    out: Path = Path("results/rate_study")
    """Folder for rate_study.jsonl, rate_study.md, the plots and the parts."""

    def small(self) -> "Settings":
        return replace(
            self,
            limit=min(self.limit, 8),
            temperatures=self.temperatures[:1],
            pools=self.pools[:1],
            batch_sizes=(1, 4),
            budgets=(1, 4),
            eps=self.eps[:1],
            max_new_tokens=min(self.max_new_tokens, 32),
            measured_limit=min(self.measured_limit, 8),
            measured_tokens=min(self.measured_tokens, 32),
        )


@dataclass(frozen=True)
class Part:
    """One combination of a replay; the pool is branch x depth."""

    pool: str
    temperature: float
    batch: int

    @property
    def name(self) -> str:
        return f"{self.pool}-T{self.temperature:g}-B{self.batch}"

    def json(self) -> dict[str, Any]:
        return asdict(self)


def pool_spec(pool: str) -> SpecConfig:
    """Branch and depth of a pool given as `2x3`."""
    match = re.fullmatch(r"(\d+)x(\d+)", pool)
    if match is None:
        raise UserError(f"--pools: '{pool}' is not branch x depth, such as 2x3")
    return SpecConfig(branch=int(match[1]), depth=int(match[2]), budget=0)


def kept(path: Path, key: dict[str, Any], make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines of a part: read if it is there, else made and written. `key` is all that they depend on."""
    key = json.loads(json.dumps(key, default=str))
    if path.exists():
        with reported_as_user_error(f"{path}: is no part of a study", OSError, ValueError, KeyError, TypeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            found, lines = stored["key"], stored["lines"]
        if found != key:
            differing = sorted(name for name in {*found, *key} if found.get(name) != key.get(name))
            raise UserError(f"{path}: made with other {', '.join(differing)}; choose another --out")
        return lines
    lines = make()
    with reported_as_user_error(f"{path}: cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"key": key, "lines": lines}, indent=1) + "\n")
    return lines


def record(settings: Settings, pool: str, temperature: float) -> Recording:
    """All prompts with this candidate tree and temperature; what has been recorded is read."""
    spec, files = pool_spec(pool), []
    for path in settings.prompts:
        asked = recording.Settings(
            target=settings.target,
            prompts=path,
            out=(settings.recordings or settings.out / "recordings")
            / f"{path.stem}-T{temperature:g}-k{spec.branch}-D{spec.depth}",
            predictor=() if settings.predictor is None else (settings.predictor,),
            limit=settings.limit,
            temperature=temperature,
            depth=spec.depth,
            branch=spec.branch,
            max_new_tokens=settings.max_new_tokens,
        )
        files += list(recording.shards(asked))
    return read_recordings(files)


def replayed(settings: Settings, part: Part, read: Callable[[str, float], Recording]) -> list[dict[str, Any]]:
    """Of each family the line of its best setting, under each target's costs, with drafts free and paid."""
    recorded = read(part.pool, part.temperature)
    asked = replay.Settings(recording=(), costs=settings.costs, budgets=settings.budgets, eps=settings.eps)
    found, walks, lines = replay.line_up(asked, recorded), replay.Replay(recorded, part.batch), []
    for target, draft in itertools.product(settings.costs, ("free", "eagle3")):
        try:
            plain = walks.plain_costs(cost_model(recorded.header, target, None, draft))[walks.train :]
        except UserError:  # the drafter of this target has no published shape
            continue
        outcomes = [walks.outcome(one, cost_model(recorded.header, target, one.bits, draft)) for one in found]
        best = replay.best_of(outcomes)
        for name, one in best.items():
            less = {f"less_{rival}": vars(difference_interval(plain, one.costs, best[rival].costs)) for rival in RIVALS}
            lines.append(part.json() | {"costs": target, "draft": draft} | one.json() | {"family": name} | less)
    return lines


def replay_parts(settings: Settings, console: Console) -> list[dict[str, Any]]:
    """All replays."""
    common = {name: getattr(settings, name) for name in ("limit", "costs", "budgets", "eps", "max_new_tokens")}
    common |= {"prompts": [path.name for path in settings.prompts], "predictor": settings.predictor is not None}
    common |= {"target": read_manifest(settings.target).target_hash}
    lines, read = [], cache(partial(record, settings))
    for pool, temperature, batch in itertools.product(settings.pools, settings.temperatures, settings.batch_sizes):
        part = Part(pool, temperature, batch)
        console.print(f"replay {part.name}", highlight=False)
        make = partial(replayed, settings, part, read)
        lines += kept(settings.out / "parts" / f"replay-{part.name}.json", common | part.json(), make)
    return lines


def measured_parts(settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Wall clock of all batch sizes and temperatures."""
    files = [read_prompts(path, settings.limit) for path in settings.prompts]
    mixed = [one for row in itertools.zip_longest(*files) for one in row if one is not None]
    prompts = [Prompt(id=one.id, turns=one.turns[:1]) for one in mixed][: settings.measured_limit]
    asked = decode.Settings(
        target=settings.target,
        predictor=settings.predictor,
        pad_ffn=settings.pad_ffn,
        max_new_tokens=settings.measured_tokens,
    )
    decoder = decode.load_decoder(asked)
    predictors = () if settings.predictor is None else ("backbone", "token_table")
    names = ("pad_ffn", "measured_limit", "measured_tokens", "measured_budgets", "limit")
    common = {name: getattr(settings, name) for name in names} | {"prompts": [path.name for path in settings.prompts]}
    lines = []
    for batch in settings.batch_sizes:
        own = replace(asked, batch_size=batch)
        fitted_cost(decoder, own, prompts, settings.out / "parts" / f"cost-{settings.pad_ffn}-B{batch}.json")
        for temperature in settings.temperatures:
            part = {"temperature": temperature, "batch": batch}
            console.print(f"wall clock, temperature {temperature:g}, batch {batch}", highlight=False)

            sampled, found = replace(own, temperature=temperature), candidates(settings.measured_budgets, predictors)
            make = partial(time_batches, decoder, sampled, prompts, found, console)
            name = f"measured-{settings.pad_ffn}-T{temperature:g}-B{batch}.json"
            timed = kept(settings.out / "parts" / name, common | part, make)
            lines += [part | {"pad_ffn": settings.pad_ffn} | line for line in timed]
    return lines


def cell(interval: dict[str, float], sign: str = "") -> str:
    return Interval(**interval).cell(sign)


def replay_tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each combination of costs, drafts, pool, temperature and batch."""
    header = ("selection", "best setting", "drafted", "nodes", "U", "tau", "speed", "less likelihood", "less ecospec")
    groups: dict[str, list[list[str]]] = {}
    for line in lines:
        title = f"{line['costs']}, drafting {line['draft']}, pool {line['pool']}, T {line['temperature']:g}"
        figures = [f"{line[name]:.2f}" for name in ("drafted", "nodes", "u", "tau")]
        compared = [cell(line[f"less_{rival}"], "+") if line["family"] != rival else "" for rival in RIVALS]
        row = [line["family"], line["setting"], *figures, cell(line["speed"]), *compared]
        groups.setdefault(f"{title}, batch {line['batch']}", []).append(row)
    return [f"### {title}\n\n{markdown_table(header, rows)}" for title, rows in groups.items()]


def measured_tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A table a temperature and batch size."""
    header = ("method", "tokens/s", "speed", "tau", "same tokens as ar")
    groups: dict[str, list[list[str]]] = {}
    for line in lines:
        title = f"Wall clock, experts widened by {line['pad_ffn']}, T {line['temperature']:g}, batch {line['batch']}"
        figures = [f"{line['tokens_per_second']:.0f}", cell(line["speed"]), f"{line['tau']:.2f}"]
        groups.setdefault(f"{title} ({line['batches']} batches)", []).append(
            [line["family"], *figures, "yes" if line["same_tokens"] else "no"]
        )
    return [f"### {title}\n\n{markdown_table(header, rows)}" for title, rows in groups.items()]


def plot(path: Path, lines: Sequence[dict[str, Any]], targets: Sequence[str]) -> None:
    """Speed against batch size, a panel a target."""
    figure, axes = plt.subplots(1, len(targets), figsize=(3.3 * len(targets), 3), layout="constrained", squeeze=False)
    for axis, target in zip(axes[0], targets, strict=True):
        for index, family in enumerate(PLOTTED):
            own = [line for line in lines if line["costs"] == target and line["family"] == family]
            if not own:  # a predictor that was not recorded
                continue
            speeds = [Interval(**line["speed"]) for line in own]
            batches, middles = [line["batch"] for line in own], [s.middle for s in speeds]
            axis.errorbar(
                batches, middles, yerr=error_bars(speeds), color=f"C{index}", marker="o", capsize=3, label=family
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        batches = sorted({line["batch"] for line in lines})
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_title(target)
        axis.set_xlabel("batch size")
        axis.set_ylabel("speed over plain decoding")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PLOTTED))
    save_figure(figure, path)


def check(settings: Settings) -> None:
    """Refuses what cannot be before anything is recorded or written."""
    require_positive(settings, "limit", "max_new_tokens", "measured_limit", "measured_tokens")
    for name in ("prompts", "temperatures", "pools", "batch_sizes", "costs", "budgets", "eps", "measured_budgets"):
        if not getattr(settings, name):
            raise UserError(f"--{name.replace('_', '-')} needs at least one value")
    if min(settings.batch_sizes) < 1:
        raise UserError(f"--batch-sizes must be at least 1, not {min(settings.batch_sizes)}")
    if len({path.stem for path in settings.prompts}) < len(settings.prompts):
        raise UserError("--prompts: two files of the same name")
    for pool in settings.pools:
        for budget in (*settings.budgets, *settings.measured_budgets):
            replace(pool_spec(pool), budget=budget)
    for eps in settings.eps:
        SpecConfig(eps=eps)
    for temperature in settings.temperatures:
        SamplingConfig(temperature)
    for costs in settings.costs:
        if costs not in TARGETS:
            raise UserError(f"unknown cost model '{costs}'; known: {', '.join(TARGETS)}")
    for path in settings.prompts:
        read_prompts(path, settings.limit)


def run(settings: Settings) -> None:
    console = Console()
    if settings.quick:
        settings = settings.small()
    check(settings)
    lines = replay_parts(settings, console)
    measured = measured_parts(settings, console) if settings.measure else []
    remark = (
        "Speed: tokens per cost (replays) or per second (wall clock) over plain decoding of the same prompts; 95 % "
        "bootstrap intervals over batches, differences paired. Replays: settings chosen on every second prompt, "
        "figures of the others.\n"
    )
    about = notes({"settings": asdict(settings), **environment()})
    shown = [one for one in lines if (one["pool"], one["draft"]) == (settings.pools[0], "free")]
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        write_text(settings.out / "rate_study.jsonl", "".join(json.dumps(one) + "\n" for one in (*lines, *measured)))
        tables = "\n".join([*replay_tables(lines), *measured_tables(measured)])
        write_text(settings.out / "rate_study.md", f"{remark}\n{tables}\n{about}\n")
        for temperature in settings.temperatures:
            own = [one for one in shown if one["temperature"] == temperature]
            plot(settings.out / f"replay-T{temperature:g}.png", own, settings.costs)
    console.print(f"written to {settings.out}: rate_study.jsonl, rate_study.md, plots", soft_wrap=True)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
