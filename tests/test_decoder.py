"""The front door: texts, streams, stop strings, batches, seeds, and every impossible option as one clear line."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, SamplingConfig, SpecConfig, UserError
from tests import tiny
from tests.tiny import ByteTokenizer, quick_compilation

__all__ = ["quick_compilation"]

SAMPLING = SamplingConfig(temperature=1.0)
PROMPT = [20, 3, 11, 8]
NEW_TOKENS = 40


@cache
def decoder() -> Decoder:
    """Its drafter is mostly right about the answer to `PROMPT`, so that texts come in leaps."""
    target, tokenizer = tiny.make_target(), ByteTokenizer()
    plain = Decoder(target, None, eos_ids=(), tokenizer=tokenizer)  # pyright: ignore[reportArgumentType]
    answer = plain.generate([PROMPT], method="ar", sampling=SAMPLING, max_new_tokens=NEW_TOKENS).generations[0]
    script = tiny.answers_script([PROMPT], [answer.tokens], right=0.9, first=0.8)
    drafter = nnx.clone(tiny.scripted_drafter(1))
    drafter.script_tokens.set_value(jnp.asarray(script.tokens, jnp.int32))
    drafter.script_log_probs.set_value(jnp.asarray(script.log_probs, jnp.float32))
    drafter.follows_script.set_value(jnp.asarray(True))
    return Decoder(target, drafter, eos_ids=(), tokenizer=tokenizer)  # pyright: ignore[reportArgumentType]


def generate(**options):
    options = {"method": "likelihood", "sampling": SAMPLING, "max_new_tokens": NEW_TOKENS} | options
    return decoder().generate(options.pop("prompts", [PROMPT]), **options)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_text_is_that_of_the_tokens_for_every_method() -> None:
    result, plain = generate(), generate(method="ar")
    assert result.generations == plain.generations
    (answer,) = result.generations
    assert len(answer.tokens) == NEW_TOKENS and answer.finish == "length"
    assert answer.text == ByteTokenizer().decode(answer.tokens) == result.texts[0]
    assert result.stats.tau > 2 and plain.stats.tau == 1
    assert any(ord(character) > 127 for character in answer.text)  # some characters span tokens


def pieces_of(**options) -> list[str]:
    options = {"method": "likelihood", "sampling": SAMPLING, "max_new_tokens": NEW_TOKENS} | options
    return list(decoder().stream(PROMPT, **options))


def test_stream_and_callback_give_the_same_text_in_leaps() -> None:
    pieces, shown = pieces_of(), []
    assert pieces == [piece for piece in pieces if piece]
    assert "".join(pieces) == generate().texts[0]
    result = generate(on_text=shown.append)
    assert shown == pieces and result.texts == ["".join(pieces)]
    assert len(pieces) < 0.6 * NEW_TOKENS
    assert len(pieces_of(method="ar")) > len(pieces)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_anywhere(length: int) -> None:
    """Every substring of the answer in turn: inside a token, across tokens, across steps, at the very end."""
    whole = generate().generations[0]
    for start in range(len(whole.text) - length + 1):
        stop = whole.text[start : start + length]
        if "\ufffd" in stop:
            continue
        (answer,) = generate(stop=("never", stop)).generations
        assert answer.text == whole.text[: whole.text.find(stop)]
        assert answer.finish == "stop"
        needed = next(n for n in range(1, NEW_TOKENS + 1) if stop in ByteTokenizer().decode(whole.tokens[:n]))
        assert answer.tokens == whole.tokens[:needed]
        assert "".join(pieces_of(stop=("never", stop))) == answer.text
        assert generate(stop=("never", stop), method="ar").generations == (answer,)


def test_what_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    whole = generate().texts[0]
    for stop in (whole[-1] + "#", whole[-3:] + "#"):
        assert generate(stop=[stop]).texts == [whole]
        assert "".join(pieces_of(stop=[stop])) == whole


def test_an_unfinished_character_at_the_end_is_shown_once() -> None:
    """Limits that cut a character in two: its bytes become one replacement character, streamed or not."""
    whole = generate().generations[0]
    halves = 0
    for limit in range(1, NEW_TOKENS):
        expected = ByteTokenizer().decode(whole.tokens[:limit])
        halves += expected.endswith("\ufffd")
        shown: list[str] = []
        assert generate(max_new_tokens=limit, on_text=shown.append).texts == [expected]
        assert "".join(shown) == expected == "".join(pieces_of(max_new_tokens=limit))
    assert halves >= 2


def test_eos_and_ignore_eos() -> None:
    whole = generate().generations[0].tokens
    eos = whole[10]
    ending = Decoder(tiny.make_target(), None, eos_ids=(eos,), tokenizer=ByteTokenizer())  # pyright: ignore[reportArgumentType]
    options = {"method": "ar", "sampling": SAMPLING, "max_new_tokens": NEW_TOKENS}
    (answer,) = ending.generate([PROMPT], **options).generations
    assert answer.tokens == whole[: whole.index(eos) + 1] and answer.finish == "eos"
    (answer,) = ending.generate([PROMPT], **options, ignore_eos=True).generations
    assert answer.tokens == whole and answer.finish == "length"


def test_prompts_as_text_messages_and_tokens() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "abba"}])
    expected = generate(prompts=[ids], method="ar").generations
    assert generate(prompts="abba", method="ar").generations == expected
    assert generate(prompts=["abba"], method="ar").generations == expected
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    assert generate(prompts=[messages], method="ar").generations == expected
    assert generate(prompts=[np.array(ids)], method="ar").generations == expected


# ---------------------------------------------------------------------------------------------------------------------
# Batches and seeds

MANY = [PROMPT, [5], [9, 1, 4, 4, 7, 0, 2], [13, 27]]


def test_answers_do_not_depend_on_the_batch_size() -> None:
    """Stop strings end sequences of a batch one by one; the last batch is padded."""
    one = generate(prompts=MANY, method="ar", stop=["no", "a"])
    assert len({answer.finish for answer in one.generations} | {len(answer.tokens) for answer in one.generations}) > 3
    for batch_size in (3, 4):
        several = generate(prompts=MANY, method="ar", stop=["no", "a"], batch_size=batch_size)
        assert several.generations == one.generations
        assert len(several.stats.emitted_histograms) == 4
    assert generate(prompts=MANY, method="ar", batch_size=3).stats.emitted == 4 * (NEW_TOKENS - 1)


def test_seeds() -> None:
    """One seed is told apart by index; a seed a prompt is used as it is."""
    twice = generate(prompts=[PROMPT, PROMPT], method="ar", seed=3).generations
    assert twice[0] != twice[1]
    assert generate(prompts=[PROMPT], method="ar", seed=3).generations == twice[:1]
    assert generate(prompts=[PROMPT], method="ar", seed=np.int64(3)).generations == twice[:1]
    assert generate(prompts=[PROMPT], method="ar", seed=4).generations != twice[:1]
    own = generate(prompts=[PROMPT, [5], PROMPT], method="ar", seed=np.array([3, 8, 3])).generations
    assert own[0] == own[2] == twice[0]


def test_greedy_ignores_the_seed() -> None:
    greedy = [generate(sampling=SamplingConfig(), method="ar", seed=seed).generations for seed in (0, 1)]
    assert greedy[0] == greedy[1]


def test_a_prompt_may_fill_the_context() -> None:
    """Prompt and new tokens together."""
    context = tiny.TARGET.max_positions
    long = tiny.prompt(context - 1, seed=0)
    (answer,) = generate(prompts=[long], max_new_tokens=1, method="ar").generations
    assert len(answer.tokens) == 1


def test_the_capacity_asked_for_is_a_least_size() -> None:
    expected = generate().generations
    assert generate(capacity=1).generations == generate(capacity=200).generations == expected


# ---------------------------------------------------------------------------------------------------------------------
# Bad input

VOCAB, CONTEXT = tiny.TARGET.vocab_size, tiny.TARGET.max_positions
BAD = {
    "unknown method": ({"method": "magic"}, "unknown method 'magic'; known: ar, likelihood"),
    "no prompts": ({"prompts": []}, "no prompts"),
    "empty prompt": ({"prompts": [PROMPT, []]}, "a prompt is empty"),
    "token too large": ({"prompts": [[1, VOCAB]]}, f"token id {VOCAB} is not in the vocabulary of {VOCAB}"),
    "token below 0": ({"prompts": [[-1]]}, "token id -1 is not in the vocabulary"),
    "prompt too long": (
        {"prompts": [PROMPT, [1] * (CONTEXT - NEW_TOKENS + 1)]},
        f"prompt 1: {CONTEXT - NEW_TOKENS + 1} prompt tokens and {NEW_TOKENS} new ones exceed .* context of {CONTEXT}",
    ),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
    "batch size 0": ({"batch_size": 0}, "batch size must be at least 1, not 0"),
    "more children than tokens": ({"spec": SpecConfig(branch=18)}, "branch 18 is more than the 17 tokens"),
    "text from a batch": ({"on_text": print, "batch_size": 2}, "on_text needs batch size 1"),
    "seed too large": ({"seed": 2**31}, "seed 2147483648 does not fit into 32 bits"),
    "too few seeds": ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(UserError, match=message) as caught:
        generate(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingConfig(temperature=-0.1), "temperature must not be negative, not -0.1"),
        (lambda: SamplingConfig(temperature=float("nan")), "temperature"),
        (lambda: SamplingConfig(top_k=-1), "top_k must not be negative, not -1"),
        (lambda: SamplingConfig(top_p=0.0), r"top_p must be in \(0, 1\], not 0.0"),
        (lambda: SamplingConfig(top_p=1.1), r"top_p must be in \(0, 1\], not 1.1"),
        (lambda: SpecConfig(depth=0), "depth must be at least 1, not 0"),
        (lambda: SpecConfig(branch=0), "branch must be at least 1, not 0"),
        (lambda: SpecConfig(budget=-1), "budget must be in 0..10 for depth 3 and branch 2, not -1"),
        (lambda: SpecConfig(budget=11), "budget must be in 0..10 for depth 3 and branch 2, not 11"),
        (lambda: SpecConfig(depth=1, branch=3, budget=4), "budget must be in 0..3 for depth 1 and branch 3, not 4"),
    ],
)
def test_impossible_options(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_a_tokenizer_of_another_vocabulary_is_noticed() -> None:
    wide = ByteTokenizer(VOCAB + 40)
    mixed = Decoder(tiny.make_target(), None, eos_ids=(), tokenizer=wide)  # pyright: ignore[reportArgumentType]
    wide.encode_chat = lambda messages: [1, VOCAB + 5]
    with pytest.raises(UserError, match=f"token id {VOCAB + 5} is not in the vocabulary of {VOCAB}"):
        mixed.generate("text", method="ar")


def test_what_is_missing_is_named() -> None:
    bare = Decoder(tiny.make_target(), None, eos_ids=())
    with pytest.raises(UserError, match="method 'likelihood' needs a drafter"):
        bare.generate([PROMPT], method="likelihood")
    with pytest.raises(UserError, match="a text prompt needs a tokenizer"):
        bare.generate(["text"], method="ar")
    with pytest.raises(UserError, match="streaming text needs a tokenizer"):
        list(bare.stream(PROMPT, method="ar"))
    assert bare.generate([PROMPT], method="ar", max_new_tokens=3).texts == [""]
