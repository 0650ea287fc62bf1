"""A replay does what live decoding does, step by step; recordings; the command and what it refuses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, SamplingConfig, SpecConfig
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.cost import CostModel, byte_model
from ecospec_jax.errors import UserError
from ecospec_jax.generation import Answer, Batch
from ecospec_jax.methods import get_method
from ecospec_jax.models.predictor import Predictor, Previous
from ecospec_jax.presets import get_preset
from ecospec_jax.tree import Selection
from experiments import recording, replay, replay_contenders
from experiments.intervals import difference_interval, ratio_interval
from experiments.recording import Recorder, Recording, header_of, read_recordings, write_recording
from experiments.replay_costs import OWN, cost_model, full_target
from experiments.replay_walk import Steps, make_plan, make_tape, walk
from tests.complaints import complaint
from tests.tiny import CAPACITY, PROMPTS, SCRIPT_WIDTH, quick_compilation, scripted_drafter
from tests.tiny_predictors import (
    ROUTING,
    TARGET,
    make_backbone,
    make_table,
    make_target,
    random_ids,
    write_converted,
)

__all__ = ["quick_compilation"]
SPEC = SpecConfig(budget=4)
NEW = 25  # tokens of an answer: the longest prompt and answer fill `tiny.BUCKET` and more
COST = CostModel(fixed=1e6, per_expert=5e4, moe_layers=ROUTING.layers, per_row=2e4, draft=2e5)
TEMPERATURES = (0.0, 1.0)
ASKED = [("a", PROMPTS[0], 3), ("b", PROMPTS[1], 4), ("c", PROMPTS[2], 5)]


@dataclass
class World:
    decoder: Decoder
    predictors: dict[str, Predictor]
    recordings: dict[float, Recording]


def script(decoder: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """Proposes, often, the first prompt's greedy answer first and its sampled one second."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, TARGET.vocab_size, (1, CAPACITY, SCRIPT_WIDTH))
    for rank, temperature in enumerate(TEMPERATURES):
        answer = decoder.generate(
            [PROMPTS[0]], method="ar", sampling=SamplingConfig(temperature), seed=[ASKED[0][2]], max_new_tokens=NEW
        ).generations[0]
        for index, token in enumerate(answer.tokens):
            if random.random() < 0.8:
                tokens[0, len(PROMPTS[0]) + index, rank] = token
    log_probs = np.sort(random.choice([-0.25, -0.5, -0.75, -1.0, -1.5], tokens.shape))[..., ::-1]
    return tokens, log_probs


def record(decoder: Decoder, predictors: dict[str, Predictor], temperature: float) -> Recording:
    header = header_of(
        decoder,
        predictors,
        temperature=temperature,
        spec=SPEC,
        max_new_tokens=NEW,
        seed=3,
    )
    return Recorder(decoder, predictors, header, max(map(len, PROMPTS))).record(ASKED)


@pytest.fixture(scope="module")
def world() -> World:
    predictors: dict[str, Predictor] = {
        "previous": Previous(),
        "token_table": make_table(random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, 3)),
        "backbone": make_backbone(),
    }
    drafter = nnx.clone(scripted_drafter(1))
    decoder = Decoder(make_target(), drafter, eos_ids=(), target_hash="target")
    tokens, log_probs = script(decoder)
    drafter.script_tokens.set_value(jnp.asarray(tokens, jnp.int32))
    drafter.script_log_probs.set_value(jnp.asarray(log_probs, jnp.float32))
    drafter.follows_script.set_value(jnp.asarray(True))
    # The end of one answer is in the middle of another.
    end = decoder.generate([PROMPTS[1]], method="ar", seed=[4], max_new_tokens=NEW).generations[0].tokens[13]
    decoder = Decoder(make_target(), drafter, eos_ids=(end,), predictors=predictors, target_hash="target", cost=COST)
    return World(decoder, predictors, {t: record(decoder, predictors, t) for t in TEMPERATURES})


Step = tuple[list[tuple[frozenset[int], int]], bool]  # (nodes, emitted tokens) of each sequence, whether it drafted


def live(decoder: Decoder, name: str, temperature: float, size: int) -> tuple[list[list[Step]], Adaptation | None]:
    """The steps of each batch of `size` prompts, and what was learned."""
    method, said = get_method(name), []

    def spy(*arguments: Any) -> Selection:
        selection = method.policy(*arguments)
        jax.debug.callback(lambda nodes, count: said.append((nodes, count)), *vars(selection).values())
        return selection

    sampling = SamplingConfig(temperature)
    program, weights = decoder.program(replace(method, policy=spy), SPEC, sampling, batch_size=size)
    all_steps = []
    for first in range(0, len(ASKED), size):
        _, prompts, seeds = zip(*ASKED[first : first + size], strict=True)
        steps, options = [], {"max_new_tokens": NEW, "capacity": 2 * CAPACITY, "batch_size": size}
        batch = Batch(program, weights, prompts, [(seed, 0) for seed in seeds], **options)
        length_B = np.asarray(batch.state.length_B)
        for _ in batch.run([Answer(None, (), decoder.eos_ids) for _ in prompts], steps_per_call=1):
            jax.effects_barrier()
            emitted_B, length_B = np.asarray(batch.state.length_B) - length_B, np.asarray(batch.state.length_B)
            nodes_BM, count_B = said[0] if said else (np.zeros((size, 0), int), np.zeros(size, int))
            chosen = [nodes[:count].tolist() for nodes, count in zip(nodes_BM, count_B, strict=True)]
            each = [(frozenset(own if n else ()), int(n)) for own, n in zip(chosen, emitted_B, strict=True)]
            if emitted_B.any():
                steps.append((each, bool(said)))
            said.clear()
        all_steps.append(steps)
    return all_steps, program.adaptation


def replayed(steps: Steps) -> list[list[Step]]:
    host = jax.device_get(steps)
    return [
        [
            (
                [(frozenset(np.flatnonzero(own).tolist()), int(n)) for own, n in zip(nodes, emitted, strict=True)],
                bool(drafted),
            )
            for nodes, emitted, drafted in zip(
                host.chosen_GTBN[g], host.emitted_GTB[g], host.drafted_GT[g], strict=True
            )
            if emitted.any()
        ]
        for g in range(len(host.emitted_GTB))
    ]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("name", "size"),
    [("likelihood", 1), ("ecospec-table", 1), ("rate-table", 1), ("ecospec-table", 2), ("rate-table", 2)],
)
def test_replay_is_live_decoding(world: World, name: str, size: int, temperature: float) -> None:
    """Same nodes, counts and tokens in every step, and the same is learned; what is learned passes between batches."""
    made, method = world.recordings[temperature], get_method(name)
    expected, expected_learned = live(world.decoder, name, temperature, size)
    plan = make_plan(made, method, SPEC, COST)
    groups_GB = replay.batches(np.arange(len(ASKED)), size)
    steps, learned = walk(made, plan, make_tape(made, method.predictor, groups_GB))
    assert replayed(steps) == expected
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3), learned, expected_learned)
    for index, (start, stop) in enumerate(zip(made.starts, made.starts[1:], strict=False)):
        batch, place = divmod(index, size)
        emitted = sum(each[place][1] for each, _ in expected[batch])
        assert emitted == stop - start
        answer = np.asarray(steps.tokens_GBT)[batch, place, : emitted - 1]
        assert answer.tolist() == made.roots[start + 1 : stop].tolist()
    seen = [one for steps in expected for one in steps]
    assert max(count for each, _ in seen for _, count in each) >= 2
    if name == "rate-table" and temperature == 0:  # the test is worth little if everything is alike
        assert len({len(nodes) for each, _ in seen for nodes, _ in each}) >= 3
        assert size > 1 or {drafted for _, drafted in seen} == {False, True}


@pytest.mark.parametrize("size", [1, 2])
def test_costs_of_plain_decoding(world: World, size: int) -> None:
    """Those of the steps of fixed trees without nodes; prompts of a batch share the experts of their roots."""
    made, walks = world.recordings[0.0], replay.Replay(world.recordings[0.0], size)
    cost = replace(COST, per_row=3e4)
    asked = replay.Settings(recording=(), budgets=(0, 1))
    plain = next(one for one in replay.line_up(asked, made) if one.setting == "budget 0")
    outcome = walks.outcome(plain, replace(cost, draft=0))
    np.testing.assert_allclose(outcome.costs, walks.plain_costs(cost)[walks.train :])
    assert outcome.speed.middle == pytest.approx(1) and (outcome.nodes, outcome.tau) == (0, 1)

    by_hand = []
    for group in [[0, 2], [1]] if size == 2 else [[0], [2], [1]]:
        answers = [made.experts[slice(*made.starts[prompt : prompt + 2]), 0] for prompt in group]
        total = 0.0
        for at in range(max(map(len, answers))):
            rows = [answer[at] for answer in answers if at < len(answer)]
            pairs = sum(int(word).bit_count() for word in np.bitwise_or.reduce(rows).ravel())
            total += cost.fixed + cost.per_expert * pairs + cost.per_row * len(rows)
        by_hand.append(total)
    np.testing.assert_allclose(walks.plain_costs(cost), by_hand)


@pytest.mark.parametrize("family", ["likelihood", "ecospec"])
def test_settings_as_data_choose_what_the_library_chooses(world: World, family: str) -> None:
    """All budgets and eps share one compilation with the largest budget's slots."""
    made, walks = world.recordings[1.0], replay.Replay(world.recordings[1.0])
    asked = replay.Settings(recording=(), budgets=(1, 3), eps=(0.5, 4.0) if family == "ecospec" else (1.0,))
    found = [one for one in replay.line_up(asked, made) if one.family == family]
    assert len(found) == len(asked.budgets) * len(asked.eps)
    chosen = set()
    for one in found:
        spec = replace(one.spec, budget=one.knobs.budget, eps=one.knobs.eps)
        plan = make_plan(made, one.method, spec, None)
        steps, _ = walk(made, plan, make_tape(made, one.bits, walks.order_GB))
        mine = walks.steps(one, COST)
        for name in ("emitted_GTB", "chosen_GTBN", "pairs_GT", "tokens_GBT"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(steps, name))
        chosen.add(mine.chosen_GTBN.tobytes())
    assert len(chosen) >= len(asked.budgets)


def test_a_record_is_the_targets_own_text(world: World) -> None:
    """Roots are the plain answer; the root's draw is the next root; routing is what the target does."""
    made = world.recordings[0.0]
    for index, (_, ids, seed) in enumerate(ASKED):
        answer = world.decoder.generate([ids], method="ar", seed=[seed], max_new_tokens=NEW).generations[0]
        start, stop = made.starts[index : index + 2]
        assert [*made.roots[start:stop].tolist(), int(made.drawn[stop - 1, 0])] == list(answer.tokens)
        assert made.drawn[start : stop - 1, 0].tolist() == made.roots[start + 1 : stop].tolist()
        routed = world.decoder.routing([[*ids, *answer.tokens]])[0]
        for position in range(start, stop):
            at = len(ids) + position - start
            for layer in range(ROUTING.layers):
                words = made.experts[position, 0, layer]
                assert {e for e in range(TARGET.num_experts) if words[e // 32] >> (e % 32) & 1} == set(
                    routed[at, layer].tolist()
                )
    assert made.header.eos_ids[0] == made.drawn[made.starts[2] - 1, 0], "the second answer ends early"
    assert (made.forecasts["previous"][made.starts[0], 0] == made.previous[0]).all()
    assert (made.forecasts["previous"][1:5, 3] == made.experts[0:4, 0]).all()


def test_recordings_are_read_as_written_and_joined(world: World, tmp_path: Path) -> None:
    made = world.recordings[0.0]
    other = replace(made, header=replace(made.header, prompts=("d", "e", "f")))
    for name, one in (("one", made), ("other", other)):
        write_recording(tmp_path / name, one)
    joined = read_recordings([tmp_path / "one", tmp_path / "other"])
    assert joined.header.prompts == ("a", "b", "c", "d", "e", "f")
    twice = np.concatenate([np.diff(made.starts), np.diff(made.starts)])
    assert np.diff(joined.starts).tolist() == twice.tolist()
    for name in ("roots", "tokens", "log_probs", "drawn", "experts"):
        assert (getattr(joined, name) == np.concatenate([getattr(made, name)] * 2)).all()
    assert (joined.forecasts["backbone"][len(made.roots) :] == made.forecasts["backbone"]).all()

    with pytest.raises(UserError, match="prompt 'a' is in two"):
        read_recordings([tmp_path / "one", tmp_path / "one"])
    write_recording(tmp_path / "sampled", world.recordings[1.0])
    with pytest.raises(UserError, match="sampled: differs from .*one in temperature"):
        read_recordings([tmp_path / "one", tmp_path / "sampled"])
    (tmp_path / "cut").write_bytes((tmp_path / "one").read_bytes()[:-200])
    for broken in ("cut", "absent"):
        with pytest.raises(UserError, match=f"{broken}: is no recording"):
            read_recordings([tmp_path / broken])


def test_costs_keep_the_ratio_of_the_full_target(world: World) -> None:
    header = world.recordings[0.0].header
    for name in ("qwen3-235b-a22b", "gpt-oss-120b"):
        full, cost = full_target(name, header.depth), cost_model(header, name, "oracle", "free")
        token = cost.step(ROUTING.k) - cost.fixed
        assert token / cost.fixed == pytest.approx(full.per_expert * full.layers * full.k / full.fixed)
        assert cost.draft == cost.predict == 0
    qwen = byte_model(get_preset("qwen3-235b-a22b"), 2.0)
    assert cost_model(header, "qwen3-235b-a22b", None, "free").step(ROUTING.k) == pytest.approx(qwen.step(8))
    assert 2e9 < cost_model(header, "qwen3-235b-a22b", None, "eagle3").draft < 5e9
    own = cost_model(header, OWN, "backbone", "eagle3")
    assert own.predict > 0 and own.draft > 0 and cost_model(header, OWN, "oracle", "eagle3").predict == 0
    with pytest.raises(UserError, match="drafter for gpt-oss-120b is not known"):
        cost_model(header, "gpt-oss-120b", None, "eagle3")


def test_ratio_intervals() -> None:
    random = np.random.default_rng(0)
    tops = random.uniform(1, 3, 200)
    bottoms, others = tops / random.uniform(1.2, 1.4, 200), tops / random.uniform(1.0, 1.2, 200)
    ratio = ratio_interval(tops.tolist(), bottoms.tolist())
    assert ratio.middle == pytest.approx(tops.sum() / bottoms.sum())
    assert 1.27 < ratio.low < ratio.middle < ratio.high < 1.33
    difference = difference_interval(tops.tolist(), bottoms.tolist(), others.tolist())
    assert difference.middle == pytest.approx(tops.sum() / bottoms.sum() - tops.sum() / others.sum())
    assert 0.18 < difference.low < difference.high < 0.23
    same = difference_interval(tops.tolist(), bottoms.tolist(), bottoms.tolist())
    assert (same.low, same.middle, same.high) == (0, 0, 0)


@pytest.fixture
def settings(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> replay.Settings:
    monkeypatch.setattr(replay_contenders, "SHARES", (0.5,))
    write_recording(tmp_path / "made.npz", world.recordings[0.0])
    options = {"budgets": (1, 4), "eps": (1.0,), "out": tmp_path / "out"}
    return replay.Settings(recording=(tmp_path / "made.npz",), costs=("qwen3-235b-a22b",), draft="free", **options)


def test_the_command_writes_everything(settings: replay.Settings) -> None:
    replay.run(settings)
    rows = [json.loads(line) for line in (settings.out / "replay.jsonl").read_text().splitlines()]
    assert {row["family"] for row in rows} == {
        "likelihood",
        "ecospec",
        "ecospec-calibrated",
        "size by C",
        "clairvoyant",
        *(f"rate {name}" for name in ("previous", "token_table", "backbone", "oracle")),
    }
    by_setting = {(row["family"], row["setting"]): row for row in rows}
    assert [by_setting["likelihood", f"budget {budget}"]["nodes"] for budget in (1, 4)] == [1, 4]
    assert all(1 <= row["tau"] <= 4 and row["speed"]["low"] <= row["speed"]["high"] for row in rows)
    best = max(row["speed"]["middle"] for row in rows)
    assert by_setting["clairvoyant", ""]["speed"]["middle"] == best
    table = (settings.out / "replay.md").read_text()
    assert "| likelihood, budget 4 |" in table and "| rate oracle | oracle |" in table
    assert (settings.out / "replay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": ("gpt-9",)}, "unknown cost model 'gpt-9'; known: own, qwen3-30b-a3b"),
        ({"costs": ()}, "need at least one value"),
        ({"budgets": (0,)}, "--budgets names no budget above 0"),
        ({"budgets": (11,)}, "budget must be in 0..10"),
        ({"eps": (0.0,)}, "eps must be positive"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"buffer": "magic"}, "unknown expert buffer 'magic'"),
        ({"baseline": "magic"}, "unknown baseline 'magic'; known: clairvoyant"),
        ({"costs": ("deepseek-v3.1",), "draft": "eagle3"}, "use --draft free"),
        ({"recording": (Path("absent.npz"),)}, "absent.npz: is no recording"),
        ({"recording": ()}, "there are no recordings"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(
    settings: replay.Settings, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert message in complaint(lambda: replay.run(replace(settings, **changes)), capsys)
    assert not settings.out.exists()


def test_recording_command_continues_and_refuses_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, _ = write_converted(tmp_path / "target")
    prompts = [{"id": name, "turns": [name]} for name in ("abc", "hello", "no")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    asked = recording.Settings(
        target, tmp_path / "prompts.jsonl", tmp_path / "out", shard_prompts=2, max_new_tokens=6, depth=2
    )
    recording.run(asked)
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["recording-0000.npz", "recording-0001.npz"]
    whole = read_recordings(files)
    assert whole.header.prompts == ("abc", "hello", "no") and whole.tokens.shape[1] == 6
    before = files[0].stat().st_mtime_ns
    files[1].unlink()
    recording.run(asked)
    assert files[0].stat().st_mtime_ns == before
    again = read_recordings(files)
    assert (again.drawn == whole.drawn).all() and again.header == whole.header
    line = complaint(lambda: recording.run(replace(asked, depth=1)), capsys)
    assert "recording-0000.npz: recorded with other models, prompts, settings" in line
    assert "exceed the model's context" in complaint(lambda: recording.run(replace(asked, max_new_tokens=95)), capsys)
