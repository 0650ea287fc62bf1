"""The trainers know targets and drafters by their interfaces only: every family learns, prepared layers and all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.checkpoint import borrowed_parameters, parameters
from ecospec_jax.config import ModelConfig, MtpConfig
from ecospec_jax.models import DRAFTERS, TARGETS
from ecospec_jax.training.drafter import drafter_loss, lessons
from ecospec_jax.training.experts import prepare
from ecospec_jax.training.language_model import optimiser, training_loss
from ecospec_jax.training.sequences import pack_documents
from ecospec_jax.training.trainer import Trainer
from tests import tiny
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]
DEEPSEEK = replace(tiny.DEEPSEEK, num_layers=2)
PACKED = pack_documents([((3 + np.arange(11) * step) % 29).tolist() for step in range(1, 9)], 24)


def build(registry, config):
    return tiny.randomised(lambda: registry[config.family](config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)), 6)


def learn(learner: Trainer, batch) -> None:
    """The loss falls, and all parameters that the model owns move."""
    before = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    losses = [float(learner.step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0] - 0.1
    after = {path: np.asarray(v.get_value()) for path, v in parameters(learner.model).items()}
    still = {path for path in before if np.array_equal(before[path], after[path])}
    assert still == set(borrowed_parameters(learner.model.config))


@pytest.mark.parametrize("config", [tiny.TARGET, DEEPSEEK], ids=lambda config: config.family)
def test_targets_learn(config: ModelConfig) -> None:
    """Both layouts of experts, dense layers, shared experts, latent attention."""
    model = prepare(build(TARGETS, config), quantised=False)
    learn(Trainer(model, optimiser(steps=9, muon_rate=0.02, adam_rate=1e-2), training_loss), PACKED)


def test_a_drafter_with_experts_learns() -> None:
    """DeepSeek's MTP module, which borrows the target's embedding and head, from the state behind its final norm."""
    drafter = prepare(build(DRAFTERS, MtpConfig(DEEPSEEK)), quantised=False)
    target = build(TARGETS, DEEPSEEK)
    batch = jax.jit(lambda packed: lessons(target, packed, drafter.boundaries))(PACKED)
    learn(Trainer(drafter, optimiser(steps=9, muon_rate=0.02, adam_rate=1e-2), drafter_loss), batch)
