"""Charts of the results as SVG, if matplotlib is there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Result, Row

OWN, OTHER, LIMIT = "#1f6f8b", "#b9c3c9", "#c0392b"


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], own: Sequence[bool]) -> None:
    colours = [OWN if mine else OTHER for mine in own]
    axes.barh(names, values, color=colours)
    axes.invert_yaxis()
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def _ratios(result: Result) -> list[Row]:
    """One bar for each contender: its first ratio."""
    found: dict[str, Row] = {}
    for row in result.rows:
        if row.ratio is not None and not row.limit.startswith("fastest"):
            found.setdefault(row.contender, row)
    return sorted(found.values(), key=lambda row: row.ratio or 0.0)


def _ratio_chart(pyplot: Any, result: Result, path: Path, limit: str) -> bool:
    rows = [row for row in _ratios(result) if row.limit.startswith(limit)]
    if not rows:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.38 * len(rows)))
    names, values = [row.contender for row in rows], [row.ratio or 0.0 for row in rows]
    _bars(axes, names, values, [row.own for row in rows])
    if max(values) > 20:
        axes.set_xscale("log")
    axes.axvline(1.0, color=LIMIT, linewidth=1, linestyle="--")
    axes.set_title(f"{result.title}\ntimes {_limit_of(rows)} (dashed line)", fontsize=9, loc="left")
    _save(pyplot, figure, path)
    return True


def _limit_of(rows: Sequence[Row]) -> str:
    limits = {row.limit for row in rows}
    return limits.pop() if len(limits) == 1 else "the raw calls of the same kind"


def _latency_chart(pyplot: Any, result: Result, path: Path) -> bool:
    rows = [row for row in result.rows if row.value and row.what.endswith("median")]
    if not rows:
        return False
    rows.sort(key=lambda row: row.value or 0.0)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.38 * len(rows)))
    names = [f"{row.contender}, {row.what.removesuffix(', median')}" for row in rows]
    _bars(axes, names, [row.value or 0.0 for row in rows], [row.own for row in rows])
    axes.set_xscale("log")
    axes.set_title(f"{result.title}\nmilliseconds, median", fontsize=9, loc="left")
    _save(pyplot, figure, path)
    return True


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    # Without the date, the same figures give the same file.
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write what can be drawn; the files written."""
    if importlib.util.find_spec("matplotlib") is None:
        print("No charts: matplotlib is not installed.")
        return []
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fencekit", "svg.fonttype": "none"})
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    written: list[Path] = []
    for result in results:
        path = folder / f"case-{result.number}.svg"
        if result.number in ("1", "2", "3", "4", "12"):
            drawn = _ratio_chart(pyplot, result, path, "raw")
        elif result.number == "5":
            drawn = _latency_chart(pyplot, result, path)
        elif result.number == "6":
            drawn = _ratio_chart(pyplot, result, path, "pipeline")
        elif result.number == "10":
            drawn = _ratio_chart(pyplot, _named_by_what(result), path, "")
        else:
            continue
        if drawn:
            written.append(path)
    return written


def _named_by_what(result: Result) -> Result:
    """Growth has one contender and many sizes."""
    rows = [Row(row.what, row.value, limit="the smallest", ratio=row.ratio, own=True)
            for row in result.rows if row.ratio is not None]  # fmt: skip
    return Result(result.number, result.title, rows)
