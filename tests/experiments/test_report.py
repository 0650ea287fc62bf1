"""The report: what its tables say, that it stands alone, what is refused, and how a browser shows it at phone width."""

import base64
import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ecospec_jax import Decoder
from experiments.harness import RESULTS, ExperimentSettings, Scalar, open_results, write_markdown
from experiments.plots import plt, save_figure
from experiments.prompts import Prompt
from experiments.report import Settings, run
from experiments.tables import markdown_table
from tests.complaints import complaint

PROMPTS = {"some": [Prompt(id=one, turns=("x",)) for one in "abc"], "more": [Prompt(id="d", turns=("y",))]}
FASTER = "faster <*a*|b>"  # shown as it is
DECODER = cast(Decoder, SimpleNamespace(target_hash="t" * 8, drafter_hash="d" * 8))
SPEEDS = {"ar": (100.0, 200.0, 50.0, 80.0), "likelihood": (120.0, 190.0, 70.0, 100.0), "ecospec": (150, 260, 60, 96)}
U = {"ar": (2.0, 2.0, 2.0, 2.0), "likelihood": (6.0, 7.0, 5.0, 6.5), "ecospec": (5.0, 6.5, 4.0, 6.0)}


@dataclass(frozen=True)
class Experiment(ExperimentSettings):
    temperatures: tuple[float, ...] = (0.0,)


def made_up_run(out: Path, factor: float = 1.0, name: str = "made_up", **options: Any) -> Path:
    """A finished run, as an experiment writes it, with speeds times `factor`."""
    settings = Experiment(out=out, **options)
    with open_results(name, settings, DECODER, PROMPTS) as results:
        places = [(data_set, prompt.id) for data_set, prompts in PROMPTS.items() for prompt in prompts]
        for method, speeds in SPEEDS.items():
            for place, (data_set, prompt) in enumerate(places):
                values = {"tokens_per_second": speeds[place] * factor, "tau": 1.5 + place, "u": U[method][place]}
                case: dict[str, Scalar] = {"data_set": data_set, "method": method, "temperature": 0.0}
                results.measure(case, lambda values=values: values, seed=0, prompt=prompt)
        figure, axis = plt.subplots(figsize=(8, 2))
        axis.plot(SPEEDS["ar"])
        save_figure(figure, out / "plot_of_speeds.png")
        wide = markdown_table([f"column {i}" for i in range(30)], [["a long cell"] * 30])
        sections = ["A <b>note</b>.", "## A heading", wide, "`" + "long_word" * 40 + "`"]
        write_markdown(out / f"{name}.md", "Made-up experiment", results.header, sections)
    return out


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = (made_up_run(tmp_path / "first"), made_up_run(tmp_path / "second", 1.25))
    named = (str(runs[0]), f"{FASTER}={runs[1]}", f"other={made_up_run(tmp_path / 'third', name='another', eps=3.0)}")
    run(Settings(named, out=tmp_path / "pages" / "report.html"))
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["report.html"]
    return tmp_path / "pages" / "report.html"


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the rows of the table whose first header cell is `heading`."""
    tables = page.read_text().split("<table>")[1:]
    (table,) = (one for one in tables if re.findall(r"<th>(.*?)</th>", one)[0] == heading)
    lines = table.split("</table>")[0].split("<tr>")
    return [[unescape(one) for one in re.findall(r"<td>(.*?)</td>", line)] for line in lines[2:]]


def first(cell: str) -> float:
    return float(cell.split()[0])


def test_runs_are_compared_batch_by_batch(page: Path) -> None:
    found = {(row[0], row[1]): row[2:] for row in rows(page, "case")}
    assert list(found) == [(f"{method}, temperature 0.0", name) for method in SPEEDS for name in ("first", FASTER)]
    row = found["ecospec, temperature 0.0", FASTER]
    assert first(row[0]) == pytest.approx(1.25 * statistics.median(SPEEDS["ecospec"]))
    assert [first(one) for one in row[1:3]] == [
        statistics.median([1.5, 2.5, 3.5, 4.5]),
        statistics.median(U["ecospec"]),
    ]
    assert row[-3:] == ["1.250 [1.250, 1.250]", "+0.000 [+0.000, +0.000]", "+0.000 [+0.000, +0.000]"]
    overview = rows(page, "run")
    assert overview[1] == [FASTER, "made_up", "12", "first: nothing"] and overview[2][3] == "-"


def test_runs_stand_beside_the_published_figures(page: Path) -> None:
    found = {(row[0], row[1]): row[2:] for row in rows(page, "source")}
    assert found["published: qwen3-235b-a22b", "ecospec"] == ["1.36", "2.32", "20.50", "2.56", "0.82"]
    assert found["published: gpt-oss-120b", "likelihood"] == ["1.14", "-", "11.60", "2.90", "-"]
    for name in ("first", "other"):
        speed, tau, u, over, overlap = found[name, "likelihood"]
        ratios = [mine / plain for mine, plain in zip(SPEEDS["likelihood"], SPEEDS["ar"], strict=True)]
        assert first(speed) == pytest.approx(statistics.median(ratios), abs=5e-4)
        assert (first(tau), first(u), first(over), overlap) == (3.0, 6.25, 3.125, "-")
    gains = {row[0]: row[1:] for row in rows(page, "ecospec over likelihood")}
    assert gains["published: qwen3-235b-a22b"][0] == "1.115"
    ratios = [mine / base for mine, base in zip(U["ecospec"], U["likelihood"], strict=True)]
    assert first(gains[FASTER][2]) == pytest.approx(statistics.median(ratios), abs=5e-4)


def test_runs_of_other_prompts_or_trees_are_not_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made_up_run(tmp_path / "mine")
    monkeypatch.setitem(PROMPTS, "more", [Prompt(id="d", turns=("z",))])
    run(Settings((str(mine), str(made_up_run(tmp_path / "theirs", budget=3))), out=tmp_path / "report.html"))
    assert rows(tmp_path / "report.html", "case")[1][-3:] == ["-"] * 3
    assert rows(tmp_path / "report.html", "run")[1][3] == "mine: settings: budget, hashes: prompts more"
    assert [row[0] for row in rows(tmp_path / "report.html", "source")][-2:] == ["mine", "mine"]


def test_the_page_needs_nothing_else(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    sources = re.findall(r'(?:src|srcset|data)="([^"]*)"', text)
    plots = [(tmp_path / name / "plot_of_speeds.png").read_bytes() for name in ("first", "second", "third")]
    assert [base64.b64decode(one.removeprefix("data:image/png;base64,")) for one in sources] == plots
    assert not re.search(r"<script|<iframe|@import|url\(|<link (?!rel=\"icon\" href=\"data:,\")", text)
    assert "A &lt;b&gt;note&lt;/b&gt;." in text and "<code>previous</code>" in text  # settings


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda folder: (folder / RESULTS).unlink(), "{folder}: is no run of an experiment, it has no results.jsonl"),
        (lambda folder: (folder / RESULTS).write_text(""), "{folder}/results.jsonl: holds no results"),
        (lambda folder: (folder / RESULTS).write_bytes(b"\xff\n"), "{folder}/results.jsonl: cannot be read: "),
        (lambda folder: (folder / RESULTS).open("a").write("[1]\n"), "{folder}/results.jsonl: line 14: "),
        (
            lambda folder: (folder / "made_up.md").unlink(),
            "{folder}: has no made_up.md; the experiment was interrupted",
        ),
        (lambda folder: (folder / "made_up.md").write_bytes(b"\xff"), "{folder}/made_up.md: cannot be read"),
        (lambda folder: (folder / "plot_of_speeds.png").unlink(), "{folder}/plot_of_speeds.png: is no image"),
        (lambda folder: cut(folder / "plot_of_speeds.png"), "{folder}/plot_of_speeds.png: is no image"),
    ],
)
def test_a_damaged_run_is_named(
    tmp_path: Path, damage: Callable[[Path], object], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_up_run(tmp_path / "run")
    damage(folder)
    out = tmp_path / "pages" / "report.html"
    assert complaint(lambda: run(Settings((str(folder),), out)), capsys).startswith(wanted.format(folder=folder))
    assert not out.parent.exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def test_wrong_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, again = made_up_run(tmp_path / "run"), made_up_run(tmp_path / "elsewhere" / "run")
    for runs, out, wanted in (
        ((), "report.html", "no run is named"),
        ((str(folder), f"{again}/"), "report.html", f"{again}/: another run is called 'run' too"),
        ((f"={folder}",), "report.html", f"={folder}: neither FOLDER nor NAME=FOLDER"),
        ((str(tmp_path / "absent"),), "report.html", f"{tmp_path}/absent: is no run of an experiment"),
        ((str(folder),), "run", f"{folder}: is a folder"),
        ((str(folder),), "run/made_up.md/report.html", f"{folder}/made_up.md/report.html: cannot be written"),
    ):
        assert complaint(lambda runs=runs, out=out: run(Settings(runs, tmp_path / out)), capsys).startswith(wanted)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "run"]
    run(Settings((str(folder), f"again={again}"), tmp_path / "report.html"))


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run")
    with (folder / RESULTS).open("a") as stream:
        stream.write('{"half a li')
    before = (folder / RESULTS).read_bytes()
    run(Settings((str(folder),), tmp_path / "report.html"))
    assert (folder / RESULTS).read_bytes() == before


# A window of Chromium is at least 500 pixels wide, so the page is shown in a frame; the text of the page around it then
# says what a reader would see.
ERRORS = "<script>errors = []; addEventListener('error', one => errors.push(one.message || one.type), true)</script>"
AROUND = """<!DOCTYPE html><iframe width="360" height="800" style="border: 0" srcdoc="{page}"></iframe>
<script>addEventListener("load", () => {{
  const view = frames[0], page = view.document, boxes = [...page.querySelectorAll(".scroll")];
  document.body.innerHTML = JSON.stringify({{
    width: view.innerWidth, whole: page.documentElement.scrollWidth, errors: view.errors,
    images: [...page.images].map(one => [one.naturalWidth, one.getBoundingClientRect().width]),
    scrolling: boxes.filter(one => one.scrollWidth > one.clientWidth).length,
    fetched: view.performance.getEntriesByType("resource").map(one => one.name.slice(0, 5)),
  }});
}})</script>"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --hide-scrollbars --window-size=800,900 --dump-dom"
)


def shown(page: Path, profile: Path) -> dict[str, Any]:
    """What headless Chromium makes of a page, 360 pixels wide."""
    around = page.with_name("around.html")
    around.write_text(AROUND.format(page=escape(page.read_text().replace("<head>", "<head>" + ERRORS))))
    command = [str(CHROMIUM), *OPTIONS.split(), f"--user-data-dir={profile}", around.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(unescape(dom.split("<body>")[1].split("</body>")[0]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_a_browser_shows_it_at_phone_width(page: Path, tmp_path: Path) -> None:
    found = shown(page, tmp_path / "profile")
    assert found["width"] == found["whole"] == 360
    assert found["errors"] == [] and set(found["fetched"]) <= {"data:"}
    assert len(found["images"]) == 3 and all(natural > 360 >= width > 200 for natural, width in found["images"])
    assert found["scrolling"] >= 4


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_the_browser_would_tell(tmp_path: Path) -> None:
    broken = '<img src="data:image/png;base64,AAAA"><script>undefined_function()</script><p style="width: 500px">x</p>'
    (tmp_path / "broken.html").write_text(f"<!DOCTYPE html><html><head></head><body>{broken}</body></html>")
    found = shown(tmp_path / "broken.html", tmp_path / "profile")
    assert found["whole"] > found["width"] == 360 and found["images"][0][0] == 0
    assert "ReferenceError" in str(found["errors"]) and "error" in found["errors"]
