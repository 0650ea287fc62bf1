import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert import convert
from ecospec_jax import Decoder, UserError
from ecospec_jax.config import FINAL, Eagle3Config
from experiments import calibrate_drafter
from experiments.calibrate_drafter import Agreement, Settings, hits_of, measure, verdict
from tests import tiny
from tests.conftest import CHECKPOINT
from tests.parity.compare import causal_rows

__all__ = ["quick_compilation"]
quick_compilation = tiny.quick_compilation
PROMPTS = Path(__file__).parents[2] / "experiments" / "prompts" / "demo.jsonl"


def make_decoder(config: Eagle3Config) -> Decoder:
    return Decoder(tiny.make_target(), tiny.make_drafter(config), eos_ids=())


@pytest.mark.parametrize(("aux_offset", "advice"), [("auto", "as converted"), (0, "--aux-offset one higher")])
def test_names_the_boundaries_of_the_bundled_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], aux_offset, advice: str
) -> None:
    """They are 1, 2, 3 (docs/formats.md C.2) however it was converted."""
    folder = tmp_path / "converted"
    convert(CHECKPOINT / "target", folder, drafter=CHECKPOINT / "drafter", aux_offset=aux_offset)
    calibrate_drafter.run(Settings(target=folder, prompts=PROMPTS))
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("right: 1 2 3, ") and advice in last
    shares = {line.split("|")[1].strip(): line.split("|")[3] for line in table if " of " in line}
    assert shares.keys() == ({"0 1 2", "1 2 3", "2 3 4"} if aux_offset == "auto" else {"0 1 2", "1 2 3"})
    assert "0.509 [" in shares["1 2 3"]


def test_a_hit_is_the_choice_behind_the_token_of_the_entry() -> None:
    """Entry t has the states of position t and token t + 1; its proposal is judged by the choice after t + 2 tokens."""
    config = dataclasses.replace(tiny.DRAFTER, boundaries=(1,))
    target, drafter = tiny.make_target(), tiny.make_drafter(config)
    (target_def, target_state), (drafter_def, drafter_state) = nnx.split(target), nnx.split(drafter)
    choices, ids, padded = ((0,), (1,), (2,)), tiny.prompt(24, seed=1), 32
    tokens_BT = jnp.asarray([[*ids, *[0] * (padded - len(ids))]])
    found_CBT = hits_of(target_def, drafter_def, choices, target_state, drafter_state, tokens_BT, jnp.array([len(ids)]))
    expected = np.zeros((len(choices), 1, padded), bool)
    output, _ = nnx.jit(lambda target, *rest: target(*rest, (0, 1, 2)))(
        target, causal_rows([ids]), target.empty_cache(1, len(ids))
    )
    chosen_T = np.argmax(target.logits(output.hidden_BRD)[0], axis=-1)
    entries, cache = causal_rows([ids[1:]]), drafter.empty_cache(1, len(ids) - 1)
    catch_up = nnx.jit(lambda drafter, *rest: drafter.catch_up(*rest))
    for index, features_BRF in enumerate(jnp.split(output.features_BRF, 3, axis=-1)):
        states_BRH, _ = catch_up(drafter, entries, features_BRF[:, :-1], cache)
        proposed_R = drafter.propose(states_BRH[0], 1)[0][:, 0]
        for entry, proposed in enumerate(proposed_R.tolist()):
            expected[index, 0, entry] = proposed == chosen_T[entry + 1]
    np.testing.assert_array_equal(found_CBT, expected)
    assert 0 < expected.sum() < expected[..., : len(ids) - 1].size


def test_every_piece_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_drafter, "FEWEST_TOKENS", 1)
    decoder = make_decoder(dataclasses.replace(tiny.DRAFTER, boundaries=(1,)))
    texts = [tiny.prompt(length, seed=length) for length in (calibrate_drafter.PIECE + 5, 1, 9)]
    agreements, made_P = measure(decoder, texts)
    assert made_P.tolist() == [calibrate_drafter.PIECE - 1, 4, 8]
    assert [one.boundaries for one in agreements] == [(0,), (1,), (2,)]
    assert all((one.hits <= made_P).all() for one in agreements)


def test_verdict_needs_a_clear_lead() -> None:
    made, low = np.full(8, 100), Agreement((0, 2), np.full(8, 30))
    ahead = Agreement((1, 3), np.array([35, 36, 34, 33, 37, 35, 36, 34]))
    level = Agreement((1, 3), np.array([45, 20, 44, 19, 46, 21, 45, 10]))
    assert verdict([low, ahead], made, (0, 2)).startswith(
        "right: 1 3, convert the drafter again with the --aux-offset one"
    )
    assert verdict([low, ahead], made, (1, 3)).startswith("right: 1 3, as converted; 0.050 [0.0")
    assert verdict([low, level], made, (1, 3)).startswith("undecided: 1 3 is only 0.013 [-0.")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "give either --prompts or --text"),
        ({"prompts": PROMPTS, "text": PROMPTS}, "give either --prompts or --text"),
        ({"prompts": PROMPTS, "limit": 0}, "--limit must be at least 1, not 0"),
        ({"prompts": PROMPTS, "limit": 2}, "tokens to compare are too few; give a text of 1000 or more"),
        ({"text": Path("absent.txt")}, "absent.txt: cannot be read: .*No such file"),
    ],
)
def test_bad_options_are_refused(converted_tiny: Path, options, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        calibrate_drafter.run(Settings(target=converted_tiny, **options))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"boundaries": (FINAL,), "fc": False}, "the drafter reads the last hidden state, which has no neighbours"),
        ({"boundaries": (0, 1, 2)}, "boundaries 0 1 2 of 2 layers have no neighbours to compare with"),
        (None, "converted: was converted without a drafter"),
    ],
)
def test_drafters_without_another_reading(monkeypatch: pytest.MonkeyPatch, changes, complaint: str) -> None:
    target = tiny.make_target()
    drafter = None if changes is None else tiny.make_drafter(dataclasses.replace(tiny.DRAFTER, **changes))
    decoder = Decoder(target, drafter, eos_ids=(), tokenizer=tiny.ByteTokenizer())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(Decoder, "load", lambda folder, drafter: decoder)
    monkeypatch.setattr(calibrate_drafter, "read_texts", lambda settings, decoder: [tiny.prompt(50, seed=2)])
    with pytest.raises(UserError, match=complaint):
        calibrate_drafter.run(Settings(target=Path("converted"), prompts=PROMPTS))
