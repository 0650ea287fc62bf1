"""Predictors of published backbones, from traces to decoding: every bridge, frozen or not, and bad input."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ecospec_jax import Decoder
from ecospec_jax.checkpoint import parameters
from ecospec_jax.predictor_checkpoint import load_predictors
from experiments import collect_traces, train_predictor
from tests.complaints import complaint
from tests.hf_backbones import write_backbone, write_bpe
from tests.tiny import quick_compilation
from tests.tiny_predictors import write_converted, write_tokenizer

__all__ = ["quick_compilation"]
BF16 = jnp.dtype(jnp.bfloat16)
PROMPTS = [{"id": f"p{i}", "turns": [text]} for i, text in enumerate(("abc", "hello", "no", "cab"))]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A converted target with traces, and published models: with its vocabulary, and with another."""
    folder = tmp_path_factory.mktemp("world")
    write_converted(folder / "target")
    write_backbone(folder / "same", "qwen3", vocab_size=31)
    write_tokenizer(folder / "same")
    write_backbone(folder / "other", "qwen2", vocab_size=268, tied=False)
    write_bpe(folder / "other", ["he", "ab"], seed=4)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    settings = collect_traces.Settings(
        folder / "target", (str(folder / "prompts.jsonl"),), folder / "traces", max_new_tokens=9, batch_size=4
    )
    collect_traces.run(settings)
    return folder


def settings(folder: Path, out: Path, **changes) -> train_predictor.Settings:
    return train_predictor.Settings(
        folder / "target", folder / "traces", out, steps=3, batch_size=3, length=32, warmup=1, held_out=0.3, **changes
    )


@pytest.mark.parametrize(
    ("published", "bridge", "frozen"),
    [("same", "shared", False), ("other", "retokenise", True), ("other", "target_embedding", True)],
)
def test_from_traces_to_tokens(folder: Path, tmp_path, published: str, bridge, frozen: bool) -> None:
    """What is frozen has the published values to the bit; decoding gives plain decoding's tokens."""
    out = tmp_path / "predictors"
    begun = settings(folder, out, backbone=folder / published, bridge=bridge, frozen=frozen)
    train_predictor.run(begun)
    decoder = Decoder.load(folder / "target", predictor=out)
    plain, speculative = (
        decoder.generate("hello", method=method, max_new_tokens=12).generations for method in ("ar", "ecospec")
    )
    assert speculative[0].tokens == plain[0].tokens and len(plain[0].tokens) == 12

    ours = load_predictors(out, decoder.target_hash, jnp.dtype(jnp.float32), decoder.target)["backbone"]
    assert ours.config.bridge.kind == bridge
    before = parameters(train_predictor.make_backbone(begun, decoder, None))
    kept = {
        path.split(".")[0]
        for path, variable in parameters(ours).items()
        if np.array_equal(
            variable.get_value(), before[path].get_value().astype(BF16).astype(variable.get_value().dtype)
        )
    }
    assert kept & {"heads", "projection"} == set()
    published_q = load_file(folder / published / "model.safetensors")[Q].astype(BF16).astype(np.float32)
    assert np.array_equal(ours.backbone.layers[1].attention.q.weight[...], published_q) == frozen
    if bridge == "target_embedding":
        assert ours.embedding.weight.get_value() is decoder.target.embedding.weight.get_value()
    else:
        assert ("embedding" in kept) == frozen


BAD: dict[str, tuple[Callable[[Path], dict], str]] = {
    "no bridge": (lambda folder: {"backbone": folder / "same"}, "--backbone and --bridge need each other"),
    "no backbone": (lambda folder: {"bridge": "shared"}, "--backbone and --bridge need each other"),
    "nothing to freeze": (lambda folder: {"frozen": True}, "--frozen needs --backbone"),
    "width": (
        lambda folder: {"backbone": folder / "same", "bridge": "shared", "width": 96},
        "--width is of a new backbone; the one of --backbone has its own",
    ),
    "not shared": (
        lambda folder: {"backbone": folder / "other", "bridge": "shared"},
        "other: token 0 is 'a' to the target and ",
    ),
    "no backbone there": (
        lambda folder: {"backbone": folder / "target", "bridge": "retokenise"},
        "target/config.json: no such file",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(folder: Path, tmp_path, capsys, case: str) -> None:
    """Refused before anything is written."""
    changes, message = BAD[case]
    line = complaint(lambda: train_predictor.run(settings(folder, tmp_path / "predictors", **changes(folder))), capsys)
    assert message in line and not list(tmp_path.iterdir())


def test_another_backbone_does_not_continue_a_training(folder: Path, tmp_path, capsys, monkeypatch) -> None:
    """An unfinished training knows what it began with."""
    begun = settings(folder, tmp_path / "predictors", backbone=folder / "same", bridge="target_embedding")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_predictor, "train_predictor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_predictor.run(begun)
    for changes in ({"backbone": folder / "other"}, {"frozen": True}, {"bridge": "shared"}):
        line = complaint(lambda changes=changes: train_predictor.run(replace(begun, **changes)), capsys)
        assert "holds an unfinished training with other settings" in line
