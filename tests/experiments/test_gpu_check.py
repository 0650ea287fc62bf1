"""The GPU check at tiny sizes on a CPU: what it records, how it continues, how it fails."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ecospec_jax import UserError
from experiments import gpu_check, gpu_sections
from experiments.gpu_check import Settings

SECTIONS = ["device", "numerics cpu", "numerics xla", "speed cpu", "dram", "launches", "tokamax"]


def read(settings: Settings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in settings.file.read_text().splitlines()]


def of(settings: Settings, section: str) -> list[dict[str, Any]]:
    return [record for record in read(settings) if record["section"] == section]


def test_sections_by_platform() -> None:
    """Every backend of a GPU is checked; plain XLA is not timed there."""
    assert list(gpu_sections.sections("cpu")) == SECTIONS
    gpu = list(gpu_sections.sections("cuda"))
    assert {"numerics mosaic_gpu", "numerics triton", "numerics xla", "speed mosaic_gpu", "speed triton"} <= set(gpu)


@pytest.mark.parametrize("section", ["device", "numerics cpu", "speed cpu", "launches"])
def test_section(section: str, tmp_path: Path) -> None:
    """A section records what it found and that it is done."""
    settings = Settings(platform="cpu", only=(section,), out=tmp_path)
    gpu_check.run(settings)
    *found, last = of(settings, section)
    assert last["status"] == "done" and last["seconds"] >= 0 and not any("error" in record for record in found)
    match section:
        case "device":
            assert found[0]["kind"] and found[1]["versions"]["jax"] == jax.__version__
        case "numerics cpu":
            assert len(found) == 8 and all(record["ok"] and record["dead_row_is_zero"] for record in found)
            assert {record["layout"] for record in found} == {"split", "gpt-oss"}
        case "speed cpu":
            ceiling, *lines = found
            assert ceiling["ceiling"]["copy_gb_per_s"] > 0 and len(lines) == 4
            for line in lines:
                assert line["us"] > 0 and line["bytes"] > 0
                assert line["of_copy"] == pytest.approx(line["gb_per_s"] / ceiling["ceiling"]["copy_gb_per_s"], rel=0.5)
        case "launches":
            assert all(record["launches"] > 0 for record in found)


def test_finished_sections_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A rerun adds what is missing; an interrupted or failed section starts anew; --force runs all again."""
    runs = []

    def section(name: str):
        def records():
            runs.append(name)
            yield {"what": name, "launches": len(runs)}
            if name == "b" and len(runs) < 3:
                raise RuntimeError("lost\nits way")
            if name == "c":
                raise gpu_sections.Skipped("not here")

        return records

    monkeypatch.setattr(gpu_check, "sections", lambda platform: {name: section(name) for name in "abc"})
    settings = Settings(platform="cpu", out=tmp_path)
    with pytest.raises(SystemExit) as caught:
        gpu_check.run(settings)
    assert caught.value.code == 1 and runs == ["a", "b", "c"]
    assert "b: RuntimeError: lost" in capsys.readouterr().out
    assert of(settings, "b")[-1]["status"] == "error" and of(settings, "c")[-1]["reason"] == "not here"

    with settings.file.open("a") as stream:
        stream.write('{"section": "a", "pla')  # cut off
    gpu_check.run(settings)
    assert runs == ["a", "b", "c", "b"] and "finished before" in capsys.readouterr().out
    assert [(record["section"], record.get("launches")) for record in read(settings)] == [
        *(("a", 1), ("a", None)),
        *(("c", 3), ("c", None)),
        *(("b", 4), ("b", None)),
    ]
    gpu_check.run(Settings(platform="cpu", out=tmp_path, force=True))
    assert runs[4:] == ["a", "b", "c"] and len(read(settings)) == 6


def test_wrong_numbers_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A difference beyond the bound, or a kernel that raises, is an error of its case; the others go on."""
    cases = iter([{"difference": 0.5, "ok": False}, {"difference": 0.001, "ok": True}])

    def error(*_: Any) -> dict[str, Any]:
        if (case := next(cases, None)) is None:
            raise ValueError("no such kernel")
        return case

    monkeypatch.setattr(gpu_sections, "_error", error)
    settings = Settings(platform="cpu", only=("numerics xla",), out=tmp_path)
    with pytest.raises(SystemExit) as caught:
        gpu_check.run(settings)
    printed = capsys.readouterr().out
    assert caught.value.code == 1 and "1 of 8 right" in printed
    assert "off by 0.5000" in printed and "no such kernel" in printed


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown section 'speed'; known: device"):
        gpu_check.run(Settings(platform="cpu", only=("speed",), out=tmp_path))
    settings = Settings(platform="cpu", only=("dram",), out=tmp_path)
    gpu_check.run(settings)
    assert of(settings, "dram")[-1]["status"] == "skipped"
    with pytest.raises(UserError, match="another platform"):
        gpu_check.run(Settings(platform="cuda", out=tmp_path))


def test_count_launches() -> None:
    """Loop bodies count, as often as they are known to run; bookkeeping does not."""
    text = """HloModule jit_f, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%p, %p)
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%arg), index=1
  %fusion.2 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %call = f32[4]{0} custom-call(%fusion.2), custom_call_target="kernel"
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %call)
}

%cond (arg: (s32[], f32[4])) -> pred[] {
  %arg = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] fusion(%arg), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = s32[] constant(0)
  %copy.1 = f32[4]{0} copy(%x)
  %init = (s32[], f32[4]{0}) tuple(%c, %copy.1)
  %while.1 = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%while.1), index=1
}
"""

    def launches(text: str) -> int:
        return gpu_sections.count_launches(SimpleNamespace(as_text=lambda: text))  # pyright: ignore

    assert launches(text) == 4
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'
    assert launches(text.replace("body=%body", known)) == 1 + 5 * 2
