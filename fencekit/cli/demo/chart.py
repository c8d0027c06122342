"""The demo's run as a drawing: a lane per worker, leases as bars, writes as dots or crosses.

Rules this module obeys:

1. What is drawn comes from the events alone, and time is the only thing that places it across.
2. A meaning has a shape and a word, not only a colour: a refusal is a cross that says so.
3. Colours are CSS classes of the page, which has a light and a dark set of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .axis import Axis
from .timeline import STORES, Event, Run, stale_writes
from .words import Line

WIDTH = 1000.0
LEFT, RIGHT = 132.0, 838.0  # of the time axis; on its right is room for the last labels
TOP, LANE, GAP = 8.0, 170.0, 46.0
BAR = 26.0
ROWS = {"head": 24.0, "lease": 62.0, "Redis": 110.0, "SQLite": 144.0}  # centres, within a lane


class Chart:
    """Draws one run; `lines` are its events in words, for the tooltips."""

    def __init__(self, run: Run, lines: Sequence[Line]) -> None:
        self._run = run
        self._events = run.events
        self._text = [line.text for line in lines]
        self._stale = [id(event) for event in stale_writes(run.events)]
        self._lease = "lease" if run.safe else "lock"
        self._names = sorted(run.pids)
        self._axis = Axis((event.at for event in run.events), LEFT + 8, RIGHT)
        self._bottom = TOP + len(self._names) * (LANE + GAP) - GAP

    def svg(self) -> str:
        """The drawing as one SVG element."""
        height = self._bottom + 44
        title = "Timeline of the two workers"
        about = " ".join(f"At {e.at:.2f} s {e.who} {t}" for e, t in zip(*self._told, strict=True))
        return "\n".join(
            (
                f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
                'aria-labelledby="chart-title chart-about">',
                f'<title id="chart-title">{title}</title>',
                f'<desc id="chart-about">{escape(about)}</desc>',
                '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="8"/>'
                "</pattern></defs>",
                *self._lanes(),
                *self._ticks(),
                *self._leases(),
                *self._pauses(),
                *self._takeovers(),
                *self._marks(),
                "</svg>",
            )
        )

    @property
    def _told(self) -> tuple[Sequence[Event], Sequence[str]]:
        return self._events, self._text

    # The ground

    def _lanes(self) -> Iterator[str]:
        for name in self._names:
            top = self._row(name, "head") - ROWS["head"]
            yield _rect("lane", 0, top, WIDTH, LANE, 10)
            yield _text("name", 16, top + 27, f"Worker {name}")
            yield _text("small", 16, top + 43, f"process {self._run.pids[name]}")
            for row in ("lease", *STORES):
                y = self._row(name, row)
                if row != "lease":
                    yield _line("row", LEFT, y, WIDTH - 16, y)
                word = self._lease if row == "lease" else row
                yield _text("small end", LEFT - 10, y + 4, word)

    def _ticks(self) -> Iterator[str]:
        for moment in self._axis.ticks():
            x = self._axis.at(moment)
            yield _line("tick", x, TOP, x, self._bottom + 6)
            yield _text("small middle", x, self._bottom + 22, f"{moment:g}")
        yield _text("small", RIGHT + 26, self._bottom + 22, "seconds")
        for start, end in self._axis.cuts:
            x = (self._axis.at(start) + self._axis.at(end)) / 2
            said = f"{end - start:.0f} s cut"
            yield _text("small middle", x, self._bottom + 22, f"// {said} //")

    # Leases, pauses, takeovers

    def _leases(self) -> Iterator[str]:
        rank = 0
        for number, begun in enumerate(self._events):
            if begun.what != "begun":
                continue
            rank += 1
            if self._again(number):
                continue
            later = [event for event in self._events[number:] if event.who == begun.who]
            end = next((e for e in later if e.what in ("lapsed", "finished")), None)
            x, y = self._axis.at(begun.at), self._row(begun.who, "lease")
            # A lease that has not ended goes on beyond the last event.
            stop = RIGHT + 14 if end is None else self._axis.at(end.at)
            shape = _rect(f"bar {begun.who}", x, y - BAR / 2, max(3.0, stop - x), BAR, 4)
            yield _group(shape, self._text[number])
            label = f"token #{rank}" if self._run.safe else f"{begun.who}'s lock"
            if stop - x > 7.5 * len(label) + 18:
                yield _text("on", x + 8, y + 4.5, label)
            if end is not None and end.what == "lapsed":
                yield from self._belief(begun.who, stop, later[-1].at)

    def _belief(self, name: str, start: float, last: float) -> Iterator[str]:
        """A lease that ran out while its holder could not know."""
        y, stop = self._row(name, "lease"), self._axis.at(last)
        yield _rect(f"ghost {name}", start, y - BAR / 2, max(3.0, stop - start), BAR, 4)
        yield _text("small halo", start + 8, y + 28, f"{self._lease} runs out")
        if stop - start > 200:
            yield _text("small halo", start + 12, y + 4, f"gone, but {name} does not know")

    def _pauses(self) -> Iterator[str]:
        for number, event in enumerate(self._events):
            if event.what != "frozen":
                continue
            ends = (
                e.at for e in self._events[number:] if (e.who, e.what) == (event.who, "resumed")
            )
            x, stop = self._axis.at(event.at), self._axis.at(next(ends, self._events[-1].at))
            top = self._row(event.who, "head") - ROWS["head"]
            shape = _rect("pause", x, top, stop - x, LANE, 0)
            yield _group(shape, self._text[number])
            y = self._row(event.who, "head") + 4
            yield _text("halo strong", x + 8, y, "frozen (SIGSTOP)")
            yield _text("halo strong", stop + 6, y, "continued")

    def _takeovers(self) -> Iterator[str]:
        lapsed: Event | None = None
        for event in self._events:
            if event.what == "lapsed":
                lapsed = event
            elif event.what == "begun" and lapsed is not None:
                x1, y1 = self._axis.at(lapsed.at), self._row(lapsed.who, "lease") + BAR / 2
                x2, y2 = self._axis.at(event.at), self._row(event.who, "lease") - BAR / 2
                middle = TOP + LANE + GAP / 2
                yield (
                    f'<path class="takeover" d="M{x1:.1f} {y1:g}V{middle:g}H{x2:.1f}V{y2 - 9:g}"/>'
                    f'<path class="arrow" d="M{x2 - 5:.1f} {y2 - 10:g}h10l-5 9z"/>'
                )
                words = "takeover: a new, larger token" if self._run.safe else "takeover"
                yield _text("strong", x2 + 10, middle + 5, words)
                lapsed = None

    # What the workers did

    def _marks(self) -> Iterator[str]:
        for number, event in enumerate(self._events):
            x = self._axis.at(event.at)
            shape, label, kind = self._mark(event)
            if self._again(number):
                shape, label, kind = ALARM, "delivered again:\nstarts all over", "red"
            if not shape:
                continue
            y = self._row(event.who, event.facts.get("store", "lease"))
            drawn = f'<g transform="translate({x:.1f} {y:g})">{shape}</g>'
            yield _group(drawn, self._text[number])
            for line, word in enumerate(label.split("\n")):
                yield _text(f"halo {kind}".strip(), x + 13, y + 4 + 14 * line, word)

    def _again(self, number: int) -> bool:
        """Whether this event is a start that a redelivery of the finished job caused."""
        before = self._events[number - 1].what if number else ""
        return (before, self._events[number].what) == ("redelivered", "begun")

    def _mark(self, event: Event) -> tuple[str, str, str]:
        """The shape around 0 0, its label and the label's class; empty for what has no mark."""
        who = event.who
        if event.what == "write":
            value = event.facts["value"]
            if not event.facts["accepted"]:
                return CROSS, f"{value}: refused", "red"
            if id(event) in self._stale:
                return ALARM, f"{value}: overwrites", "red"
            return f'<circle class="dot {who}" r="7"/>', value, ""
        return {
            "busy": (f'<circle class="ring {who}" r="6"/>', "told to wait", ""),
            "finished": (
                f'<path class="dot {who}" d="M-7 -7h14v14h-14z"/>',
                self._finish(event),
                "",
            ),
            "not finished": (CROSS, "finish: refused", "red"),
            "replayed": (
                f'<path class="dot {who}" d="M0 -9l9 9l-9 9l-9 -9z"/>',
                "delivered again:\nremembered result",
                "",
            ),
        }.get(event.what, ("", "", ""))

    def _finish(self, event: Event) -> str:
        return "result stored" if event.facts.get("result") is not None else "finished"

    def _row(self, name: str, row: str) -> float:
        return TOP + self._names.index(name) * (LANE + GAP) + ROWS[row]


CROSS = '<path class="cross" d="M-7 -7L7 7M7 -7L-7 7"/>'
ALARM = '<circle class="alarm" r="8"/><path class="bang" d="M0 -4.5V1M0 3.6V4.4"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float, round_: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{round_:g}"/>'
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _group(shape: str, tooltip: str) -> str:
    return f"<g><title>{escape(tooltip)}</title>{shape}</g>"
