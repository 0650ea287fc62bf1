"""Interrupted conversions: the final name appears only when complete, and a rerun resumes or starts afresh."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from convert import convert
from ecospec_jax.checkpoint import read_manifest
from ecospec_jax.errors import UserError
from tests.hf_models import edit_json, write_target

ROOT = Path(__file__).parents[2]
# Kills itself while Orbax writes the piece `target/layers.2`: it is begun, but neither renamed nor in the journal.
KILLED_WITHIN_A_PIECE = """
import os, signal, sys
from pathlib import Path
from orbax.checkpoint import PyTreeCheckpointHandler
from convert import convert

save = PyTreeCheckpointHandler.save
def killing_save(self, directory, *args, **kwargs):
    if "layers.2" in str(directory):
        (Path(directory) / "begun").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, directory, *args, **kwargs)
PyTreeCheckpointHandler.save = killing_save
convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def contents(folder: Path) -> dict[str, str]:
    """The pieces' hashes."""
    return {name: piece.sha256 for name, piece in read_manifest(folder).pieces.items()}


def modified(folder: Path) -> dict[str, int]:
    """When each finished piece was written."""
    files = (
        folder / name / "_CHECKPOINT_METADATA" for name in ("target/top", *(f"target/layers.{i}" for i in range(8)))
    )
    return {file.parent.name: file.stat().st_mtime_ns for file in files if file.exists()}


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory) -> Path:
    """A source, and the `out.partial` that a killed conversion of it left."""
    folder = tmp_path_factory.mktemp("killed")
    write_target(folder / "source")
    command = [sys.executable, "-c", KILLED_WITHIN_A_PIECE, str(folder / "source"), str(folder / "out")]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def killed(killed_once, tmp_path) -> Path:
    """A copy of it, times of change included."""
    return Path(shutil.copytree(killed_once, tmp_path / "killed"))


def test_rerun_after_kill_resumes(killed):
    source, out, partial = killed / "source", killed / "out", killed / "out.partial"
    assert not out.exists()
    assert list(partial.glob("target/*layers.2*"))  # half a piece is there
    with pytest.raises(UserError, match="no finished conversion"):
        read_manifest(partial)
    kept = modified(partial)
    assert kept.keys() >= {"layers.0", "layers.1"} and "layers.2" not in kept

    resumed = convert(source, out)
    assert not partial.exists()
    assert kept.items() <= modified(out).items()  # finished pieces were not written again
    whole = convert(source, killed / "whole")
    assert contents(out) == contents(killed / "whole")
    files = lambda m: {name: replace(piece, files={}) for name, piece in m.pieces.items()}  # noqa: E731
    assert replace(resumed, pieces=files(resumed), created="") == replace(whole, pieces=files(whole), created="")
    listing = lambda folder: {path.relative_to(folder) for path in (*folder.glob("*"), *folder.glob("*/*"))}  # noqa: E731
    assert listing(out) == listing(killed / "whole")


@pytest.mark.parametrize("change", ["weights", "config"])
def test_rerun_on_another_source_starts_afresh(killed, change):
    source, out = killed / "source", killed / "out"
    kept = modified(killed / "out.partial")
    if change == "weights":
        write_target(source, seed=1)  # equal header, equal size
    else:
        edit_json(source / "config.json", norm_topk_prob=False)
    convert(source, out)
    assert kept.items().isdisjoint(modified(out).items())
    convert(source, killed / "whole")
    assert contents(out) == contents(killed / "whole")


def test_complete_conversion_is_not_overwritten(tmp_path, target_source):
    convert(target_source, tmp_path / "out")
    before = (tmp_path / "out/manifest.json").read_text()
    with pytest.raises(UserError, match="out: already exists; remove it or choose another name"):
        convert(target_source, tmp_path / "out")
    assert (tmp_path / "out/manifest.json").read_text() == before


def test_interrupt_leaves_a_resumable_folder(tmp_path, target_source):
    def interrupting(names):
        yield from names[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(target_source, tmp_path / "out", progress=interrupting)
    assert not (tmp_path / "out").exists()
    journal = json.loads((tmp_path / "out.partial/journal.json").read_text())
    assert len(journal["pieces"]) == 4
    convert(target_source, tmp_path / "out")
    assert len(contents(tmp_path / "out")) == 1 + 8 * 4
    assert not (tmp_path / "out/journal.json").exists()
