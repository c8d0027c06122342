"""Cases 1 to 4: one caller, nobody in the way."""

from __future__ import annotations

from typing import Any

from benchmarks.cases.cost import server_rows
from benchmarks.race import Entry, Race, Settings
from benchmarks.results import Row

LOCKS = (
    *("redis-py Lock", "fencekit 0.6.1", "python-redis-lock"),
    *("pottery", "portalocker", "mithril-locks", "redlock-ng"),
)
BUDGET = 0.08
"""Seconds for a chunk of a slow contender."""


def _order(op: str, n: int, fresh: bool = False) -> dict[str, Any]:
    return {"op": op, "n": n, "budget": BUDGET, "fresh": fresh}


def blocking_pair(settings: Settings) -> list[Row]:
    """Case 1: ``acquire`` and ``release`` of one resource, again and again."""
    settings.flush()
    order = _order("pair", 150)
    race = Race(
        settings,
        [
            Entry("raw", order),
            Entry("bare", order, {"raw": None}),
            Entry("fencekit", order, {"raw": 1.10, "bare": None}),
            *(Entry(name, order, {"raw": None}) for name in LOCKS),
        ],
    )
    rows = race.rows()
    if row := race.beside("fencekit", LOCKS, 1.0):
        rows.append(row)
    names = ("bare", "fencekit", "redis-py Lock", "fencekit 0.6.1", "python-redis-lock")
    return rows + server_rows(settings, "pair", names)


def async_pair(settings: Settings) -> list[Row]:
    """Case 2: the same with ``await``, one at a time."""
    settings.flush()
    order = _order("pair", 150)
    return Race(
        settings,
        [
            Entry("raw await", order),
            Entry("fencekit await", order, {"raw await": 1.10}),
            Entry("redis-py Lock await", order, {"raw await": None}),
        ],
    ).rows()


def job(settings: Settings) -> list[Row]:
    """Case 3: a job of its own each time; and what sending a Celery task once costs."""
    settings.flush()
    order = _order("job", 150, fresh=True)
    rows = Race(
        settings,
        [
            Entry("raw", order),
            Entry("bare", order, {"raw": None}),
            Entry("fencekit", order, {"raw": 1.25}),
            Entry("raw await", order),
            Entry("fencekit await", order, {"raw await": 1.25}),
            Entry("fencekit 0.6.1", order, {"raw": None}),
            Entry("powertools", order, {"raw": None}),
            Entry("idemkit", order, {"raw": None}),
            Entry("idemkit await", order, {"raw await": None}),
        ],
    ).rows()
    names = ("bare", "fencekit", "fencekit 0.6.1", "powertools", "idemkit")
    rows += server_rows(settings, "job", names, fresh=True)
    if not settings.peers:
        return rows
    settings.flush()
    order = _order("enqueue", 100, fresh=True)
    sent = Race(
        settings,
        [
            Entry("celery", order),
            Entry("fencekit + celery", order, {"celery": None}),
            Entry("celery-once", order, {"celery": None}),
            Entry("celery-singleton", order, {"celery": None}),
        ],
    ).rows()
    for row in sent:
        row.what = "send once"
    return rows + sent


def write(settings: Settings) -> list[Row]:
    """Case 4: twenty bytes under the token of a lock that is held."""
    settings.flush()
    order = _order("write", 150)
    return Race(
        settings,
        [
            Entry("raw", order),
            Entry("bare", order, {"raw": None}),
            Entry("fencekit", order, {"raw": 1.10}),
            Entry("raw await", order),
            Entry("fencekit await", order, {"raw await": 1.10}),
            Entry("fencekit 0.6.1", order, {"raw": None}),
        ],
    ).rows()
