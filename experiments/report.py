"""One HTML page of several runs: beside the published figures, against each other, then each with tables and plots.

    python -m experiments.report results/main_table results/latency --out results/report.html

A run is a folder that an experiment has written to the end. The page needs no other file and no network.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import tyro
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tyro.conf import Positional, arg

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error, run_command
from experiments import comparison
from experiments.harness import RESULTS, read_results
from experiments.options import named_paths
from experiments.plots import plt
from experiments.tables import write_text

TEMPLATE = Path(__file__).with_name("report.html.jinja")
NOTE_ON_RUNS = (
    "Medians over batches of prompts [95 % bootstrap interval], all data sets together. Ratios and differences are "
    "paired by batch, and left out where two runs did not decode the same batches. Speeds tell something only if both "
    "runs had the same machine to themselves."
)
NOTE_ON_PUBLISHED = (
    "Published: arXiv 2607.12696 v1, averages over seven data sets on 8 x H200; ratios of two published figures are "
    "formed here, and intervals are not published. Runs: those that decoded with the paper's tree, one prompt at a "
    "time, greedily. Other models on other machines: ratios may be compared, absolute figures may not. The published "
    "overlap is of held-out routing traces, that of a run of its verified rows."
)


@dataclass(frozen=True)
class Settings:
    """One HTML page of several runs."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN ...")] = ()
    """Folders that experiments wrote: FOLDER or NAME=FOLDER."""
    out: Path = Path("results/report.html")
    """HTML file to write."""


@dataclass(frozen=True)
class Run:
    """A run, and its page in HTML."""

    results: comparison.Results
    page: str


def run_folders(named: Sequence[str]) -> dict[str, Path]:
    """Folders by the names of runs."""
    if not named:
        raise UserError("no run is named; give folders that experiments wrote")
    return named_paths(
        named,
        lambda path: path.resolve().name,
        malformed="{each}: neither FOLDER nor NAME=FOLDER",
        twice="{each}: another run is called '{name}' too; call one otherwise, by NAME=FOLDER",
    )


def read_run(name: str, folder: Path) -> Run:
    """What an experiment wrote into a folder."""
    if not (folder / RESULTS).is_file():
        raise UserError(f"{folder}: is no run of an experiment, it has no {RESULTS}")
    header, measurements = read_results(folder / RESULTS)
    page = folder / f"{header.experiment}.md"
    if not page.is_file():
        raise UserError(f"{folder}: has no {page.name}; the experiment was interrupted, run it again")
    with reported_as_user_error(f"{page}: cannot be read", OSError, UnicodeDecodeError):
        text = page.read_text(encoding="utf-8")
    return Run(comparison.Results(name, header, measurements), to_html(text, page))


def to_html(markdown: str, page: Path) -> str:
    """HTML of Markdown whose images are files beside `page`: these go inside, tables into boxes that scroll."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"  # h1 is the report's
        for inner in token.children or ():
            if inner.type == "image":
                embed(inner, page)
    return parser.renderer.render(tokens, parser.options, {})


def embed(image: Token, page: Path) -> None:
    """Puts the file that an image names into it; only what can be decoded, or the page would show a gap."""
    file = page.parent / str(image.attrs["src"])
    with reported_as_user_error(f"{file}: is no image that can be read", OSError, SyntaxError, ValueError):
        plt.imread(file, format="png")
        content = file.read_bytes()
    image.attrs["src"] = "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    results = [one.results for one in runs]
    values: dict[str, Any] = {
        "runs": runs,
        "overview": comparison.overview(results),
        "published": [comparison.published(results), comparison.published_gain(results)],
        "same": comparison.same_experiment(results),
        "note_on_runs": NOTE_ON_RUNS,
        "note_on_published": NOTE_ON_PUBLISHED,
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)


def run(settings: Settings) -> None:
    if settings.out.is_dir():
        raise UserError(f"{settings.out}: is a folder, --out names a file")
    page = render([read_run(name, folder) for name, folder in run_folders(settings.runs).items()])
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(settings.out, page)
    print(f"written: {settings.out}")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
