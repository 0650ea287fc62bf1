"""The library's front door: load a converted model, generate and stream text with any method."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ecospec_jax.acceptance import ACCEPTANCE, Acceptance, read_acceptance
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.calibration import Calibration
from ecospec_jax.checkpoint import borrow, load_drafter, load_target, read_manifest
from ecospec_jax.config import DrafterConfig, ModelConfig, RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.cost import CostModel, byte_model
from ecospec_jax.decoding import StepPlan, Weights, examine
from ecospec_jax.errors import UserError
from ecospec_jax.generation import Answer, Batch, Generation, bucket, seeds_of
from ecospec_jax.methods import Method, get_method
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.models import with_random_weights
from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.predictor import Oracle, Predictor, Previous
from ecospec_jax.models.target import Target
from ecospec_jax.padding import pad_experts
from ecospec_jax.predictor_checkpoint import load_predictors
from ecospec_jax.profiling import StageProfiler
from ecospec_jax.program import Program
from ecospec_jax.sharding import Placement
from ecospec_jax.stepping import drafting_step, fixed_step
from ecospec_jax.tokenizer import Tokenizer

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
STEPS_PER_CALL = 32


@dataclass(frozen=True)
class GenerationResult:
    """Answers in the order of the prompts, and the figures of all batches together."""

    generations: tuple[Generation, ...]
    stats: DecodeStats

    @property
    def texts(self) -> list[str]:
        """The answers' texts."""
        return [generation.text for generation in self.generations]


def default_dtype() -> jnp.dtype:
    """The dtype models compute in unless asked otherwise: float32 on CPU, bfloat16 on accelerators."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class Decoder:
    """A target with its drafter and tokenizer, ready to generate."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer | None = None,
        predictors: Mapping[str, Predictor] | None = None,
        target_hash: str = "",
        drafter_hash: str = "",
        acceptance: Acceptance | None = None,
        cost: CostModel | None = None,
        placement: Placement | None = None,
        rigged_acceptance: float | None = None,
    ) -> None:
        """Wraps models that are already loaded; `Decoder.load` is the usual way in.

        Args:
            target: proposes nothing, decides everything.
            drafter: None allows plain decoding only.
            eos_ids: tokens that end an answer.
            tokenizer: None allows prompts of token ids only.
            predictors: expert predictors by name; `previous` and `oracle` need no training and are always there.
            target_hash: tells this target's weights from others (`Manifest.target_hash`); empty without a checkpoint.
            drafter_hash: the same of the drafter's.
            acceptance: fitted models of the drafter's acceptance, where calibrated methods begin.
            cost: what methods that weigh costs go by; bytes from the configurations if not given.
            placement: where the target is; None is one device.
            rigged_acceptance: see `with_random_weights`.
        """
        _enable_compilation_cache()
        self.target, self.drafter, self.tokenizer, self.eos_ids = target, drafter, tokenizer, eos_ids
        self.target_hash, self.drafter_hash = target_hash, drafter_hash
        self.acceptance, self.cost, self.placement = acceptance, cost, placement
        self.rigged_acceptance = rigged_acceptance
        self._target_split = nnx.split(target)
        self._drafter_split = (None, None) if drafter is None else nnx.split(drafter)
        available = {"previous": Previous(), "oracle": Oracle(), **(predictors or {})}
        self._predictor_configs = {name: getattr(one, "config", None) for name, one in available.items()}
        self._predictors = {name: nnx.split(predictor) for name, predictor in available.items()}
        self._programs: dict[tuple[StepPlan, int], Program] = {}
        self._profilers: dict[StepPlan, StageProfiler] = {}
        everywhere = None if placement is None else placement.everywhere  # so that every process can read it
        self._examine = jax.jit(partial(examine, self._target_split[0]), out_shardings=everywhere)

    @staticmethod
    def load(
        folder: str | Path,
        *,
        drafter: str | Path | None = None,
        predictor: str | Path | None = None,
        dtype: jnp.dtype | str | None = None,
        placement: Placement | None = None,
        cost: CostModel | None = None,
        pad_ffn: int = 0,
    ) -> "Decoder":
        """Loads what `python -m convert` wrote.

        Args:
            folder: holds `manifest.json`, the target, a drafter if one was converted, the tokenizer.
            drafter: another converted folder to take the drafter from.
            predictor: folder of trained expert predictors (`python -m experiments.train_predictor`).
            dtype: compute dtype of target and drafter; `default_dtype()` if not given.
            placement: devices and layout of the target; drafter and predictors are on each of the devices, but for what
                they borrow from the target. One device if not given.
            cost: see the constructor.
            pad_ffn: hidden units to add to every expert without changing its output, to time a model whose experts the
                cache does not hold (`padding.pad_experts`); on one device.

        Raises:
            UserError: the folder is incomplete or does not match its manifest, or the padding is impossible.
        """
        _check_padding(pad_ffn, placement)
        folder = Path(folder)
        manifest = read_manifest(folder)
        compute = default_dtype() if dtype is None else jnp.dtype(dtype)
        if placement is not None:
            placement = placement.for_model(manifest.target)
        small = None if placement is None else placement.replicated
        target = pad_experts(load_target(folder, manifest, compute, placement), pad_ffn)
        head_folder = folder if drafter is None else Path(drafter)
        head_manifest = manifest if drafter is None else read_manifest(head_folder)
        head = load_drafter(head_folder, head_manifest, compute, target, small)
        fitted = head_folder / ACCEPTANCE
        if drafter is not None and head is None:
            raise UserError(f"{drafter}: was converted without a drafter")
        return Decoder(
            target,
            head,
            eos_ids=manifest.eos_token_ids,
            tokenizer=Tokenizer.load(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None,
            predictors=None
            if predictor is None
            else load_predictors(
                Path(predictor),
                manifest.target_hash,
                compute,
                target,
                small,
                drafter_hash=head_manifest.drafter_hash,
            ),
            target_hash=manifest.target_hash,
            drafter_hash=head_manifest.drafter_hash,
            acceptance=read_acceptance(fitted, head_manifest.drafter_hash) if fitted.exists() else None,
            cost=cost,
            placement=placement,
        )

    @staticmethod
    def with_random_weights(
        target: ModelConfig,
        drafter: DrafterConfig,
        *,
        dtype: jnp.dtype | str | None = None,
        seed: int = 0,
        placement: Placement | None = None,
        pad_ffn: int = 0,
        acceptance: float | None = None,
    ) -> "Decoder":
        """Models of these shapes with random weights, to time them; prompts are token ids.

        Args:
            target: shape of the target.
            drafter: shape of the drafter, which borrows what it does not own.
            dtype: as in `load`.
            seed: of the weights.
            placement: as in `load`; each device makes its own shards.
            pad_ffn: as in `load`.
            acceptance: how often a verified node's likeliest child is accepted, whatever the target says; drafts of
                random weights are hardly ever right. Answers are then not the target's.

        Raises:
            UserError: the acceptance is no probability, the layout cannot serve, or the padding is impossible.
        """
        if acceptance is not None and not 0 <= acceptance <= 1:
            raise UserError(f"an acceptance is between 0 and 1, not {acceptance}")
        _check_padding(pad_ffn, placement)
        compute = default_dtype() if dtype is None else jnp.dtype(dtype)
        if placement is not None:
            placement = placement.for_model(target)
            target = placement.layout.fitted(target)
        model = pad_experts(with_random_weights(target, compute, seed, placement), pad_ffn, seed)
        head = with_random_weights(drafter, compute, seed + 1, placement and placement.replicated)
        borrow(head, drafter, model)
        return Decoder(model, head, eos_ids=(), placement=placement, rigged_acceptance=acceptance)

    @property
    def dtype(self) -> jnp.dtype:
        """What the target computes in."""
        return self.target.dtype

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        *,
        method: str | Method = "likelihood",
        spec: SpecConfig = SpecConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        seed: int | Sequence[int] = 0,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        batch_size: int = 1,
        capacity: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerationResult:
        """Answers every prompt.

        Args:
            prompts: each a user's message (the tokenizer's chat template is applied), a list of chat messages
                `{"role", "content"}`, or a list of token ids.
            method: `ar` for plain decoding, or a speculative method; see `ecospec_jax.methods`.
            spec: size of the trees.
            sampling: temperature 0 is greedy.
            seed: one seed, combined with each prompt's index; or one seed a prompt, used as it is.
            max_new_tokens: most tokens to generate for each prompt.
            stop: strings that end an answer; the text is cut before them. They are looked for every few steps, and the
                figures count the tokens that were decoded behind them.
            ignore_eos: go on after an end-of-sequence token.
            batch_size: prompts decoded together. The tokens do not depend on it.
            capacity: least number of cache slots; calls that ask for the same share one compilation.
            on_text: called with each piece of text as it is committed; for batch size 1.

        Raises:
            UserError: a prompt that is empty, too long or not in the vocabulary, or an impossible option.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            raise UserError("there are no prompts")
        if batch_size < 1:
            raise UserError(f"batch size must be at least 1, not {batch_size}")
        if on_text is not None and batch_size != 1:
            raise UserError("on_text needs batch size 1")
        encoded = [self.encode(prompt) for prompt in prompts]
        program, weights = self.program(method, spec, sampling, ignore_eos=ignore_eos, batch_size=batch_size)
        capacity = self._capacity(encoded, max_new_tokens, program.plan, capacity)
        seeds = seeds_of(seed, len(prompts))
        generations: list[Generation] = []
        stats: list[DecodeStats] = []
        for first in range(0, len(encoded), batch_size):
            part = slice(first, first + batch_size)
            batch = Batch(
                program,
                weights,
                encoded[part],
                seeds[part],
                max_new_tokens=max_new_tokens,
                capacity=capacity,
                batch_size=batch_size,
            )
            answers = [Answer(self.tokenizer, stop, program.plan.eos_ids) for _ in encoded[part]]
            if on_text is None:
                deque(batch.run(answers, STEPS_PER_CALL), maxlen=0)
            else:
                for piece in batch.stream(answers[0]):
                    on_text(piece)
            generations += [answer.result() for answer in answers]
            stats.append(batch.stats())
        return GenerationResult(tuple(generations), sum(stats[1:], start=stats[0]))

    def stream(
        self,
        prompt: Prompt,
        *,
        method: str | Method = "likelihood",
        spec: SpecConfig = SpecConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Yields the answer's text as it is committed; arguments as for `generate`."""
        if self.tokenizer is None:
            raise UserError("streaming text needs a tokenizer; this model was converted without one")
        encoded = [self.encode(prompt)]
        program, weights = self.program(method, spec, sampling, ignore_eos=ignore_eos)
        batch = Batch(
            program,
            weights,
            encoded,
            seeds_of(seed, 1),
            max_new_tokens=max_new_tokens,
            capacity=self._capacity(encoded, max_new_tokens, program.plan),
            batch_size=1,
        )
        yield from batch.stream(Answer(self.tokenizer, stop, program.plan.eos_ids))

    def stage_milliseconds(
        self,
        prompts: Sequence[Prompt],
        *,
        method: str | Method = "likelihood",
        spec: SpecConfig = SpecConfig(),
        sampling: SamplingConfig = SamplingConfig(),
        steps: int = 20,
    ) -> dict[str, float]:
        """Median milliseconds of each stage of a step, the prompts as one batch; see `profiling`."""
        program, weights, batch = self._staged_batch(prompts, method, spec, sampling, steps)
        if program.plan not in self._profilers:
            self._profilers[program.plan] = StageProfiler(program.plan)
        return self._profilers[program.plan].milliseconds(weights, batch.state, steps)

    def compiled_step(
        self,
        prompts: Sequence[Prompt],
        *,
        method: str | Method = "likelihood",
        spec: SpecConfig = SpecConfig(),
        sampling: SamplingConfig = SamplingConfig(),
    ) -> jax.stages.Compiled:
        """One step that drafts for a batch of prompts, as XLA has compiled it, for a look at its text and memory."""
        program, weights, batch = self._staged_batch(prompts, method, spec, sampling, steps=1)
        step = drafting_step if program.plan.adaptive else fixed_step
        return jax.jit(partial(step, program.plan)).lower(weights, batch.state).compile()

    def _staged_batch(
        self, prompts: Sequence[Prompt], method: str | Method, spec: SpecConfig, sampling: SamplingConfig, steps: int
    ) -> tuple[Program, Weights, Batch]:
        """A batch with room for these steps and one more."""
        encoded = [self.encode(prompt) for prompt in prompts]
        program, weights = self.program(method, spec, sampling, ignore_eos=True, batch_size=len(encoded))
        room = self.target.config.max_positions - max(len(ids) for ids in encoded)
        new_tokens = min(room, (steps + 1) * program.plan.spec.max_emitted + 1)
        batch = Batch(
            program,
            weights,
            encoded,
            seeds_of(0, len(encoded)),
            max_new_tokens=new_tokens,
            capacity=self._capacity(encoded, new_tokens, program.plan),
            batch_size=len(encoded),
        )
        return program, weights, batch

    def routing(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The experts the target chooses for every token of each sequence, `[T, L, K]` int32, best first."""
        ids_LBTK = np.asarray(self._examine_all(sequences)[1])
        return [ids_LBTK[:, row, : len(ids)].swapaxes(0, 1) for row, ids in enumerate(sequences)]

    def next_token_logits(self, ids: Sequence[int]) -> np.ndarray:
        """The target's logits behind a sequence, `[V]` float32."""
        return np.asarray(self._examine_all([ids])[0][0])

    def _examine_all(self, sequences: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
        self._check_batch(len(sequences))
        longest = bucket(max(len(ids) for ids in sequences))
        tokens_BT = np.zeros((len(sequences), longest), np.int32)
        for row, ids in zip(tokens_BT, sequences, strict=True):
            row[: len(ids)] = ids
        lengths_B = jnp.array([len(ids) for ids in sequences])
        return self._examine(self._target_split[1], jnp.asarray(tokens_BT), lengths_B)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) == 0:
            raise UserError("a prompt is empty")
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if messages:
            if self.tokenizer is None:
                raise UserError("a text prompt needs a tokenizer; this model was converted without one")
            ids = self.tokenizer.encode_chat(messages)
            if not ids:
                raise UserError("a prompt has no tokens")
        else:
            ids = [int(token) for token in prompt if not isinstance(token, Mapping)]
        vocabulary = self.target.config.vocab_size
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise UserError(f"token id {outside[0]} is not in the vocabulary of {vocabulary}")
        return ids

    def program(
        self,
        method: str | Method,
        spec: SpecConfig,
        sampling: SamplingConfig,
        *,
        ignore_eos: bool = False,
        batch_size: int = 1,
    ) -> tuple[Program, Weights]:
        """The compiled step of a method, kept for the next call, and the parameters it takes.

        What a method learns is kept with its program; `batch_size` tells such programs apart.
        """
        chosen = get_method(method)
        if chosen.drafts and self.drafter is None:
            raise UserError(f"method '{chosen.name}' needs a drafter; this model was converted without one")
        if chosen.drafts and self.drafter is not None and spec.branch > self.drafter.proposable:
            raise UserError(f"branch {spec.branch} is more than the {self.drafter.proposable} tokens of the drafter")
        if chosen.predictor is not None and chosen.predictor not in self._predictors:
            known = ", ".join(self._predictors)
            raise UserError(f"method '{chosen.name}' needs the predictor '{chosen.predictor}'; loaded: {known}")
        self._check_batch(batch_size)
        if not chosen.drafts:
            spec = SpecConfig(depth=1, branch=1, budget=0)
        target_def, target_state = self._target_split
        drafter_def, drafter_state = self._drafter_split if chosen.drafts else (None, None)
        predictor_def, predictor_state = self._predictors[chosen.predictor] if chosen.predictor else (None, None)
        eos_ids = () if ignore_eos else self.eos_ids
        plan = StepPlan(
            target_def,
            drafter_def,
            chosen.policy,
            spec,
            sampling,
            eos_ids,
            predictor_def,
            placement=self.placement,
            rigged_acceptance=self.rigged_acceptance,
        )
        if not chosen.learns:
            batch_size = 0
        else:
            cost = self.cost_model(chosen, spec)
            plan = replace(plan, cost=cost, calibrated=chosen.calibrated, adaptive=chosen.adaptive)
        if (plan, batch_size) not in self._programs:
            self._programs[plan, batch_size] = Program(plan, self._fresh(plan, batch_size) if chosen.learns else None)
        return self._programs[plan, batch_size], Weights(target_state, drafter_state, predictor_state)

    def _check_batch(self, size: int) -> None:
        if self.placement is not None:
            self.placement.spec(("batch",), (size,))

    def cost_model(self, method: str | Method, spec: SpecConfig) -> CostModel:
        """What methods that weigh costs go by: `cost` if it was given, else bytes from the configurations."""
        if self.cost is not None:
            return self.cost
        chosen = get_method(method)
        config = self._predictor_configs.get(chosen.predictor or "")
        drafter = getattr(self.drafter, "config", None) if chosen.drafts else None
        return byte_model(
            self.target.config,
            self.dtype.itemsize,
            drafter=drafter,
            predictor=config,
            depth=spec.depth,
            branch=spec.branch,
        )

    def _fresh(self, plan: StepPlan, batch_size: int) -> Adaptation:
        assert plan.cost is not None
        calibration = Calibration.trusting()
        if plan.calibrated and self.acceptance is not None:
            calibration = self.acceptance.at(plan.sampling.temperature)
        return Adaptation.fresh(plan.cost, RoutingShape.of(self.target.config), batch_size, calibration)

    def check_fits(self, prompt: Prompt, max_new_tokens: int, where: str) -> None:
        """Raises a `UserError` that begins with `where` if prompt and answer exceed the model's context."""
        length, context = len(self.encode(prompt)), self.target.config.max_positions
        if length + max_new_tokens > context:
            raise UserError(
                f"{where}: {length} prompt tokens and {max_new_tokens} new ones exceed the model's context of {context}"
            )

    def _capacity(self, encoded: list[list[int]], max_new_tokens: int, plan: StepPlan, asked: int = 0) -> int:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        for index, ids in enumerate(encoded):
            self.check_fits(ids, max_new_tokens, f"prompt {index}")
        longest = max(len(ids) for ids in encoded)
        least = max(longest + max_new_tokens + plan.scratch_slots(), bucket(longest))
        return bucket(max(least, asked))


def _check_padding(pad_ffn: int, placement: Placement | None) -> None:
    if pad_ffn and placement is not None:
        raise UserError("experts are padded on one device, not with a placement")


def _enable_compilation_cache() -> None:
    """Keeps compiled programs across runs, unless the user has chosen a place for them (or none) already."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "ecospec_jax" / "xla"))
