"""Case 10: whether fencekit gets slower as the server fills, or the line grows."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.race import Entry, Race, Settings, opened
from benchmarks.results import Row, percentile, quartiles
from benchmarks.workers import WorkerError

FLAT = 1.25
"""What two identical chunks may differ on a busy machine."""
FILL = """
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('SET', 'filler:' .. i, i)
end
"""
PIECE = 20_000


def _filled(settings: Settings) -> dict[int, str]:
    """A database for each number of keys, and its URL."""
    settings.client.flushall()
    sizes = (10, 10_000, 100_000) if settings.quick else (10, 10_000, 1_000_000)
    found: dict[int, str] = {}
    for database, size in enumerate(sizes, start=1):
        found[size] = f"{settings.url.rsplit('/', 1)[0]}/{database}"
        with type(settings.client).from_url(found[size]) as client:
            for first in range(0, size, PIECE):
                client.eval(FILL, 0, str(first), str(min(first + PIECE, size) - 1))
    return found


def _with_keys(settings: Settings) -> list[Row]:
    databases = _filled(settings)
    single: dict[str, Any] = {"op": "pair", "n": 200, "budget": 0.15}
    kinds: list[tuple[str, str, str, dict[str, Any]]] = [
        ("acquire and release", "fencekit", "timing:loop", single),
        ("a whole job", "fencekit", "timing:loop", {**single, "op": "job", "fresh": True}),
        ("100 coroutines", "fencekit await", "timing:gather", {"n": 3, "count": 100}),
    ]
    rows: list[Row] = []
    for what, contender, call, order in kinds:
        least = min(databases)
        entries = [
            Entry(
                contender,
                order,
                {f"{least} keys": FLAT} if size != least else {},
                call,
                f"{size:,} keys",
                options={"url": url},
            )
            for size, url in databases.items()
        ]
        found = Race(settings, entries).rows()
        for row in found:
            row.contender, row.what = contender, f"{what}, {row.contender}"
        rows += found
    settings.client.flushall()
    return rows


def _with_waiters(settings: Settings) -> list[Row]:
    settings.flush()
    sizes = (1, 10, 100) if settings.quick else (1, 10, 100, 1000)
    found: dict[int, list[float]] = {size: [] for size in sizes}
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    name = "fencekit await"
    errors: dict[str, str] = {}
    with opened([Entry(name, {})], settings.url, errors) as workers:
        if errors:
            return [Row(name, error=errors[name], own=True)]
        for _ in range(3):
            for size in sizes:
                order = {"n": max(200, size), "waiters": size}
                try:
                    chunk = workers[name].ask("handing:crowded", **order)
                except WorkerError as error:
                    return [Row(name, what=f"{size:,} waiters", error=str(error), own=True)]
                found[size] += [1e6 * value for value in chunk]
                ratios[size].append(statistics.median(chunk))
    rows: list[Row] = []
    for size in sizes:
        what = f"hand-over, {size:,} waiting"
        row = Row(name, statistics.median(found[size]), what=what, own=True)
        if size != sizes[0]:
            each = [a / b for a, b in zip(ratios[size], ratios[sizes[0]], strict=True)]
            row.limit, row.ratio = "1 waiting", statistics.median(each)
            row.low, row.high = quartiles(each)
            # Log of the size to base 2, plus one: what a heap or a tree would take.
            row.target = float(size.bit_length())
        rows.append(row)
        late = percentile(found[size], 0.99)
        rows.append(Row(name, late, what=f"{what}, 99th percentile", own=True))
    return rows


def growth(settings: Settings) -> list[Row]:
    """Cases 1, 3 and 6 beside keys, case 5 beside waiters."""
    return _with_keys(settings) + _with_waiters(settings)
