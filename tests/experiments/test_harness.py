"""What the experiments share: settings from options and YAML, results that a rerun continues, what is refused."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ecospec_jax import Decoder, UserError
from experiments.data_sets import DEMO, PAPER
from experiments.harness import (
    RESULTS,
    ExperimentSettings,
    Header,
    Measurement,
    check_methods,
    open_results,
    parse_settings,
    read_results,
)
from experiments.prompts import Prompt

PROMPTS = {"some": [Prompt(id="a", turns=("x",)), Prompt(id="b", turns=("y", "z"))]}
DECODER = cast(Decoder, SimpleNamespace(target_hash="t" * 8, drafter_hash="d" * 8))


@dataclass(frozen=True)
class Settings(ExperimentSettings):
    """An experiment."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling."""


def yaml_file(folder: Path, text: str) -> Path:
    (folder / "settings.yaml").write_text(text)
    return folder / "settings.yaml"


def test_options_win_over_yaml_and_yaml_over_quick(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "target: converted/tiny\ntemperatures: [0.5]\nlimit: 7\nprompts: [gsm8k, x=y.jsonl]\n")
    assert parse_settings(Settings, []) == Settings() and Settings().prompts == PAPER
    quick = parse_settings(Settings, ["--quick"])
    assert quick == Settings(quick=True, prompts=(str(DEMO),), limit=2, max_new_tokens=24)
    both = parse_settings(Settings, ["--quick", "--settings", str(file), "--limit", "9", "--repeats", "3"])
    assert both == replace(
        quick,
        settings=file,
        target=Path("converted/tiny"),
        temperatures=(0.5,),
        prompts=("gsm8k", "x=y.jsonl"),
        limit=9,
        repeats=3,
    )
    assert parse_settings(Settings, [f"--settings={file}"]).limit == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("limits: 3", "limits: "),
        ("limit: many", "limit: "),
        ("buffer: magic", "buffer: "),
        ("temperatures: {a: 1}", "temperatures"),
        ("- limit", "is no mapping of option names"),
        ("3: 4", "is no mapping of option names"),
        ("limit: [1", "cannot be read"),
        ("settings: other.yaml", "settings: can only be given as an option"),
        ("quick: true", "quick: can only be given as an option"),
        ("", "is no mapping of option names"),
    ],
)
def test_a_wrong_yaml_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = yaml_file(tmp_path, text)
    with pytest.raises(UserError) as caught:
        parse_settings(Settings, ["--settings", str(file)])
    assert str(caught.value).startswith(f"{file}: {complaint}") and "\n" not in str(caught.value)


def test_an_absent_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.yaml: cannot be read"):
        parse_settings(Settings, ["--settings", str(tmp_path / "absent.yaml")])


def test_settings_become_those_of_the_main_job(tmp_path: Path) -> None:
    settings = Settings(target=tmp_path, budget=3, eps=0.5, max_new_tokens=11, ignore_eos=True, seed=4)
    job = settings.decoding(temperature=0.7)
    assert (job.target, job.spec, job.max_new_tokens, job.ignore_eos, job.seed) == (
        tmp_path,
        settings.spec,
        11,
        True,
        4,
    )
    assert job.temperature == 0.7 and job.prompts is None


def measured(settings: Settings, stop: int = 99) -> list[str]:
    """Runs an experiment of six cases that is interrupted before case `stop`; the cases that were measured."""
    ran = []
    with open_results("exp", settings, DECODER, PROMPTS) as results:
        for number in range(6):
            if number == stop:
                break
            case = {"method": "ar" if number % 2 else "rate", "budget": number}

            def measure(number: int = number) -> dict[str, float]:
                ran.append(number)
                return {"tau": number + 0.5, "u": float("nan")}

            found = results.measure(case, measure, seed=settings.seed, repeat=1, prompt="a")
            assert found.values == {"tau": number + 0.5, "u": None}
    return ran


def test_a_rerun_measures_only_what_is_missing(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path / "out", limit=3)
    assert measured(settings, stop=4) == [0, 1, 2, 3]
    file = settings.out / RESULTS
    file.write_text(file.read_text()[:-9])  # the last line was cut off
    assert measured(settings) == [3, 4, 5]
    before = file.read_text()
    assert measured(replace(settings, quick=True, data=tmp_path)) == [] and file.read_text() == before
    header, found = read_results(file)
    assert isinstance(header, Header) and header.experiment == "exp" and header.settings["limit"] == 3
    assert header.hashes["target"] == "t" * 8 and header.versions["jax"] and header.machine["cores"]
    assert [one.case["budget"] for one in found] == list(range(6))
    assert found[1] == Measurement("exp", {"method": "ar", "budget": 1}, {"tau": 1.5, "u": None}, 0, 1, "a")


def test_a_file_cut_off_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path)
    (tmp_path / RESULTS).write_text('{"format": 1, "exp')
    assert len(measured(settings)) == 6 and len(read_results(tmp_path / RESULTS)[1]) == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [({"limit": 4}, "settings: limit"), ({"temperatures": (0.0,)}, "settings: temperatures")],
)
def test_results_of_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    settings = Settings(out=tmp_path)
    measured(settings)
    before = (tmp_path / RESULTS).read_text()
    with pytest.raises(UserError, match=f"holds results made otherwise \\({named}\\)"):
        measured(replace(settings, **change))
    assert (tmp_path / RESULTS).read_text() == before


def test_results_of_another_target_prompt_or_experiment_are_refused(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path)
    measured(settings)
    other = cast(Decoder, SimpleNamespace(target_hash="u" * 8, drafter_hash="d" * 8))
    fewer = {"some": PROMPTS["some"][:1]}
    for experiment, decoder, prompts, named in (
        ("exp", other, PROMPTS, "hashes: target"),
        ("exp", DECODER, fewer, "hashes: prompts some"),
        ("another", DECODER, PROMPTS, "experiment"),
    ):
        with (
            pytest.raises(UserError, match=f"made otherwise \\({named}\\)"),
            open_results(experiment, settings, decoder, prompts),
        ):
            pass


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[]", "line 8: "),
        ('{"experiment": "exp", "case": {}, "values": {"tau": "fast"}, "seed": 0}', "line 8: values.tau: "),
        ('{"experiment": "exp", "case": {}, "values": {}, "seed": 0, "more": 1}', "line 8: more: "),
        ("nonsense", "cannot be read: "),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    measured(Settings(out=tmp_path))
    file = tmp_path / RESULTS
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError, match=complaint) as caught:
        read_results(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        measured(Settings(out=tmp_path / "file" / "out"))


def test_methods_are_known_and_named_once() -> None:
    assert check_methods(["ar", "rate@token_table"]) == ("ar", "rate@token_table")
    for names, complaint in (((), "names no method"), (("ar", "ar"), "'ar' twice"), (("magic",), "unknown method")):
        with pytest.raises(UserError, match=complaint):
            check_methods(names)
