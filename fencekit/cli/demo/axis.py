"""The time axis of the demo's chart: seconds to pixels, with long silences cut out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

QUIET = 1.6  # seconds without an event from which on a silence is shortened ...
SHOWN = 1.0  # ... to this


class Axis:
    """Places times between two positions; a time in a silence that was cut lies in its middle part.

    >>> axis = Axis([0.0, 1.0, 2.0], 100.0, 300.0)
    >>> round(axis.at(0.5)), list(axis.ticks()), axis.cuts
    (150, [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0], [])
    >>> long = Axis([0.0, 1.0, 11.0], 100.0, 300.0)
    >>> round(long.at(1.0)), round(long.at(11.0)), long.cuts
    (200, 300, [(1.4, 10.6)])
    """

    def __init__(self, times: Iterable[float], left: float, right: float) -> None:
        moments = sorted({0.0, *times})
        self._left = left
        self._end = moments[-1]
        self.cuts = [
            (round(a + 0.4 * SHOWN, 6), round(b - 0.4 * SHOWN, 6))
            for a, b in itertools.pairwise(moments)
            if b - a > QUIET
        ]
        self._scale = (right - left) / max(0.001, self._shown(self._end))

    def at(self, seconds: float) -> float:
        """The position of a time."""
        return self._left + self._shown(seconds) * self._scale

    def ticks(self) -> Iterator[float]:
        """Round times to label, about ten of them, none in a cut."""
        shown = self._shown(self._end)
        step = next((step for step in (0.25, 0.5, 1.0, 2.0) if shown / step <= 10), 5.0)
        for number in range(int(self._end / step) + 1):
            moment = number * step
            if not any(start < moment < end for start, end in self.cuts):
                yield moment

    def _shown(self, seconds: float) -> float:
        for start, end in reversed(self.cuts):
            if seconds > start:
                # The cut itself takes what is left of SHOWN, whatever its length.
                inside = min(seconds, end) - start
                past = max(0.0, seconds - end)
                return self._shown(start) + 0.2 * SHOWN * inside / (end - start) + past
        return seconds
