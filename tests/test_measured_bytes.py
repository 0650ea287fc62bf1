"""What a step really reads, as the CPU routines count it, against what the metrics count and the byte model says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import SpecConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.decoding import Weights
from ecospec_jax.kernels import native
from ecospec_jax.metrics import Counters
from ecospec_jax.program import Program
from tests import tiny

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"no C++ routines: {native.unavailable()}")


def measured(program: Program, weights: Weights, steps: int) -> tuple[native.Traffic, Counters]:
    state = tiny.prefilled(program, weights)
    jax.block_until_ready(state)
    with native.count_traffic() as counted:
        state = program.decode_steps(weights, state, jnp.int32(steps))
        jax.block_until_ready(state)
    return counted[0], jax.device_get(state.counters)


def test_plain_decoding_reads_the_modelled_bytes() -> None:
    """Every matrix once a pass and the distinct experts of the batch; norms and embedding rows are no matrices."""
    traffic, counters = measured(tiny.make_program("ar"), tiny.plain_weights(), 6)
    model = byte_model(tiny.TARGET, 4)
    vectors = sum(
        variable.get_value().nbytes
        for variable in parameters(tiny.make_target()).values()
        if variable.get_value().ndim == 1
    )
    passes, touched = int(counters.verifications), int(np.sum(counters.use.distinct_L))
    assert passes == 6 and traffic.experts == touched
    assert traffic.weight_bytes == passes * (model.fixed - vectors) + touched * model.per_expert


def test_a_verification_touches_the_experts_that_u_counts() -> None:
    """Five rows a sequence, three sequences; the drafter has no experts."""
    program = tiny.make_program("likelihood", SpecConfig())
    traffic, counters = measured(program, tiny.weights_with(), 4)
    assert int(counters.verifications) == 4
    assert traffic.experts == int(np.sum(counters.use.distinct_L)) < 4 * 2 * tiny.TARGET.num_experts
