"""One run on several processes, each with devices of its own, which `jax.distributed` joins.

All processes run the same program on the same inputs. JAX aborts a process whose peers are gone, with a stack trace, so
the program runs in a worker, forked before JAX starts, and the process that the user sees turns its end into one line.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.synchronize import Event

import jax
import numpy as np
from jax.experimental import multihost_utils

from ecospec_jax.errors import EXIT_BAD_INPUT, UserError

HEARTBEAT_SECONDS = 10  # a process that is silent for as long is taken for dead
_SHUTDOWN_SECONDS = 300  # the others wait as long while process 0 writes its results
_MESSAGE_BYTES = 1024
_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_ABORTED = "JAX distributed service"  # what JAX says as it aborts a process without peers


@dataclass(frozen=True)
class Cluster:
    """Where the processes meet; what is not given is taken from the environment of Slurm or Open MPI.

    Attributes:
        coordinator: HOST:PORT of process 0.
        processes: how many there are.
        process_id: which one this is, from 0.
        connect_seconds: how long each waits for the others.
    """

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    connect_seconds: int = 60

    def check(self) -> None:
        """Refuses what cannot be right on any machine."""
        if self.coordinator is not None and not _ADDRESS.fullmatch(self.coordinator):
            raise UserError(f"coordinator '{self.coordinator}' is not HOST:PORT")
        if self.processes is not None and self.processes < 1:
            raise UserError(f"the number of processes must be at least 1, not {self.processes}")
        if self.process_id is not None and not 0 <= self.process_id < (self.processes or sys.maxsize):
            most = "" if self.processes is None else f" and less than {self.processes}, the number of processes"
            raise UserError(f"process id {self.process_id} must be at least 0{most}")
        if self.connect_seconds < 1:
            raise UserError(f"the time to connect must be at least 1 second, not {self.connect_seconds}")

    def join(self) -> None:
        """Joins the processes; before anything else of JAX that looks for devices."""
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.processes,
                self.process_id,
                initialization_timeout=self.connect_seconds,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            )
        except ValueError as error:
            raise UserError(
                "not all of the coordinator, the number of processes and the process id are given, "
                f"and no Slurm or Open MPI tells them: {error}"
            ) from error
        except RuntimeError as error:
            raise self.not_met() from error

    def not_met(self) -> UserError:
        """What to say when joining failed; JAX tells little of why, and may just crash."""
        where = self.coordinator or "the coordinator that the environment names"
        return UserError(
            f"the processes did not meet at {where} within {self.connect_seconds} s: "
            "is process 0 there, its port free, and each process started?"
        )


def run_as_one_of_several(main: Callable[[], None], cluster: Cluster) -> None:
    """Runs `main` in a worker that has joined the cluster.

    Raises:
        UserError: that of the worker, or that it or another process has died.
    """
    cluster.check()
    context = multiprocessing.get_context("fork")
    joined = context.Event()
    with tempfile.TemporaryFile() as log:
        worker = context.Process(target=_work, args=(main, cluster, joined, log.fileno()))
        worker.start()
        try:
            worker.join()
        except KeyboardInterrupt:  # from a terminal the worker has it as well
            worker.join(HEARTBEAT_SECONDS)
            worker.kill()
            raise
        log.seek(0)
        said = log.read().decode(errors="replace")
    code = worker.exitcode or 0
    if code == EXIT_BAD_INPUT:
        raise UserError(said.splitlines()[-1])
    if code < 0 and not joined.is_set():
        raise cluster.not_met()
    if code == -signal.SIGABRT and _ABORTED in said:
        raise UserError("another process of the run has ended or cannot be reached, so this one ends too")
    sys.stderr.write(said)
    if code < 0:
        raise UserError(f"this process of the run was ended by {signal.Signals(-code).name}")
    if code > 0:
        sys.exit(code)


def _work(main: Callable[[], None], cluster: Cluster, joined: Event, log: int) -> None:
    os.dup2(log, sys.stderr.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        cluster.join()
        joined.set()
        if not is_first():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        main()
        jax.distributed.shutdown()
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(EXIT_BAD_INPUT)  # without waiting for the others, who may wait for this one
    except jax.errors.JaxRuntimeError:
        time.sleep(2 * HEARTBEAT_SECONDS)  # if it is because another process has died, JAX aborts this one meanwhile
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(EXIT_BAD_INPUT)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def _texts(mine: str) -> list[str]:
    """A short text of every process, on each."""
    padded = np.frombuffer(mine.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, _MESSAGE_BYTES)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


def agree(check: Callable[[], None]) -> None:
    """Runs every process's own part of a check; a `UserError` of one is raised on all, so that none waits for it."""
    if jax.process_count() == 1:
        check()
        return
    complaint = ""
    try:
        check()
    except UserError as error:
        complaint = str(error)
    for text in _texts(complaint):
        if text:
            raise UserError(text)


def require_same(what: str, digest: str) -> None:
    """Refuses processes that were started on different inputs: their collectives would mix what does not belong."""
    if jax.process_count() > 1 and len(set(_texts(digest))) > 1:
        raise UserError(f"{what} are not the same on all {jax.process_count()} processes")
