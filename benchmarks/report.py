"""Shows results: a table on a terminal, plain lines elsewhere, Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.results import Result, Row

HEAD = ("contender", "what", "median", "ratio", "limit", "middle half", "target", "met")


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one line, in the order of ``HEAD``."""
    if row.error:
        return (row.contender, row.what, "failed", "", "", "", "", row.error)
    met = {None: "", True: "yes", False: "NO"}[row.met]
    spread = f"{row.low:.2f} to {row.high:.2f}" if row.low is not None and row.high else ""
    return (
        row.contender,
        row.what,
        "" if row.value is None else f"{_number(row.value)} {row.unit}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.limit,
        spread,
        row.wanted,
        met,
    )


def _columns(result: Result) -> list[int]:
    """Those that have something in them."""
    lines = [cells(row) for row in result.rows]
    return [place for place in range(len(HEAD)) if any(line[place] for line in lines)]


def _heading(result: Result) -> str:
    number = f"Case {result.number}" if result.number.isdigit() else result.number.capitalize()
    return f"{number}: {result.title}"


def show(result: Result) -> None:
    """Print one case."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join(_plain(result)), flush=True)
        return
    console = Console()
    if not console.is_terminal:
        print("\n".join(_plain(result)), flush=True)
        return
    table = Table(title=f"{_heading(result)} ({result.seconds:.0f} s)", title_justify="left")
    columns = _columns(result)
    for place in columns:
        table.add_column(HEAD[place], justify="right" if HEAD[place] in HEAD[2:4] else "left")
    for row in result.rows:
        style = "red" if row.error or row.met is False else "bold" if row.own else ""
        line = cells(row)
        table.add_row(*(line[place] for place in columns), style=style)
    console.print(table)


def _plain(result: Result) -> Iterator[str]:
    columns = _columns(result)
    lines = [HEAD, *(cells(row) for row in result.rows)]
    widths = {place: max(len(line[place]) for line in lines) for place in columns}
    yield f"{_heading(result)} ({result.seconds:.0f} s)"
    for line in lines:
        yield "  " + "  ".join(line[place].ljust(widths[place]) for place in columns).rstrip()
    yield ""


def markdown(facts: dict[str, Any], results: list[Result]) -> str:
    """The targets in one table, then every case in one of its own."""
    versions = [f"{name} {facts[name]}" for name in ("fencekit", "redis-py", "server")]
    kind = "quick run" if facts["quick"] else "full run"
    lines = [f"{facts['machine']}; Python {facts['python']}, {', '.join(versions)}; {kind}."]
    peers = [
        f"{name} {version}" if name != "redis" else f"redis-py {version} under {folder}"
        for folder, found in facts.get("peers", {}).items()
        for name, version in found.items()
    ]
    if peers:
        lines.append("Peers: " + ", ".join(peers) + ".")
    blocks = ["\n".join(lines), _targets(results)]
    for result in results:
        columns = _columns(result)
        blocks.append(f"## {_heading(result)}")
        blocks.append(_markdown_table(
            [HEAD[place] for place in columns],
            [[cells(row)[place] for place in columns] for row in result.rows],
        ))  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def _targets(results: list[Result]) -> str:
    lines = []
    for result in results:
        for row in result.rows:
            if row.target is None and not (row.error and row.own):
                continue
            name, what, median, ratio, limit, _, target, met = cells(row)
            shown = f"{ratio} times {limit}" if row.of == "ratio" and ratio else median
            lines.append([result.number, name, what or result.title, shown, target, met])
    head = ["case", "contender", "what", "found", "target", "met"]
    return _markdown_table(head, lines)


def _markdown_table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows
    )
