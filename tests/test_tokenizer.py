"""Encoding, decoding, streaming; and how conversion carries a tokenizer along."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert import convert
from ecospec_jax.errors import UserError
from ecospec_jax.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HARMONY_MARKS = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]
HARMONY = (  # in the manner of gpt-oss: marks between roles, channels and texts, a date, no mark at the very end
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{%- for m in messages -%}{%- if '<|channel|>' in m.content -%}{{ raise_exception('a channel') }}{%- endif -%}"
    "<|start|>{{ m.role }}{%- if m.role == 'assistant' -%}<|channel|>final{%- endif -%}"
    "<|message|>{{ m.content }}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
ALPHABET = "abcdehinorstu\u0120<>"


def write_tokenizer(
    folder: Path, *, alphabet: list[str], template: str | None = TEMPLATE, special: Sequence[str] = ()
) -> Path:
    """A byte-level tokenizer without merges: one id a byte, so that characters outside ASCII have several."""
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.add_special_tokens({"extra_special_tokens": list(special)})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bytes"), alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


def test_encode_and_decode(tokenizer):
    ids = tokenizer.encode("tree: ναί")
    assert len(ids) == 6 + 6  # two bytes a Greek letter
    assert tokenizer.decode(ids) == "tree: ναί"
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode([*ids, 256]) == "tree: ναί"  # <end> is special


def test_bytes_of_tokens(tokenizer):
    """Every byte has a token; of a part of a character, too; added tokens are their names."""
    texts = tokenizer.token_bytes()
    assert sorted(texts[i] for i in range(256)) == [bytes([byte]) for byte in range(256)]
    ids = tokenizer.encode("\u03bd \u597d")
    assert b"".join(texts[i] for i in ids) == "\u03bd \u597d".encode()
    assert [tokenizer.encode_bytes(texts[i]) for i in ids] == [[i] for i in ids]
    assert texts[256] == b"<end>" and tokenizer.filler == 256 and tokenizer.vocabulary[256] == "<end>"


def test_chat_uses_the_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode("<user>hi<end><assistant>ho<end><assistant>")
    assert ids.count(256) == 2  # special tokens of the template are single ids


@pytest.fixture(scope="module")
def harmony(tmp_path_factory) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    folder = tmp_path_factory.mktemp("harmony")
    return Tokenizer.load(write_tokenizer(folder, alphabet=alphabet, template=HARMONY, special=HARMONY_MARKS))


def test_harmony_chat(harmony):
    """The marks are one id each, the date is today's, and the assistant's turn is open without a channel."""
    before = date.today()
    ids = harmony.encode_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    days = [f"{day:%Y-%m-%d}" for day in (before, date.today())]
    assert ids in [
        harmony.encode(
            f"<|start|>system<|message|>Current date: {day}<|end|><|start|>user<|message|>hi<|end|>"
            "<|start|>assistant<|channel|>final<|message|>ho<|end|><|start|>assistant"
        )
        for day in days
    ]
    assert [sum(token == mark for token in ids) for mark in range(257, 263)] == [4, 3, 1, 3, 0, 0]


@pytest.mark.parametrize("step", [1, 3])
def test_marks_in_the_middle_of_an_answer_do_not_leak_into_the_text(harmony, step):
    answer = "<|channel|>analysis<|message|>1 🌳<|end|><|start|>assistant<|channel|>final<|message|>ναί<|return|>"
    ids, text = harmony.encode(answer), "analysis1 🌳assistantfinalναί"
    assert len(ids) == len(text.encode()) + 7
    assert harmony.decode(ids) == text
    stream = harmony.stream()
    pieces = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(pieces) + stream.close() == text
    # Such a text can be an earlier turn: nothing in it is taken for a mark.
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    assert harmony.encode_chat(turns).count(ids[0]) == 1


def test_chat_refusals(tokenizer, folder, tmp_path):
    with pytest.raises(UserError, match=f"{folder}: the chat template refuses the messages: no robots"):
        tokenizer.encode_chat([{"role": "robot", "content": "beep"}])
    plain = write_tokenizer(tmp_path / "plain", alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), template=None)
    with pytest.raises(UserError, match=f"{plain}: the tokenizer has no chat template"):
        Tokenizer.load(plain).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_stream_never_splits_a_character(tokenizer, step):
    text = "a – ναί 🌳🌲 e\u0301 \u4e2d\u6587."
    ids = [*tokenizer.encode(text), 256]
    stream = tokenizer.stream()
    pieces = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(pieces) + stream.close() == text
    assert all("\ufffd" not in piece for piece in pieces)
    if step == 1:
        assert [piece for piece in pieces if piece] == list(text)  # and nothing is held back longer than needed


def test_stream_returns_an_unfinished_character_only_at_the_end(tokenizer):
    ids = tokenizer.encode("a🌳")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push([token]) for token in ids) == "a"
    assert stream.close() == tokenizer.decode(ids)[1:] != ""


def test_stream_goes_on_after_bytes_that_are_no_character(tokenizer):
    ids = [*tokenizer.encode("🌳")[:2], *tokenizer.encode("ab")]
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == ["", "", tokenizer.decode(ids[:3]), "b"]


def test_unloadable(tmp_path):
    with pytest.raises(UserError, match="none: no such folder, so no tokenizer"):
        Tokenizer.load(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=f"{tmp_path}: cannot load the tokenizer: ") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_conversion_carries_the_tokenizer(tmp_path, target_source):
    write_tokenizer(target_source, alphabet=list(ALPHABET))
    convert(target_source, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out/tokenizer").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    source, carried = Tokenizer.load(target_source), Tokenizer.load(tmp_path / "out/tokenizer")
    messages = [{"role": "user", "content": "bonsai art"}]
    assert carried.encode_chat(messages) == source.encode_chat(messages)
    assert carried.decode(carried.encode("in order to trust")) == "in order to trust"


def test_conversion_without_tokenizer(tmp_path, target_source):
    convert(target_source, tmp_path / "out")
    assert not (tmp_path / "out/tokenizer").exists()


def test_tokenizer_larger_than_the_model_is_refused(tmp_path, target_source):
    write_tokenizer(target_source, alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    with pytest.raises(UserError, match=f"{target_source}: the tokenizer has 257 ids, the model only 67"):
        convert(target_source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_works_without_torch_and_says_nothing(folder):
    """A torch that cannot be found, as where only the package's own requirements are installed."""
    script = """
import importlib.machinery, sys
find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
from pathlib import Path
from ecospec_jax.tokenizer import Tokenizer
print(Tokenizer.load(Path(sys.argv[1])).encode_chat([{"role": "user", "content": "hi"}])[-3:], "torch" in sys.modules)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    command = [sys.executable, "-c", script, str(folder)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    ids = Tokenizer.load(folder).encode("<assistant>")[-3:]
    assert (done.stdout, done.stderr) == (f"{ids} False\n", "")
