"""What the experiments share: settings, results that a rerun continues, and what is written of them.

An experiment is a `Settings` class, derived from `ExperimentSettings`, and a function of them:

    if __name__ == "__main__":
        run_experiment(Settings, run, __doc__)

Its results are one file of JSON lines. The first line is the `Header`; every other is a `Measurement`.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TextIO, TypeVar

import pydantic
import tyro
import yaml

from ecospec_jax import Decoder, UserError
from ecospec_jax.checkpoint import MANIFEST
from ecospec_jax.config import STRICT, from_json, to_json
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.methods import get_method
from experiments import decode
from experiments.data_sets import DEMO, PAPER, read_data_sets
from experiments.environment import environment
from experiments.options import ModelOptions, TreeOptions, require_positive
from experiments.prompts import Prompt
from experiments.tables import notes, write_text

FORMAT = 1
RESULTS = "results.jsonl"
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class ExperimentSettings(ModelOptions, TreeOptions):
    """Options of every experiment; `QUICK` are the defaults of a derived class with --quick."""

    prompts: tuple[str, ...] = PAPER
    """Data sets: NAME, FILE or NAME=FILE. A NAME is NAME.jsonl in --data, or comes from the Hugging Face Hub."""
    data: Path | None = None
    """Folder of prompt files, NAME.jsonl each."""
    limit: int | None = None
    """Use only the first prompts of each data set."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    batch_size: int = 1
    """Prompts decoded together."""
    repeats: int = 1
    """Times everything is measured."""
    settings: Path | None = None
    """YAML file with other defaults of these options, called as here but with _ for -; options given beside it win."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A small run on the bundled demo prompts: other defaults, which --settings and options given beside it change."""
    out: Path = Path("results")
    """Folder for results.jsonl, the tables and the plots."""

    QUICK: ClassVar[Mapping[str, Any]] = {"prompts": (str(DEMO),), "limit": 2, "max_new_tokens": 24}
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def decoding(self, **changes: Any) -> decode.Settings:
        """The same for the main job, with changes."""
        shared = {one.name for one in fields(decode.Settings)} & {one.name for one in fields(self)} - {"prompts"}
        return replace(decode.Settings(**{name: getattr(self, name) for name in shared}), **changes)

    def data_sets(self) -> dict[str, list[Prompt]]:
        return read_data_sets(self.prompts, self.data, self.limit)


SettingsT = TypeVar("SettingsT", bound=ExperimentSettings)


def read_settings(kind: type[SettingsT], path: Path | None = None, *, quick: bool = False) -> SettingsT:
    """Defaults of an experiment, those of --quick, and a YAML file over them."""
    values: dict[str, Any] = {**kind.QUICK, "quick": True} if quick else {}
    if path is None:
        return kind(**values)
    with reported_as_user_error(f"{path}: cannot be read", OSError, UnicodeDecodeError, yaml.YAMLError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path}: is no mapping of option names to values")
    for name in ("settings", "quick"):
        if name in found:
            raise UserError(f"{path}: {name}: can only be given as an option")
    return replace(from_json(kind, {**values, **found}, str(path)), settings=path)


def parse_settings(kind: type[SettingsT], arguments: Sequence[str], description: str | None = None) -> SettingsT:
    """Settings from command-line arguments."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--settings", type=Path)
    early.add_argument("--quick", action="store_true")
    given, _ = early.parse_known_args(arguments)
    default = read_settings(kind, given.settings, quick=given.quick)
    default = replace(default, quick=False)  # a flag that is on by default could not be given
    return tyro.cli(kind, args=arguments, default=default, description=description)


def run_experiment(kind: type[SettingsT], run: Callable[[SettingsT], None], description: str | None) -> NoReturn:
    """The command of an experiment."""
    run_command(lambda: run(parse_settings(kind, sys.argv[1:], description)))


def check_settings(settings: ExperimentSettings, *positive: str) -> None:
    """Refuses what no experiment can use, and options named in `positive` that are below 1."""
    require_positive(settings, "limit", "max_new_tokens", "batch_size", "repeats", *positive)
    assert settings.spec is not None  # refuses impossible trees


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Names of methods, each known and there once; at least one."""
    if not names:
        raise UserError("--methods names no method")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"--methods names '{twice[0]}' twice")
    return tuple(get_method(name).name for name in names)


def check_prompts(decoder: Decoder, prompts: Iterable[Prompt], max_new_tokens: int) -> None:
    """Refuses prompts whose first turn and answer are longer than the model's context."""
    for prompt in prompts:
        decoder.check_fits(decode.Conversation(prompt, 0).next_input(decoder), max_new_tokens, where=prompt.id)


# ---------------------------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class Header:
    """What all measurements of a file have in common; a rerun continues only a file with the same.

    Attributes:
        format: version of this layout.
        experiment: name.
        settings: without the places of files, which `hashes` replace.
        hashes: of what was decoded: target, drafter, predictor, prompts.
        python, versions, machine: see `environment`.
    """

    format: int
    experiment: str
    settings: dict[str, Any]
    hashes: dict[str, str]
    python: str
    versions: dict[str, str | None]
    machine: dict[str, Any]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


PLACES = ("target", "drafter", "predictor", "data", "prompts", "settings", "quick", "out")


@dataclass(frozen=True)
class Measurement:
    """One line of results.

    Attributes:
        experiment: name.
        case: what was measured: method, data set, budget, ...
        values: figures; null where one is undefined.
        seed, repeat: of the run.
        prompt: id; that of the batch's first prompt where several were decoded together.
    """

    experiment: str
    case: dict[str, Scalar]
    values: dict[str, float | None]
    seed: int
    repeat: int = 0
    prompt: str | None = None
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def key(self) -> str:
        """What no two measurements of a file share."""
        return json.dumps([self.case, self.seed, self.repeat, self.prompt], sort_keys=True)


class Results:
    """The measurements of a file that is open for more."""

    def __init__(self, header: Header, measurements: Iterable[Measurement], stream: TextIO) -> None:
        self.header, self._stream = header, stream
        self._found = {one.key: one for one in measurements}

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._found.values())

    def measure(
        self,
        case: Mapping[str, Scalar],
        measure: Callable[[], Mapping[str, float]],
        *,
        seed: int,
        repeat: int = 0,
        prompt: str | None = None,
    ) -> Measurement:
        """What the file has of this case, or else what `measure` gives, which is written at once."""
        asked = Measurement(self.header.experiment, dict(case), {}, seed, repeat, prompt)
        if asked.key not in self._found:
            values = {name: float(value) if math.isfinite(value) else None for name, value in measure().items()}
            found = replace(asked, values=values)
            self._stream.write(json.dumps(to_json(found)) + "\n")
            self._stream.flush()
            self._found[asked.key] = found
        return self._found[asked.key]


def make_header(
    experiment: str, settings: ExperimentSettings, decoder: Decoder, data_sets: Mapping[str, Sequence[Prompt]]
) -> Header:
    """The header of results about to be measured."""
    hashes = {"target": decoder.target_hash, "drafter": decoder.drafter_hash}
    if settings.predictor is not None:
        hashes["predictor"] = hashlib.sha256((settings.predictor / MANIFEST).read_bytes()).hexdigest()
    for name, prompts in data_sets.items():
        text = json.dumps([to_json(prompt) for prompt in prompts])
        hashes[f"prompts {name}"] = hashlib.sha256(text.encode()).hexdigest()
    values = {name: value for name, value in to_json(settings).items() if name not in PLACES}
    return from_json(
        Header,
        {"format": FORMAT, "experiment": experiment, "settings": values, "hashes": hashes, **environment()},
        experiment,
    )


def read_lines(file: Path) -> list[Any]:
    """Values of a file of JSON lines; a last line that is not finished does not count."""
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
        text = file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def finished_lines(file: Path) -> list[Any]:
    """The same of a file about to be continued: what an interruption left of its last line is dropped from it."""
    lines, text = read_lines(file), file.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        write_text(file, text[: text.rfind("\n") + 1])
    return lines


def read_results(file: Path) -> tuple[Header, list[Measurement]]:
    """What an experiment wrote, or has so far; a wrong file is a `UserError`."""
    lines = read_lines(file)
    if not lines:
        raise UserError(f"{file}: holds no results")
    header = from_json(Header, lines[0], f"{file}: line 1")
    if header.format != FORMAT:
        raise UserError(f"{file}: format {header.format}, this version reads {FORMAT}")
    return header, [
        from_json(Measurement, line, f"{file}: line {number}") for number, line in enumerate(lines[1:], start=2)
    ]


def differences(before: Header, after: Header) -> list[str]:
    """Names of what differs; of settings and hashes, which ones."""
    found = []
    for name, value in vars(before).items():
        other = getattr(after, name)
        if name in ("settings", "hashes"):
            found += [f"{name}: {key}" for key in {**value, **other} if value.get(key) != other.get(key)]
        elif value != other:
            found.append(name)
    return found


@contextmanager
def open_results(
    experiment: str, settings: ExperimentSettings, decoder: Decoder, data_sets: Mapping[str, Sequence[Prompt]]
) -> Iterator[Results]:
    """The results in `--out`, those of an interrupted run included; results made otherwise are refused."""
    header, file = make_header(experiment, settings, decoder, data_sets), settings.out / RESULTS
    found: list[Measurement] = []
    if file.exists() and finished_lines(file):
        before, found = read_results(file)
        if differing := differences(before, header):
            raise UserError(f"{file}: holds results made otherwise ({', '.join(differing)}); choose another --out")
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        if not found and not (file.exists() and file.stat().st_size):
            write_text(file, json.dumps(asdict(header)) + "\n")
        stream = file.open("a", encoding="utf-8")
    with stream:
        yield Results(header, found, stream)


def write_markdown(path: Path, title: str, header: Header, sections: Sequence[str]) -> None:
    """A page of tables, the plots that lie beside it, and what they were made with."""
    made_with = {**header.settings, "python": header.python, **header.versions, **header.machine}
    plots = [f"![{plot.stem}]({plot.name})" for plot in sorted(path.parent.glob("*.png"))]
    texts = [f"# {title}", *(section.strip() for section in sections), *plots, notes(made_with)]
    write_text(path, "\n\n".join(texts) + "\n")
