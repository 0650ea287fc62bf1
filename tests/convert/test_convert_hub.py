"""Hub ids, offline against a local cache that the test writes in the Hub client's layout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from convert import convert
from ecospec_jax.checkpoint import read_manifest

ROOT = Path(__file__).parents[2]


def add_to_cache(cache: Path, repository: str, folder: Path) -> None:
    entry = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, entry / "snapshots/0123456789abcdef")
    (entry / "refs").mkdir()
    (entry / "refs/main").write_text("0123456789abcdef")


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "convert", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_hub_ids(tmp_path, target_source, drafter_source):
    add_to_cache(tmp_path / "cache", "some-lab/tiny.target", target_source)
    add_to_cache(tmp_path / "cache", "other_lab/head", drafter_source)
    done = run(tmp_path / "cache", "some-lab/tiny.target", str(tmp_path / "out"), "--drafter", "other_lab/head")
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.source, manifest.drafter_source) == ("some-lab/tiny.target", "other_lab/head")
    local = convert(target_source, tmp_path / "local", drafter=drafter_source)
    assert manifest.source_hash == local.source_hash


def test_hub_id_that_is_not_to_be_had(tmp_path):
    done = run(tmp_path / "cache", "some-lab/absent", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: some-lab/absent: no such folder, and not to be had from the Hugging Face Hub")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
