"""One batch of prompts on its way: device state, timing, and the answers' growing texts."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ecospec_jax.decoding import DecodeState, Weights
from ecospec_jax.errors import UserError
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.program import Program
from ecospec_jax.stopping import StopMatcher
from ecospec_jax.tokenizer import Tokenizer
from ecospec_jax.verification import sequence_keys

SMALLEST_BUCKET = 128  # shorter prompts are padded to it: fewer compilations, and a prefill this short costs little


def bucket(length: int) -> int:
    """The smallest power of two, at least `SMALLEST_BUCKET`, that holds `length`."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


@dataclass(frozen=True)
class Generation:
    """One generated answer.

    Attributes:
        tokens: generated token ids, an end-of-sequence token included.
        text: their text, without special tokens and cut before a stop string; empty without a tokenizer.
        finish: why it ended.
    """

    tokens: tuple[int, ...]
    text: str
    finish: Literal["eos", "stop", "length"]


class Answer:
    """Tokens of one prompt as they come, their text, and whether a stop string ended them."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], eos_ids: tuple[int, ...]) -> None:
        """Without a tokenizer there is no text and no stop string."""
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._matcher = StopMatcher(stop)
        self._eos_ids = eos_ids
        self._tokens: list[int] = []
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._matcher.stopped

    def feed(self, tokens: Sequence[int]) -> None:
        """Takes all tokens so far; the new ones extend the text. Tokens behind a stop string are dropped."""
        for token in tokens[len(self._tokens) :]:
            if self.stopped:
                return
            self._tokens.append(int(token))
            if self._decoder is not None:
                self.text += self._matcher.feed(self._decoder.push([int(token)]))

    def result(self) -> Generation:
        """The finished answer; nothing can be fed after it."""
        if self._decoder is not None:
            self.text += self._matcher.feed(self._decoder.close()) + self._matcher.flush()
            self._decoder = None  # what was held back is out; asked again, it must not come twice
        ended = bool(self._tokens) and self._tokens[-1] in self._eos_ids
        finish = "stop" if self.stopped else "eos" if ended else "length"
        return Generation(tuple(self._tokens), self.text, finish)


class Batch:
    """Prompts decoded together. Missing prompts are padded with dead sequences, so the shape stays compiled."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[tuple[int, int]],
        *,
        max_new_tokens: int,
        capacity: int,
        batch_size: int,
    ) -> None:
        """Prefills. Compilation happens before the clock starts.

        Args:
            program: what to run.
            weights: parameters of its models.
            prompts: token ids, at most `batch_size` of them.
            seeds: (seed, sequence index) of each prompt.
            max_new_tokens: most new tokens of each.
            capacity: cache slots.
            batch_size: sequences of the compiled step.
        """
        self._program, self._weights = program, weights
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        padding = batch_size - len(prompts)
        longest = bucket(max(self._prompt_lengths))
        tokens_BT = np.zeros((batch_size, longest), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=False):
            row[: len(prompt)] = prompt
        lengths = np.array([*self._prompt_lengths, *[1] * padding], np.int32)
        limits = np.array([*[n + max_new_tokens for n in self._prompt_lengths], *[0] * padding], np.int32)
        keys_B = sequence_keys(*(jnp.array([*part, *[0] * padding]) for part in zip(*seeds, strict=True)))
        arguments = (weights, jnp.array(tokens_BT), jnp.array(lengths), jnp.array(limits), keys_B)

        if program.is_new((batch_size, longest, capacity)):
            warm = program.prefill(*arguments, capacity=capacity, adaptation=program.adaptation)
            jax.block_until_ready(program.decode_steps(weights, warm, jnp.int32(0)))
        started = time.perf_counter()
        self.state: DecodeState = jax.block_until_ready(
            program.prefill(*arguments, capacity=capacity, adaptation=program.adaptation)
        )
        self._prefill_seconds = time.perf_counter() - started
        self._decode_seconds = 0.0
        self._refresh()

    def run(self, answers: Sequence[Answer], steps_per_call: int) -> Iterator[None]:
        """Decodes to the end, `steps_per_call` steps a device call; yields after each, the answers up to date."""
        self._feed(answers)
        yield
        while not self._finished.all():
            self._advance(steps_per_call)
            self._feed(answers)
            yield
        self._program.adaptation = self.state.adaptation

    def stream(self, answer: Answer) -> Iterator[str]:
        """Decodes a batch of one step by step; yields the answer's text as it is committed."""
        shown = 0
        for _ in self.run([answer], steps_per_call=1):
            if len(answer.text) > shown:
                yield answer.text[shown:]
                shown = len(answer.text)
        if tail := answer.result().text[shown:]:
            yield tail

    def stats(self) -> DecodeStats:
        """Figures so far."""
        cache = self.state.draft_cache
        return DecodeStats.create(
            self.state.counters,
            len(self._prompt_lengths),
            self._prefill_seconds,
            self._decode_seconds,
            None if cache is None else cache.experts_read,
        )

    def _advance(self, steps: int) -> None:
        started = time.perf_counter()
        self.state = self._program.decode_steps(self._weights, self.state, jnp.int32(steps))
        self._refresh()
        self._decode_seconds += time.perf_counter() - started

    def _feed(self, answers: Sequence[Answer]) -> None:
        """Gives each answer its tokens; sequences that a stop string ended take no further part."""
        for answer, tokens, prompt, length in zip(
            answers, self._tokens, self._prompt_lengths, self._lengths, strict=False
        ):
            answer.feed(tokens[prompt : length + 1])
        stopped = np.array([answer.stopped for answer in answers] + [True] * (len(self._finished) - len(answers)))
        if np.any(stopped & ~self._finished):
            self._finished = self._finished | stopped
            self.state = replace(self.state, finished_B=jnp.array(self._finished))

    def _refresh(self) -> None:
        state = self.state
        self._tokens, self._lengths, self._finished = jax.device_get(
            (state.tokens_BS, state.length_B, state.finished_B)
        )


def seeds_of(seed: int | Sequence[int], prompts: int) -> list[tuple[int, int]]:
    """(seed, sequence index) of each prompt: one seed for all, told apart by index, or a seed each."""
    if isinstance(seed, int | np.integer):
        seeds = [(int(seed), index) for index in range(prompts)]
    else:
        seeds = [(int(one), 0) for one in seed]
    if len(seeds) != prompts:
        raise UserError(f"{len(seeds)} seeds for {prompts} prompts")
    for one, _ in seeds:
        if not -(2**31) <= one < 2**31:
            raise UserError(f"seed {one} does not fit into 32 bits")
    return seeds
