"""The file of fitted acceptance models, and the decoder that finds it beside the drafter."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec_jax import Decoder, SamplingConfig, SpecConfig, UserError
from ecospec_jax.acceptance import ACCEPTANCE, FORMAT, Acceptance, AcceptanceFit, read_acceptance, write_acceptance
from ecospec_jax.calibration import FEATURES, Calibration
from ecospec_jax.checkpoint import read_manifest
from tests import tiny, tiny_predictors
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]
SIZE = len(FEATURES)


def fit(temperature: float, weight: float = 0.5) -> AcceptanceFit:
    weights = (0.1, weight, -0.2, 0.3, 0.0)
    precision = tuple(tuple(row) for row in (np.diag([3.0, 4.0, 5.0, 6.0, 7.0]) + 0.25).tolist())
    return AcceptanceFit(temperature, weights, precision, edges=123, error_before=0.2, error_after=0.01)


BOTH = Acceptance(FORMAT, "abc", (fit(0.0), fit(0.7, 0.9)))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / ACCEPTANCE
    write_acceptance(path, BOTH)
    assert read_acceptance(path, "abc") == BOTH
    assert [one.name for one in tmp_path.iterdir()] == [ACCEPTANCE]
    calibration = read_acceptance(path, "abc").at(0.7)
    np.testing.assert_array_equal(calibration.weights_F, np.float32(BOTH.fits[1].weights))
    np.testing.assert_array_equal(calibration.precision_FF, np.float32(BOTH.fits[1].precision))
    assert calibration.weights_F.dtype == calibration.precision_FF.dtype == np.float32


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ACCEPTANCE
    write_acceptance(path, BOTH)

    def torn(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(UserError, match=f"^{path}: cannot be written: no space left$"):
        write_acceptance(path, BOTH.with_fit(fit(1.0)))
    assert read_acceptance(path, "abc") == BOTH
    monkeypatch.undo()
    with pytest.raises(UserError, match="absent/acceptance.json: cannot be written"):
        write_acceptance(tmp_path / "absent" / ACCEPTANCE, BOTH)


def test_a_new_fit_replaces_that_of_its_temperature() -> None:
    assert BOTH.with_fit(fit(0.3)).fits == (fit(0.0), fit(0.3), fit(0.7, 0.9))
    assert BOTH.with_fit(fit(0.7, 0.1)).fits == (fit(0.0), fit(0.7, 0.1))
    assert replace(BOTH, fits=()).with_fit(fit(0.0)).fits == (fit(0.0),)


def test_another_temperature_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^acceptance was fitted at temperature 0, 0.7, not 0.8: run .*fit_acceptance"):
        BOTH.at(0.8)


def spoiled(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["fits"][1].update(changes)


SPOILED = {
    "format": (lambda values: values.update(format=FORMAT + 1), rf"format {FORMAT + 1}, this version reads {FORMAT}"),
    "drafter": (lambda values: values.update(drafter_hash="abd"), "was fitted for another drafter"),
    "unknown": (lambda values: values.update(more=1), "more: Unexpected keyword argument"),
    "absent": (lambda values: values.pop("fits"), "fits: "),
    "type": (spoiled(edges="many"), "fits.1.edges: "),
    "weights": (spoiled(weights=[1.0] * (SIZE - 1)), "an acceptance model has 5 weights and 5 x 5 precisions"),
    "precision": (spoiled(precision=[[1.0] * SIZE] * (SIZE - 1)), "an acceptance model has 5 weights"),
    "row": (spoiled(precision=[[1.0] * (SIZE - 1)] * SIZE), "an acceptance model has 5 weights"),
    "nan": (spoiled(weights=[float("nan")] * SIZE), "holds numbers that are not finite"),
    "infinite": (spoiled(precision=[[float("inf")] * SIZE] * SIZE), "holds numbers that are not finite"),
    "negative": (spoiled(weights=[1.0, -0.1, 1.0, 1.0, 1.0]), "must rise with the drafter's probability"),
    "singular": (spoiled(precision=np.zeros((SIZE, SIZE)).tolist()), "must be positive definite"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, spoil: Callable, message: str) -> None:
    path = tmp_path / ACCEPTANCE
    write_acceptance(path, BOTH)
    values = json.loads(path.read_text())
    spoil(values)
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"^{path}: .*{message}") as caught:
        read_acceptance(path, "abc")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b"\xff\xfe\x00", b"[1]", b"null"])
def test_what_is_no_such_file_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ACCEPTANCE
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: ") as caught:
        read_acceptance(path, "abc")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_acceptance(tmp_path / "absent.json", "abc")


# ---------------------------------------------------------------------------------------------------------------------
# The decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_predictors.write_converted(tmp_path_factory.mktemp("acceptance") / "converted")[0]


def test_a_decoder_begins_with_what_was_fitted(folder: Path) -> None:
    """For its drafter and temperature; other temperatures are refused before anything is decoded."""
    path = folder / ACCEPTANCE
    spec, sampled = SpecConfig(), SamplingConfig(temperature=1.0)
    decoder = Decoder.load(folder)
    assert decoder.acceptance is None
    program, _ = decoder.program("rate-oracle", spec, sampled)
    np.testing.assert_array_equal(program.adaptation.calibration.weights_F, Calibration.trusting().weights_F)

    fitted = Acceptance(FORMAT, read_manifest(folder).drafter_hash, BOTH.fits)
    write_acceptance(path, fitted)
    decoder = Decoder.load(folder)
    assert decoder.acceptance == fitted
    for temperature, expected in ((0.0, fitted.fits[0]), (0.7, fitted.fits[1])):
        program, _ = decoder.program("rate-oracle", spec, SamplingConfig(temperature=temperature))
        np.testing.assert_array_equal(program.adaptation.calibration.weights_F, np.float32(expected.weights))
    with pytest.raises(UserError, match="^acceptance was fitted at temperature 0, 0.7, not 1: "):
        decoder.generate([tiny.PROMPTS[0]], method="rate-oracle", sampling=sampled, max_new_tokens=4)
    # Methods that take the drafter at its word decode at any temperature.
    assert decoder.program("oracle", spec, sampled)[0].adaptation is None

    write_acceptance(path, replace(fitted, drafter_hash="other"))
    with pytest.raises(UserError, match=f"^{path}: was fitted for another drafter$"):
        Decoder.load(folder)
    path.unlink()
