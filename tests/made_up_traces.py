"""Routing traces from random numbers, and folders of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ecospec_jax.config import RoutingShape
from ecospec_jax.training.traces import (
    FORMAT,
    StateShape,
    Trace,
    TraceManifest,
    write_manifest,
    write_shard,
)

VOCAB, ROUTING = 23, RoutingShape(layers=3, experts=70, k=2)
STATES = StateShape(states=2, hidden=5, drafter_hash="cd" * 32)


def make_trace(prompt: str, length: int, seed: int, data_set: str = "one", states: StateShape | None = None) -> Trace:
    random = np.random.default_rng(seed)
    experts = np.argsort(random.random((length, ROUTING.layers, ROUTING.experts)))[..., : ROUTING.k]
    tokens = random.integers(0, VOCAB, length).astype(np.int32)
    made = states and random.normal(size=(length, states.states, states.hidden)).astype(np.float16)
    return Trace(data_set, prompt, 1, tokens, experts.astype(np.uint16), made)


def write_traces(folder: Path, groups: Sequence[Sequence[Trace]], states: StateShape | None = None) -> TraceManifest:
    """A folder with one shard a group."""
    folder.mkdir()
    manifest = TraceManifest(FORMAT, "ab" * 32, VOCAB, ROUTING, states, {"seed": "0"})
    for group in groups:
        manifest = replace(manifest, shards=(*manifest.shards, write_shard(folder, manifest, group)))
        write_manifest(folder, manifest)
    return manifest
