"""Reliability against events looked up one by one."""

from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.models.predictor import ProbabilisticPredictor, Stateless
from ecospec_jax.training.predictor import pack
from experiments.predictor_reliability import BINS, Reliability, judge_reliability, reliability, trust
from tests.complaints import complaint
from tests.made_up_traces import ROUTING, STATES, VOCAB, make_trace, write_traces

random = np.random.default_rng(0)
TABLE = random.random((VOCAB, ROUTING.layers, ROUTING.experts)).astype(np.float32) ** 4
TRACES = [make_trace("a", 5, 1), make_trace("b", 9, 2), make_trace("c", 7, 3)]


class Said(Stateless):
    """Gives each token the probabilities of a table."""

    config: ClassVar[Any] = SimpleNamespace(family="backbone")

    def __call__(self, rows, cache, evidence):
        raise NotImplementedError

    def probabilities(self, rows, cache, evidence):
        return jnp.asarray(TABLE)[rows.tokens_BR]


class StatesReader(Said):
    """One of a kind that reads the drafter's states."""

    config: ClassVar[Any] = SimpleNamespace(family="drafter_features")


def directly(events: list[tuple[float, bool]]) -> tuple[float, float, list[tuple[float, float]]]:
    """Error, bias and curve by the definition."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for said, true in events:
        bins.setdefault(min(int(said * BINS), BINS - 1), []).append((said, true))
    curve = [tuple(np.mean(bins[place], axis=0).tolist()) for place in sorted(bins)]
    gaps = [len(bins[place]) * abs(s - t) for place, (s, t) in zip(sorted(bins), curve, strict=True)]
    return sum(gaps) / len(events), np.mean([said - true for said, true in events]).item(), curve


def assert_same(found: Reliability, events: list[tuple[float, bool]]) -> None:
    error, bias, curve = directly(events)
    assert found.error == pytest.approx(error) and found.bias == pytest.approx(bias)
    np.testing.assert_allclose(found.curve, curve, rtol=1e-9)


def test_error_and_curve() -> None:
    """Certainties at both ends, bins without events, and parts that are added up."""
    said = np.concatenate([[0.0, 1.0, 1.0, 0.5], 0.4 * random.random(90)])
    true = random.random(94) < said**2
    assert_same(reliability(said, true), list(zip(said.tolist(), true.tolist(), strict=True)))
    parts = reliability(said[:40], true[:40]) + reliability(said[40:], true[40:])
    assert parts.error == pytest.approx(reliability(said, true).error) and parts.events.sum() == 94
    assert reliability(said, np.ones(94, bool)).error > 0.5


def events_of(traces, first: int, likeliest: bool) -> list[tuple[float, bool]]:
    found = []
    for trace in traces:
        for token, experts_LK in list(zip(trace.tokens_T, trace.experts_TLK.tolist(), strict=True))[first:]:
            for layer, chosen in enumerate(experts_LK):
                said = {expert: float(TABLE[token, layer, expert]) for expert in range(ROUTING.experts)}
                some = sorted(said, key=lambda expert: -said[expert])[: ROUTING.k] if likeliest else said  # noqa: B023
                found += [(said[expert], expert in chosen) for expert in some]
    return found


@pytest.mark.parametrize("first", [0, 2])
def test_trust_counts_live_tokens(first: int) -> None:
    """Of sequences of several lengths, from a token on; each layer's own likeliest experts."""
    assert isinstance(Said(), ProbabilisticPredictor)
    found = trust(Said(), pack(TRACES, 12, ROUTING), ROUTING, first=first)
    assert_same(found.every, events_of(TRACES, first, likeliest=False))
    assert_same(found.likeliest, events_of(TRACES, first, likeliest=True))


def test_held_out_prompts_of_a_folder(tmp_path, capsys) -> None:
    """All shards and batches together; predictors that give no probabilities are passed over."""
    several = [make_trace(f"p{i}", 4 + i % 3, i) for i in range(20)]
    manifest = write_traces(tmp_path / "traces", [several[:13], several[13:]])
    decoder: Any = SimpleNamespace(target_hash=manifest.target_hash, drafter_hash=STATES.drafter_hash)
    silent = Stateless()

    def judge(predictors: dict[str, Any], folder: str = "traces", share: float = 1.0, seed: int = 0):
        return judge_reliability(predictors, decoder, tmp_path / folder, held_out=share, seed=seed)

    def refused(one: Any, **changes: Any) -> str:
        def call() -> None:
            judge({"one": one}, **changes)

        return complaint(call, capsys)

    found = judge({"said": Said(), "silent": silent})
    assert found.keys() == {"said"}
    assert_same(found["said"].every, events_of(several, 0, likeliest=False))
    part = judge({"said": Said()}, share=0.5)["said"].every.events.sum()
    assert 0 < part < found["said"].every.events.sum()

    assert "no predictor gives probabilities" in refused(silent)
    assert "no drafter's states" in refused(StatesReader())
    assert "none of its prompts is held out" in refused(Said(), share=1e-9)
    decoder.target_hash = "cd" * 32
    assert "traces of another target" in refused(Said())
