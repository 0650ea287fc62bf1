"""Interrupted conversions: the final name appears only when complete, and a rerun resumes or starts afresh."""

import json
import os
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
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("target/*/_CHECKPOINT_METADATA")}


@pytest.fixture
def killed(tmp_path, target_source) -> Path:
    """The `.partial` folder that a killed conversion of `target_source` to `out` left."""
    command = [sys.executable, "-c", KILLED_WITHIN_A_PIECE, str(target_source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    return tmp_path / "out.partial"


def test_rerun_after_kill_resumes(tmp_path, target_source, killed):
    assert not (tmp_path / "out").exists()
    assert list(killed.glob("target/*layers.2*"))  # half a piece is there
    with pytest.raises(UserError, match="no finished conversion"):
        read_manifest(killed)
    kept = modified(killed)
    assert {"layers.0", "layers.1"} <= kept.keys()

    written = []
    resumed = convert(target_source, tmp_path / "out", progress=lambda names: (written.append(n) or n for n in names))
    assert not killed.exists()
    assert kept.items() <= modified(tmp_path / "out").items()  # finished pieces were not written again
    whole = convert(target_source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert written == list(whole.pieces)
    files = lambda m: {name: replace(piece, files={}) for name, piece in m.pieces.items()}  # noqa: E731
    assert replace(resumed, pieces=files(resumed), created="") == replace(whole, pieces=files(whole), created="")
    listing = lambda folder: {p.relative_to(folder) for p in folder.glob("*/*")} | {p.name for p in folder.iterdir()}  # noqa: E731
    assert listing(tmp_path / "out") == listing(tmp_path / "whole")


@pytest.mark.parametrize("change", ["weights", "config"])
def test_rerun_on_another_source_starts_afresh(tmp_path, target_source, killed, change):
    kept = modified(killed)
    if change == "weights":
        write_target(target_source, seed=1)  # equal header, equal size
    else:
        edit_json(target_source / "config.json", norm_topk_prob=False)
    convert(target_source, tmp_path / "out")
    assert kept.items().isdisjoint(modified(tmp_path / "out").items())
    convert(target_source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


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
    assert len(contents(tmp_path / "out")) == 9
    assert os.listdir(tmp_path / "out").count("journal.json") == 0
