"""The main job: decode prompts with several methods and compare speed, acceptance, experts and bytes.

python -m experiments.decode --target converted/tiny-qwen3-moe --prompts experiments/prompts/demo.jsonl
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecospec_jax import Decoder, Generation, SamplingConfig, UserError
from ecospec_jax.cost import CostModel, byte_model, read_cost
from ecospec_jax.distributed import is_first, require_same, run_as_one_of_several
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.methods import get_method
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.presets import drafter_for, get_preset
from ecospec_jax.sharding import Placement
from experiments.decode_report import Record, first_differences, same_tokens, write_report
from experiments.environment import environment, last_level_cache_bytes
from experiments.options import ClusterOptions, ModelOptions, TreeOptions
from experiments.prompts import Prompt, read_prompts

STAGED_PROMPTS = 3
GPU_MEMORY = "0.92"  # share that JAX takes at the start, unless the user says otherwise: its own 0.75 wastes a quarter
CACHE_MULTIPLE = 10  # from here on few of the experts that a step reads are in the cache


@dataclass(frozen=True)
class Settings(ModelOptions, TreeOptions, ClusterOptions):
    """Decode prompts with several methods and compare them."""

    prompts: Path | None = None
    """Prompt file, one JSON object a line: {"id", "turns": [..], "answer"?}."""
    text: str | None = None
    """Instead of a prompt file: one prompt."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    methods: str | None = None
    """Methods to compare, separated by commas; the first is the baseline of the speedup. Default: ar,likelihood, and
    with a predictor ecospec,rate,oracle."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 keeps all tokens."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    batch_size: int = 1
    """Prompts decoded together."""
    out: Path = Path("results/decode")
    """Folder for results.jsonl, the Markdown table and the plots."""
    stream: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the text as it is committed."""

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def method_names(self) -> list[str]:
        informed = ",ecospec,rate,oracle" if self.predictor is not None else ""
        methods = f"ar,likelihood{informed}" if self.methods is None else self.methods
        names = [name.strip() for name in methods.split(",") if name.strip()]
        if not names:
            raise UserError("--methods names no method")
        return [get_method(name).name for name in names]

    def json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def load_decoder(settings: ModelOptions) -> Decoder:
    decoder = _load_models(settings)
    if settings.cost is not None:
        decoder.cost = read_cost(settings.cost)
        layers = len(decoder.target.config.moe_layers)
        if decoder.cost.moe_layers != layers:
            raise UserError(f"{settings.cost}: of a model with {decoder.cost.moe_layers} MoE layers, not {layers}")
    return decoder


def _load_models(settings: ModelOptions) -> Decoder:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY)
    dtype = None if settings.dtype == "auto" else jnp.dtype(settings.dtype)
    if (settings.target is None) == (settings.random_weights is None):
        raise UserError("give either --target (a converted folder) or --random-weights (a published shape)")
    placement = None if settings.layout is None else Placement.create(settings.layout)
    if settings.target is not None:
        if settings.layers is not None:
            raise UserError("--layers goes with --random-weights")
        if settings.acceptance is not None:
            raise UserError("--acceptance goes with --random-weights")
        return Decoder.load(
            settings.target,
            drafter=settings.drafter,
            predictor=settings.predictor,
            dtype=dtype,
            placement=placement,
            pad_ffn=settings.pad_ffn,
        )
    config = get_preset(str(settings.random_weights), settings.layers)
    return Decoder.with_random_weights(
        config,
        drafter_for(config),
        dtype=dtype,
        seed=settings.seed,
        placement=placement,
        pad_ffn=settings.pad_ffn,
        acceptance=settings.acceptance,
    )


def expert_size(all_experts: float, cache: int | None) -> str:
    """How much memory all experts take, and how far that is from fitting into the cache."""
    size = f"experts: {all_experts / 1e9:.3g} GB"
    if cache is None:
        return size
    advice = f" (at least {CACHE_MULTIPLE} times is recommended)" if all_experts < CACHE_MULTIPLE * cache else ""
    return f"{size}, {all_experts / cache:.1f} times the last-level cache{advice}"


def load_prompts(settings: Settings) -> list[Prompt]:
    if (settings.prompts is None) == (settings.text is None):
        raise UserError("give either --prompts (a file) or --text (one prompt)")
    if settings.text is not None:
        if not settings.text.strip():
            raise UserError("--text is empty")
        return [Prompt(id="text", turns=(settings.text,))]
    assert settings.prompts is not None
    if settings.limit is not None and settings.limit < 1:
        raise UserError(f"--limit must be at least 1, not {settings.limit}")
    return read_prompts(settings.prompts, settings.limit)


@dataclass
class Conversation:
    """A prompt and one method's answers to its turns so far."""

    prompt: Prompt
    seed: int
    answers: list[Generation] = dataclasses.field(default_factory=list)

    def next_input(self, decoder: Decoder) -> Any:
        """What the decoder is asked next: all messages so far, or bytes where there is no tokenizer."""
        turns = self.prompt.turns
        if decoder.tokenizer is None:
            return list(turns[len(self.answers)].encode())
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(self.answers, turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]
        return messages


def converse(
    decoder: Decoder,
    settings: Settings,
    method: str,
    prompts: list[tuple[int, Prompt]],
    capacity: int,
    console: Console,
) -> tuple[list[Conversation], DecodeStats]:
    """Decodes all turns of a batch of prompts with one method."""
    conversations = [Conversation(prompt, settings.seed + index) for index, prompt in prompts]
    total: DecodeStats | None = None
    while going := [c for c in conversations if len(c.answers) < len(c.prompt.turns)]:
        if settings.stream:
            console.print(f"[bold]{method}[/bold] {', '.join(c.prompt.id for c in going)}")
        result = decoder.generate(
            [c.next_input(decoder) for c in going],
            method=method,
            spec=settings.spec,
            sampling=settings.sampling,
            seed=[c.seed for c in going],
            max_new_tokens=settings.max_new_tokens,
            stop=settings.stop,
            ignore_eos=settings.ignore_eos,
            batch_size=settings.batch_size,
            capacity=capacity,
            on_text=(lambda piece: console.print(piece, end="", markup=False, highlight=False))
            if settings.stream
            else None,
        )
        if settings.stream:
            console.print()
        for conversation, answer in zip(going, result.generations, strict=True):
            conversation.answers.append(answer)
        total = result.stats if total is None else total + result.stats
    assert total is not None
    return conversations, total


def whole_length(decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> int:
    """Most tokens that all turns and answers of a prompt can have: with this capacity each method compiles once."""
    answers = [Generation((), "", "length")] * (len(prompt.turns) - 1)
    asked = Conversation(prompt, 0, answers).next_input(decoder)
    return len(decoder.encode(asked)) + len(prompt.turns) * max_new_tokens


def measure(
    decoder: Decoder, settings: Settings, prompts: list[Prompt], bytes_read: CostModel, console: Console
) -> Iterator[Record]:
    """Decodes batch by batch, the methods in turn on each, so that a drifting machine hits them alike."""
    capacity = max(whole_length(decoder, prompt, settings.max_new_tokens) for prompt in prompts)
    for first in range(0, len(prompts), settings.batch_size):
        batch = list(enumerate(prompts))[first : first + settings.batch_size]
        for method in settings.method_names:
            conversations, stats = converse(decoder, settings, method, batch, capacity, console)
            for conversation in conversations:
                yield Record.create(method, conversation.prompt.id, first, conversation.answers, stats, bytes_read)


def on_tokens(decoder: Decoder, settings: Settings, prompts: list[Prompt], records: list[Record]) -> list[str]:
    """Whether all methods gave the same tokens, and how close it was where they did not."""
    if settings.acceptance is not None:
        return [f"acceptance rigged at {settings.acceptance:g}: tokens are not the target's, so they are not compared"]
    return same_tokens(settings.method_names, records) + near_ties(decoder, settings, prompts, records)


def near_ties(decoder: Decoder, settings: Settings, prompts: list[Prompt], records: list[Record]) -> list[str]:
    """For each difference of greedy tokens, how close the target's two best logits were where it began.

    In bf16 a verification of several rows may round differently from plain decoding; a gap of a few bf16 steps is such
    a near-tie, a larger one is an error.
    """
    if settings.temperature > 0:
        return []
    by_id = {prompt.id: prompt for prompt in prompts}
    lines = []
    for difference in first_differences(settings.method_names, records):
        record = next(r for r in records if (r.method, r.prompt) == (difference.method, difference.prompt))
        earlier = Conversation(by_id[record.prompt], 0, list(record.answers[: difference.turn]))
        ids = decoder.encode(earlier.next_input(decoder)) + list(record.tokens[difference.turn][: difference.place])
        best = np.sort(decoder.next_token_logits(ids))[-2:]
        lines.append(
            f"{difference.method}, {difference.prompt}: first difference at token {difference.place} of turn "
            f"{difference.turn}; gap of the two best logits {best[1] - best[0]:.4f} at {best[1]:.2f}"
        )
    return lines


def staged_milliseconds(
    decoder: Decoder, settings: Settings, prompts: list[Prompt]
) -> dict[str, list[dict[str, float]]]:
    """Stage times of each method on the first prompts."""
    inputs = [Conversation(prompt, settings.seed).next_input(decoder) for prompt in prompts[:STAGED_PROMPTS]]
    return {
        method: [
            decoder.stage_milliseconds(
                [prompt] * settings.batch_size, method=method, spec=settings.spec, sampling=settings.sampling
            )
            for prompt in inputs
        ]
        for method in settings.method_names
    }


def _digest(settings: Settings, prompts: list[Prompt]) -> str:
    """Tells inputs of processes apart."""
    alike = dataclasses.replace(settings, process_id=None, out=Settings.out)
    return hashlib.sha256(repr((alike, prompts)).encode()).hexdigest()


def open_results(out: Path) -> TextIO:
    if not is_first():
        return Path(os.devnull).open("w", encoding="utf-8")
    with reported_as_user_error(f"{out}: cannot be written", OSError):
        out.mkdir(parents=True, exist_ok=True)
        return (out / "results.jsonl").open("w", encoding="utf-8")


def run(settings: Settings) -> None:
    console = Console()
    if settings.stream and settings.batch_size != 1:
        raise UserError("--stream shows one prompt at a time: use it with --batch-size 1")
    if settings.batch_size < 1:
        raise UserError(f"batch size must be at least 1, not {settings.batch_size}")
    names, spec, sampling = settings.method_names, settings.spec, settings.sampling
    prompts = load_prompts(settings)
    if settings.distributed:
        require_same("options and prompts", _digest(settings, prompts))
    decoder = load_decoder(settings)
    for name in names:  # refuses what is missing before anything is written
        decoder.program(name, spec, sampling, ignore_eos=settings.ignore_eos)
    bytes_read = byte_model(decoder.target.config, decoder.dtype.itemsize)
    if settings.pad_ffn:
        all_experts = bytes_read.per_expert * bytes_read.moe_layers * decoder.target.num_experts
        console.print(expert_size(all_experts, last_level_cache_bytes()), highlight=False)
    for prompt in prompts:
        decoder.check_fits(Conversation(prompt, 0).next_input(decoder), settings.max_new_tokens, where=prompt.id)

    records = []
    common = {"settings": settings.json(), **environment()}
    with (
        open_results(settings.out) as results,
        Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=settings.stream,
        ) as progress,
    ):
        task = progress.add_task("decoding", total=len(prompts) * len(names))
        for record in measure(decoder, settings, prompts, bytes_read, console):
            results.write(json.dumps(record.json() | common) + "\n")
            results.flush()
            records.append(record)
            progress.update(task, advance=1, description=f"{record.method} {record.prompt}")
        progress.update(task, description="staged pass")
        stages = staged_milliseconds(decoder, settings, prompts)
    verdicts = on_tokens(decoder, settings, prompts, records)
    if is_first():
        write_report(settings.out, names, records, stages, verdicts, common, console)


def start(settings: Settings) -> None:
    """Runs here, or as one of several processes."""
    if settings.cluster is None:
        run(settings)
        return
    if settings.layout is None:
        raise UserError("--distributed needs --layout")
    run_as_one_of_several(lambda: run(settings), settings.cluster)


if __name__ == "__main__":
    run_command(lambda: start(tyro.cli(Settings, description=__doc__)))
