"""Case 5: how long a lock is nobody's between a release and the waiter's return."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.environments import CONTENDERS
from benchmarks.race import Entry, Settings, opened
from benchmarks.results import Row, percentile, quartiles
from benchmarks.workers import Worker, WorkerError

# One that polls is released at a random point of its period; others are waiting after this long.
POLLS = {"redis-py Lock": 0.12, "redis-py Lock await": 0.12, "fencekit 0.6.1": 0.06}
BEGIN, REACTS = 0.005, 0.01
NAMES = (
    *("fencekit", "fencekit await", "redis-py Lock", "redis-py Lock await"),
    *("fencekit 0.6.1", "python-redis-lock"),
)
PLACES = ("same process", "two processes")


@dataclass
class _Found:
    """Seconds of each hand-over, and multiples of two raw calls, a median for each round."""

    latencies: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    to_loop: list[float] = field(default_factory=list)
    error: str = ""


def _between(holder: Worker, waiter: Worker, n: int, low: float, high: float) -> list[float]:
    found = []
    for number in range(n):
        name = f"benchmark:two:{number % 2}"
        holder.ask("handing:hold", name=name)
        waiter.send(call="handing:wait", args={"name": name})
        time.sleep(random.uniform(low, high))
        before = holder.ask("handing:release")
        found.append(waiter.receive() - before)
    return found


def _measure(settings: Settings, name: str, place: str, pair: tuple[Worker, Worker]) -> list[float]:
    polls = name in POLLS
    low, high = (0.02, 0.02 + POLLS[name]) if polls else (BEGIN, REACTS)
    n = (6 if polls else 50) if settings.quick else (20 if polls else 120)
    if place == PLACES[1]:
        return _between(*pair, n, low, high)
    order: dict[str, Any] = {"url": settings.url, "n": n, "low": low, "high": high}
    found: list[float] = pair[0].ask("handing:within", **order)
    return found


def _rows(name: str, place: str, found: _Found) -> list[Row]:
    own = CONTENDERS[name].own
    if found.error:
        return [Row(name, what=place, error=found.error, own=own)]
    values: Sequence[float] = [1000 * value for value in found.latencies]
    low, high = quartiles(found.ratios)
    return [
        Row(
            name, statistics.median(values), "ms", place, "one raw call after as long a rest",
            statistics.median(found.ratios), low, high, 4.0 if own else None, own=own,
        ),
        Row(
            name, statistics.median(values), "ms", place, "one raw call of many in a row",
            statistics.median(found.to_loop), *quartiles(found.to_loop), own=own,
        ),
        Row(
            name, statistics.median(values), "ms", f"{place}, median",
            target=2.0 if own else None, of="value", own=own,
        ),
        Row(
            name, percentile(values, 0.99), "ms", f"{place}, 99th percentile of {len(values)}",
            target=10.0 if own else None, of="value", own=own,
        ),
    ]  # fmt: skip


def latency(settings: Settings) -> list[Row]:
    """Between two clients of one process, and between two processes."""
    settings.flush()
    wanted = [name for name in NAMES if settings.wants(name)]
    entries = [Entry("raw", {}), Entry("raw await", {})]
    for name in wanted:
        entries += [Entry(name, {}, label=f"{name}/1"), Entry(name, {}, label=f"{name}/2")]
    errors: dict[str, str] = {}
    found = {(name, place): _Found() for place in PLACES for name in wanted}
    with opened(entries, settings.url, errors) as workers:
        for number in range(3 if settings.quick else 5):
            order = list(found)
            order = order[number:] + order[:number]
            for name, place in order:
                here = found[name, place]
                here.error = (
                    here.error or errors.get(f"{name}/1", "") or errors.get(f"{name}/2", "")
                )
                if here.error:
                    continue
                raw = "raw await" if name.endswith("await") else "raw"
                try:
                    call = workers[raw].ask("timing:loop", op="pair", n=100, budget=0.1) / 2
                    rest = workers[raw].ask("handing:rested", n=30, low=BEGIN, high=REACTS)
                    pair = (workers[f"{name}/1"], workers[f"{name}/2"])
                    chunk = _measure(settings, name, place, pair)
                except WorkerError as error:
                    here.error = str(error)
                    continue
                here.latencies += chunk
                here.ratios.append(statistics.median(chunk) / rest)
                here.to_loop.append(statistics.median(chunk) / call)
    return [row for (name, place), what in found.items() for row in _rows(name, place, what)]
