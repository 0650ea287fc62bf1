"""Stop strings on a growing text: what may be shown, and when to stop."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears; holds back any tail that could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty stop strings are ignored."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """Adds text; returns what can be shown now. Once `stopped`, everything from the stop string on is dropped."""
        if self.stopped:
            return ""
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
