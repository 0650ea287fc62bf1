"""A target and its drafter from text to published checkpoints: readable by others, resumable, strict about input."""

import json
import random
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GptOssForCausalLM

from convert import convert
from ecospec_jax import Decoder, SpecConfig
from ecospec_jax.config import Eagle3Config, RopeConfig
from ecospec_jax.errors import run_command
from ecospec_jax.training.trainer import Trainer
from experiments import train_reference
from experiments.reference_tokenizer import HARMONY
from experiments.references import REFERENCES, Reference
from tests.complaints import complaint
from tests.parity.compare import causal_rows
from tests.tiny import quick_compilation
from tests.training.models import GPT_OSS, stored

__all__ = ["quick_compilation"]
VOCABULARY = 278
TARGET = replace(GPT_OSS, vocab_size=VOCABULARY)
DRAFTER = Eagle3Config(
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=18,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=271,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=3e3),
    boundaries=(1, 2),
    norm_before_fc=True,
)
TINY = Reference(
    target=TARGET,
    published=stored(TARGET),
    drafter=DRAFTER,
    published_drafter=DRAFTER,
    chat=HARMONY,
    rounded_share=0.4,
)
BATCH, LENGTH, STEPS, DRAFTER_STEPS = 3, 40, 5, 2
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: Patch) -> None:
    monkeypatch.setitem(REFERENCES, "tiny", TINY)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "sums.jsonl"
    numbers = random.Random(0)
    sums = [(numbers.randint(1, 99), numbers.randint(1, 99)) for _ in range(30)]
    lines = [
        {"id": str(i), "turns": [f"What is {a} plus {b}?"], "answer": f"It is {a + b}, of course."}
        for i, (a, b) in enumerate(sums)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def settings(text: Path, out: Path, **changes) -> train_reference.Settings:
    fresh = train_reference.Settings(
        text=(text,),
        out=out,
        config="tiny",
        tokens=STEPS * BATCH * LENGTH,
        drafter_tokens=DRAFTER_STEPS * BATCH * LENGTH,
        batch_size=BATCH,
        length=LENGTH,
        held_out=4,
        checkpoint_every=2,
    )
    return replace(fresh, **changes)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory) -> Path:
    """What an uninterrupted training writes."""
    out = tmp_path_factory.mktemp("trained") / "model"
    with Patch.context() as patch:
        patch.setitem(REFERENCES, "tiny", TINY)
        train_reference.run(settings(text, out))
    return out


@pytest.fixture(scope="module")
def decoder(trained: Path, tmp_path_factory) -> Decoder:
    converted = tmp_path_factory.mktemp("converted") / "tiny"
    convert(trained / "target", converted, drafter=trained / "drafter")
    return Decoder.load(converted, dtype="float32")


def test_writes_only_the_checkpoints(trained: Path) -> None:
    assert {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()} == {
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "drafter/config.json",
        "drafter/model.safetensors",
    }
    assert [path.name for path in trained.parent.iterdir()] == ["model"]


def test_convert_reads_what_was_trained(decoder: Decoder) -> None:
    """With the configs that were meant; decoding with the drafter gives plain decoding's tokens."""
    assert decoder.target.config == TINY.published
    assert decoder.drafter is not None and decoder.drafter.config == TINY.drafter
    prompts = ["What is 3 plus 4?", "What is 12 plus 70?"]
    plain = decoder.generate(prompts, method="ar", max_new_tokens=12)
    drafted = decoder.generate(prompts, method="likelihood", spec=SpecConfig(depth=2, budget=3), max_new_tokens=12)
    assert [g.tokens for g in plain.generations] == [g.tokens for g in drafted.generations]


def test_transformers_agrees(trained: Path, decoder: Decoder) -> None:
    """The same logits from the same files, and harmony's tokens around a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    messages = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "It is 7."}]
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == (
        "<|start|>user<|message|>What is 3 plus 4?<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|start|>user<|message|>What is 3 plus 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 7.<|end|>"
    )
    generation = json.loads((trained / "target/generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == ["<|return|>", "<|endoftext|>"]
    assert decoder.eos_ids == tuple(generation["eos_token_id"])

    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    model = GptOssForCausalLM.from_pretrained(trained / "target", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    target = decoder.target
    output, _ = jax.jit(target, static_argnums=2)(causal_rows([ids]), target.empty_cache(1, len(ids)), ())
    np.testing.assert_allclose(target.logits(output.hidden_BRD)[0], expected, atol=2e-3)


def test_drafter_is_published_with_its_vocabulary(trained: Path, decoder: Decoder) -> None:
    """The commonest tokens; auxiliary layers count outputs, as SpecForge's do."""
    config = json.loads((trained / "drafter/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert decoder.drafter is not None
    vocabulary = np.asarray(decoder.drafter.vocabulary).tolist()
    assert vocabulary == sorted(set(vocabulary)) and len(vocabulary) == TINY.drafter.draft_vocab_size
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    assert set(tokenizer.encode("What is 3 plus 4? It is 7, of course.")) <= set(vocabulary)


def test_an_interrupted_training_continues(text: Path, trained: Path, tmp_path, monkeypatch, capsys) -> None:
    """To the same files, from the last checkpoint of the part it was in. Other settings are refused."""
    wanted = settings(text, tmp_path / "model")
    step, taken = Trainer.step, []

    def run_for(steps: int) -> None:
        def limited(self: Trainer, batch):
            if len(taken) == steps:
                raise KeyboardInterrupt
            taken.append(1)
            return step(self, batch)

        taken.clear()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
            patch.setattr(Trainer, "step", limited)
            run_command(lambda: train_reference.run(wanted))
        assert caught.value.code == 130
        assert [path.name for path in tmp_path.iterdir()] == ["model.training"]

    run_for(STEPS - 1)  # of the target, the last of them with rounded experts; all are in a checkpoint
    capsys.readouterr()
    assert "holds an unfinished training" in complaint(lambda: train_reference.run(replace(wanted, seed=1)), capsys)
    run_for(2)  # the target's last, and the drafter's first, which is in none
    taken.clear()
    monkeypatch.setattr(Trainer, "step", lambda self, batch: taken.append(1) or step(self, batch))
    train_reference.run(wanted)
    assert len(taken) == DRAFTER_STEPS
    for file in ("target/model.safetensors", "drafter/model.safetensors", "target/tokenizer.json"):
        assert (wanted.out / file).read_bytes() == (trained / file).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": (Path("absent.jsonl"),)}, "absent.jsonl: cannot be read"),
        ({"config": "large"}, "unknown --config 'large'; known: tiny-gpt-oss, tiny-deepseek-v3, tiny"),
        ({"tokens": 7}, "--tokens 7 are less than one step's"),
        ({"drafter_tokens": 0}, "--drafter-tokens 0 are less than one step's"),
        ({"held_out": 30}, "30 prompts, of which --held-out keeps 30"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"tokenizer": Path("absent")}, "absent/tokenizer.json: cannot be read"),
        ({"out": Path(".")}, ".: already exists"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input(text: Path, tmp_path, capsys, changes: dict, message: str) -> None:
    wanted = replace(settings(text, tmp_path / "model"), **changes)
    assert message in complaint(lambda: train_reference.run(wanted), capsys)
    assert not list(tmp_path.iterdir())


def test_text_that_cannot_be_used(text: Path, trained: Path, tmp_path, capsys) -> None:
    """Prompts without answers, too little text for a vocabulary, and a tokenizer of another family."""
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "x", "turns": ["Well?"]}) + "\n")
    wanted = settings(other, tmp_path / "model")
    assert f"{other}: x: one turn with an answer is needed" in complaint(lambda: train_reference.run(wanted), capsys)
    other.write_text("".join(json.dumps({"id": str(i), "turns": ["a"], "answer": "b"}) + "\n" for i in range(6)))
    assert "--text: the text gives" in complaint(lambda: train_reference.run(wanted), capsys)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (foreign / name).write_text((trained / "target" / name).read_text().replace("<|return|>", "<|stop|>"))
    wanted = settings(text, tmp_path / "third", tokenizer=foreign)
    assert "with tokens <|endoftext|> and <|return|>" in complaint(lambda: train_reference.run(wanted), capsys)


def test_functions_become_prompts(tmp_path, capsys) -> None:
    """Signature and docstring ask for the rest of a documented function; the file serves as text to train on."""
    from experiments import collect_functions
    from experiments.prompts import read_prompts

    out = tmp_path / "functions.jsonl"
    wanted = collect_functions.Settings(packages=("tyro",), out=out, shortest=200, longest=500)
    collect_functions.run(wanted)
    prompts = read_prompts(out)
    assert len(prompts) > 10
    for prompt in prompts:
        whole = f"{prompt.turns[0]}\n{prompt.answer}"
        assert 200 <= len(whole) - 1 <= 500 and whole.startswith("def ") and '"""' in prompt.turns[0]
        compile(whole, prompt.id, "exec")
    line = complaint(lambda: collect_functions.run(replace(wanted, packages=("no_such_package",))), capsys)
    assert line == "--packages: no package 'no_such_package' is installed"
