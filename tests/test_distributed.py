"""Several processes: they meet, agree, and end together, each with one line."""

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ecospec_jax.distributed import Cluster
from ecospec_jax.errors import UserError
from tests.processes import free_port, start_python

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import jax
from ecospec_jax.distributed import Cluster, agree, require_same, run_as_one_of_several
from ecospec_jax.errors import UserError, run_command

def refuse(complain):
    if complain:
        raise UserError("model.bin: damaged")

def complaint(call):
    try:
        call()
    except UserError as error:
        return str(error)

def several():
    mine = jax.process_index()
    require_same("options", "alike")
    agree(lambda: refuse(False))
    differ, damaged = lambda: require_same("prompts", str(mine)), lambda: agree(lambda: refuse(mine == 1))
    refused = [complaint(differ), complaint(damaged)]
    Path(f"{folder}/{mine}.new").write_text(json.dumps(refused))
    os.rename(f"{folder}/{mine}.new", f"{folder}/{mine}")
    time.sleep(600)

def alone():
    os.kill(os.getpid(), signal.SIGKILL)

folder, clusters = sys.argv[1], [Cluster(**cluster) for cluster in json.loads(sys.argv[2])]
if len(clusters) == 1:
    run_command(lambda: run_as_one_of_several(several, clusters[0]))
for cluster in clusters:
    print(complaint(lambda: run_as_one_of_several(alone, cluster)), flush=True)
"""


def start(folder: Path, *clusters: Mapping[str, object]) -> subprocess.Popen[str]:
    return start_python("-c", PROGRAM, folder, json.dumps(clusters))


def test_processes_agree_and_end_together(tmp_path: Path) -> None:
    """What one refuses all refuse; when one dies, its worker with it, the other ends with one line."""
    cluster = {"coordinator": f"127.0.0.1:{free_port()}", "processes": 2}
    running = [start(tmp_path, cluster | {"process_id": index}) for index in range(2)]
    try:
        files = [tmp_path / str(index) for index in range(2)]
        while not all(file.exists() for file in files):
            assert all(process.poll() is None for process in running)
            time.sleep(0.1)
        running[1].kill()
        _, error = running[0].communicate(timeout=120)
    finally:
        for process in running:
            process.kill()  # its worker ends with it
    refused = ["prompts are not the same on all 2 processes", "model.bin: damaged"]
    assert [json.loads(file.read_text()) for file in files] == [refused] * 2
    assert running[0].returncode == 2
    assert error == "error: another process of the run has ended or cannot be reached, so this one ends too\n"


def test_a_process_that_is_alone_says_why(tmp_path: Path) -> None:
    """No cluster to be found; a coordinator that is not there; a worker that is killed."""
    absent, own = (f"127.0.0.1:{free_port()}" for _ in range(2))
    lone = start(
        tmp_path,
        {},
        {"coordinator": absent, "processes": 2, "process_id": 1, "connect_seconds": 1},
        {"coordinator": own, "processes": 1, "process_id": 0},
    )
    out, error = lone.communicate(timeout=120)
    nothing, unreachable, killed = out.splitlines()
    assert "no Slurm or Open MPI tells them" in nothing
    assert unreachable.startswith(f"the processes did not meet at {absent} within 1 s: is process 0 there")
    assert killed == "this process of the run was ended by SIGKILL", error


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (Cluster("localhost", 2, 0), "coordinator 'localhost' is not HOST:PORT"),
        (Cluster("host:80", 0, 0), "number of processes must be at least 1, not 0"),
        (Cluster("host:80", 2, 2), "process id 2 must be at least 0 and less than 2, the number of processes"),
        (Cluster("host:80", None, -1), "process id -1 must be at least 0"),
        (Cluster(connect_seconds=0), "time to connect must be at least 1 second, not 0"),
    ],
)
def test_what_cannot_be_right_is_refused(cluster: Cluster, line: str) -> None:
    with pytest.raises(UserError, match=line):
        cluster.check()
