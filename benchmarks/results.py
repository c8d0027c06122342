"""What a case found: rows of figures, each beside its limit and its target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One figure. ``ratio`` is to the limit that is named; ``target`` is the most it may be."""

    contender: str
    value: float | None = None
    unit: str = "µs"
    what: str = ""
    limit: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    target: float | None = None
    of: str = "ratio"
    error: str = ""
    own: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None if there is none or no figure."""
        found = self.ratio if self.of == "ratio" else self.value
        return None if self.target is None or found is None else found <= self.target

    @property
    def wanted(self) -> str:
        """The target as text."""
        if self.target is None:
            return ""
        return f"≤ {self.target:.3g}" + ("" if self.of == "ratio" else f" {self.unit}")


@dataclass
class Result:
    """What one case found."""

    number: str
    title: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As it is written to results.json."""
        return {
            "case": self.number,
            "title": self.title,
            "seconds": round(self.seconds, 1),
            "rows": [{**asdict(row), "met": row.met} for row in self.rows],
        }


def result_of(plain: dict[str, Any]) -> Result:
    """The other way round."""
    rows = [Row(**{k: v for k, v in row.items() if k != "met"}) for row in plain["rows"]]
    return Result(plain["case"], plain["title"], rows, plain["seconds"])


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The middle half lies between these."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def percentile(values: Sequence[float], share: float) -> float:
    """So large a share of the values is not above it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
