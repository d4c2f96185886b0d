"""Stop strings over streamed text. Owns what text is safe to show; knows neither tokens nor the network."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be a prefix of a stop string, and cuts at the first one to be completed.

    "First completed" (and of those the longest) makes the cut the same however the text was chunked.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """-> the text that can be shown now. After a hit, always "". The stop string itself is never shown."""
        if self.hit is not None:
            return ""
        self._pending += text
        found = [(self._pending.find(s) + len(s), s) for s in self._stops if s in self._pending]
        if found:
            end, self.hit = min(found, key=lambda f: (f[0], -len(f[1])))
            shown, self._pending = self._pending[: end - len(self.hit)], ""
            return shown
        keep = max((self._overlap(s) for s in self._stops), default=0)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown

    def flush(self) -> str:
        """The text still held when the generation ended without a hit."""
        shown, self._pending = self._pending, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._pending[-n:])), 0)
