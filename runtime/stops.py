"""Stop strings in a stream of text: what may be shown, and when it is over (called per step)."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, up to a stop string. Holds only the longest suffix that can still become one.

    Of several stops that are complete when a text has arrived, the one that starts first wins; of those that start
    together, the longest. A complete stop never waits for a longer one. `include`: the winner is shown too.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        assert all(stops), "an empty stop is refused with the request"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(the text to show, whether a stop was found). Not called again once one was."""
        text = self._held + text
        if found := self._earliest(text):
            start, stop = found
            self._held = ""
            return text[: start + len(stop)] if self._include else text[:start], True
        cut = self._first_candidate(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What is held, as no more text will come."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        starts = [(start, -len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not starts:
            return None
        start, _, stop = min(starts)
        return start, stop

    def _first_candidate(self, text: str) -> int:
        """Where the longest suffix begins that is a stop's beginning; len(text) where none is."""
        cut = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), cut)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, cut)
            if at >= 0:
                cut = at
        return cut
