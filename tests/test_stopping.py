"""Stop strings on text that arrives in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.stopping import StopMatcher


def shown_after_each(stops: list[str], pieces: list[str]) -> list[str]:
    matcher = StopMatcher(stops)
    return [matcher.feed(piece) for piece in pieces] + [matcher.flush()]


def cut(text: str, stops: list[str]) -> str:
    """The definition: the text before the first stop string."""
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ([], ["ab", "c"], ["ab", "c", ""]),
        ([""], ["ab"], ["ab", ""]),
        (["END"], ["one E", "ND two", "END"], ["one ", "", "", ""]),
        (["END"], ["one E", "N", "X"], ["one ", "", "ENX", ""]),
        (["END"], ["EN"], ["", "EN"]),  # what only looked like a beginning is shown in the end
        (["aab"], ["aaa", "b"], ["a", "", ""]),
        (["\n\n"], ["x\n", "\n", "y"], ["x", "", "", ""]),
        (["abc", "b"], ["a", "b", "c"], ["", "a", "", ""]),
        (["bc", "abcd"], ["abcd"], ["", ""]),
        (["bc", "abcd"], ["abc", "d"], ["a", "", ""]),  # the first one that is complete counts
        (["é"], ["caf", "é!"], ["caf", "", ""]),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    assert shown_after_each(stops, pieces) == shown


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    text=st.text("ab\n", max_size=14),
    stops=st.lists(st.text("ab\n", max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_pieces_join_to_the_cut_text(text: str, stops: list[str], cuts: list[int]) -> None:
    """However the text is cut; and nothing is shown that a later piece could take back."""
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    shown = shown_after_each(stops, pieces)
    matcher = StopMatcher(stops)
    for piece in pieces:
        matcher.feed(piece)
    assert matcher.stopped == any(stop in text for stop in stops if stop)
    # Of several stop strings, the one whose piece comes first ends the text.
    known = next((text[:end] for end in places if any(stop and stop in text[:end] for stop in stops)), text)
    assert "".join(shown) == cut(known, stops)
