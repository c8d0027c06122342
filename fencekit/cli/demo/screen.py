"""The demo's timeline as text: plain anywhere, in colours with rich on a terminal."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

from .timeline import Verdict
from .words import Line, Mark


class Screen(ABC):
    """Shows a run while it happens."""

    @abstractmethod
    def open(self, title: str, intro: str, place: str) -> None:
        """What is about to be shown, and where it takes place."""

    @abstractmethod
    def line(self, line: Line) -> None:
        """One line of the timeline."""

    @abstractmethod
    def close(self, verdict: Verdict) -> None:
        """How it ended."""


def choose(*, plain: bool) -> Screen:
    """Rich on a terminal that can show it, if it is installed; else plain."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if plain or not sys.stdout.isatty() or not encoding.startswith("utf"):
        return Plain()
    try:
        return Rich()
    except ImportError:
        return Plain()


class Plain(Screen):
    """Lines of ASCII text, each written out at once."""

    def open(self, title: str, intro: str, place: str) -> None:
        self._print(title, intro, place, "", "seconds  who  what happened")

    def line(self, line: Line) -> None:
        self._print(f"{line.at:7.2f}  {line.who:<3}  {line.text}")

    def close(self, verdict: Verdict) -> None:
        self._print("", verdict.headline, *verdict.lines)

    def _print(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)


MARKS: dict[Mark, tuple[str, str]] = {
    "": ("•", "dim"),
    "ok": ("✔", "green"),
    "refused": ("✘", "bold red"),
    "bad": ("!", "bold red"),
    "pause": ("‖", "yellow"),
}
WORKERS = {"A": "bold black on bright_blue", "B": "bold black on bright_green"}


class Rich(Screen):
    """The same in colours and aligned columns. Rich itself respects NO_COLOR."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def open(self, title: str, intro: str, place: str) -> None:
        from rich.panel import Panel
        from rich.text import Text

        body = Text.assemble(intro, "\n", (place, "dim"))
        self._console.print()
        self._console.print(
            Panel(body, title=f"[bold]{title}[/]", title_align="left", width=self._width)
        )

    def line(self, line: Line) -> None:
        from rich.text import Text

        symbol, style = MARKS[line.mark]
        text = Text(line.text)
        text.highlight_words(("REFUSED", "ACCEPTED", "AGAIN"), "bold red")
        text.highlight_regex(r"#\d", "bold cyan")
        text.highlight_regex(r'"[^"]*"(?! *[:}])', "italic")
        who = Text(f" {line.who} ", WORKERS.get(line.who, "bold"))
        self._row(Text(f"{line.at:6.2f} s", "dim"), who, Text(symbol, style), text)

    def close(self, verdict: Verdict) -> None:
        from rich.panel import Panel
        from rich.text import Text

        colour = "green" if verdict.ok else "red"
        body = Text("\n".join(verdict.lines))
        title = f"[bold {colour}]{verdict.headline}[/]"
        self._console.print(
            Panel(body, title=title, title_align="left", border_style=colour, width=self._width)
        )

    @property
    def _width(self) -> int:
        return min(self._console.width, 108)

    def _row(self, *cells: Any) -> None:
        from rich.table import Table

        table = Table.grid(padding=(0, 1), expand=False)
        table.width = self._width
        for width in (8, 3, 1):
            table.add_column(width=width, no_wrap=True)
        table.add_column(ratio=1)
        table.add_row(*cells)
        self._console.print(table)
