"""The shipped checkpoints, converted, against transformers on real text, float32: internals, greedy text, a drafter."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file

from ecospec_jax import Decoder
from tests.conftest import CHECKPOINT, CHECKPOINTS
from tests.parity.compare import assert_close, causal_rows
from tests.parity.torch_eagle3 import TorchEagle3
from tests.parity.torch_targets import TorchOutput, run

PROMPTS = Path(__file__).parents[2] / "experiments" / "prompts" / "demo.jsonl"
# Trained routers come close to ties: one gap in twenty is below 1e-4. Rounding is a hundred times smaller than this.
MIN_GAP = 1e-5

forward = nnx.jit(lambda target, rows, cache, boundaries: target(rows, cache, boundaries), static_argnums=3)


@pytest.fixture(scope="module", params=["tiny-qwen3-moe", "tiny-gpt-oss", "tiny-deepseek-v3"])
def name(request: pytest.FixtureRequest) -> str:
    """Of a shipped checkpoint."""
    return request.param


@pytest.fixture(scope="module")
def reference(name: str) -> transformers.PreTrainedModel:
    """transformers' model, quantised weights widened."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / name / "target", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def decoder(name: str, converted: Callable[[str], Path]) -> Decoder:
    return Decoder.load(converted(name), dtype="float32")


only_qwen3_moe = pytest.mark.parametrize("name", ["tiny-qwen3-moe"], indirect=True)


@functools.cache
def _questions() -> list[str]:
    return [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]


@pytest.fixture(scope="module")
def clear(reference, decoder: Decoder) -> list[tuple[list[int], TorchOutput]]:
    """Three prompts in whose routing no near-tie decides, and transformers' evaluation of each."""
    found = []
    for question in _questions():
        ids = decoder.encode(question)
        output = run(reference, ids)
        if output.gap_LR.min() > MIN_GAP:
            found.append((ids, output))
        if len(found) == 3:
            return found
    raise AssertionError("near-ties decide the routing of nearly every prompt")


def test_internals(decoder: Decoder, clear) -> None:
    """Logits, every boundary of the residual stream, and every router's choices; a padded batch."""
    target, lengths = decoder.target, [len(ids) for ids, _ in clear]
    layers = target.config.num_layers
    tokens_BR = np.stack([np.resize(ids, max(lengths)) for ids, _ in clear])
    cache = target.empty_cache(len(clear), max(lengths), 1)
    output, _ = forward(target, causal_rows(tokens_BR, lengths), cache, tuple(range(layers + 1)))
    logits_BRV = np.asarray(target.logits(output.hidden_BRD))
    boundaries = np.split(np.asarray(output.features_BRF), layers + 1, axis=-1)
    for sequence, (ids, expected) in enumerate(clear):
        live = slice(len(ids))
        assert_close(logits_BRV[sequence, live], expected.logits_RV, what="logits")
        for index, (ours, theirs) in enumerate(zip(boundaries, expected.boundaries, strict=True)):
            assert_close(ours[sequence, live], theirs, what=f"boundary {index}")
        np.testing.assert_array_equal(
            np.sort(output.expert_ids_LBRK[:, sequence, live]), np.sort(expected.expert_ids_LRK)
        )


@pytest.fixture(scope="module")
def generated(reference, decoder: Decoder) -> list[tuple[int, ...]]:
    """64 greedy tokens of transformers' `generate` for eight prompts."""
    answers = []
    for question in _questions()[:8]:
        ids = torch.tensor([decoder.encode(question)])
        with torch.no_grad():
            tokens = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        answers.append(tuple(tokens[0, ids.shape[1] :].tolist()))
    return answers


@pytest.mark.parametrize("method", ["ar", "likelihood"])
def test_greedy_text_equals_generate(decoder: Decoder, generated, method: str) -> None:
    result = decoder.generate(_questions()[:8], method=method, max_new_tokens=64, batch_size=4)
    assert [generation.tokens for generation in result.generations] == generated


@pytest.fixture(scope="module")
def published_drafter(decoder: Decoder) -> TorchEagle3:
    """The PyTorch formulation with the published tensors, read without `convert/`."""
    config = decoder.drafter.config
    tensors = load_file(CHECKPOINT / "drafter" / "model.safetensors")
    w = {name.removesuffix(".weight").split(".")[-1]: tensor.float() for name, tensor in tensors.items()}
    w["embed_tokens"] = load_file(CHECKPOINT / "target" / "model.safetensors")["model.embed_tokens.weight"].float()
    inverse = config.rope.theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return TorchEagle3(config, inverse, w=w, d2t=torch.zeros(config.draft_vocab_size, dtype=torch.int64))


@only_qwen3_moe
def test_drafter(decoder: Decoder, published_drafter: TorchEagle3, clear) -> None:
    """Log-probabilities of the drafter over a prompt, on transformers' hidden states."""
    ids, output = clear[0]
    drafter, rows = decoder.drafter, len(ids) - 1
    assert drafter.config.rope.kind == "default" and drafter.boundaries == (1, 2, 3)
    features = np.concatenate([output.boundaries[boundary] for boundary in drafter.boundaries], axis=-1)[:rows]
    with torch.no_grad():
        states, _ = published_drafter.context(torch.tensor(features), ids[1:])
        expected = published_drafter.log_probs(torch.stack(states)).sort(-1, descending=True).values
    cache = drafter.empty_cache(1, rows)
    catch_up = nnx.jit(lambda drafter, rows, features, cache: drafter.catch_up(rows, features, cache))
    ours, _ = catch_up(drafter, causal_rows([ids[1:]]), jnp.asarray(features[None]), cache)
    assert_close(ours[0], torch.stack(states).numpy(), what="states")
    _, log_probs = drafter.propose(ours[0], 5)
    assert_close(log_probs, expected[:, :5].numpy(), what="log-probabilities")


@only_qwen3_moe
def test_drafter_agrees_with_the_target_at_its_own_boundaries_only(
    reference, decoder: Decoder, generated, published_drafter: TorchEagle3
) -> None:
    """`eagle_config` lists 0, 1, 2 and means boundaries 1, 2, 3 (docs/formats.md C.2); else it drafts badly."""
    agreement = {}
    for boundaries in (decoder.drafter.boundaries, (0, 1, 2)):
        hits = []
        for question, answer in list(zip(_questions(), generated, strict=False))[:3]:
            ids = decoder.encode(question) + list(answer)
            output = run(reference, ids)
            features = np.concatenate([output.boundaries[boundary] for boundary in boundaries], axis=-1)
            with torch.no_grad():
                states, _ = published_drafter.context(torch.tensor(features[:-1]), ids[1:])
                drafted = published_drafter.log_probs(torch.stack(states)).argmax(-1)
            hits.append((drafted.numpy() == output.logits_RV[1:].argmax(-1))[-len(answer) :])
        agreement[boundaries] = np.concatenate(hits).mean()
    assert agreement[1, 2, 3] > 0.4
    assert agreement[1, 2, 3] > agreement[0, 1, 2] + 0.1
