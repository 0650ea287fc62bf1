"""One core and one thread, for timings that are compared with what one thread can read."""

import os

import jax

from ecospec_jax import UserError


def one_thread(core: int | None) -> int:
    """Keeps this process on a core (by default the last allowed one), its libraries on one thread; returns the core.

    To be called before JAX sees its devices and before torch is imported.
    """
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[-1] if core is None else core
    if core not in allowed:
        raise UserError(f"--core {core} cannot be used; allowed: {', '.join(map(str, allowed))}")
    os.sched_setaffinity(0, {core})
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["OMP_NUM_THREADS"] = "1"
    jax.config.update("jax_platforms", "cpu")
    return core
