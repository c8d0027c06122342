"""Cases 6 and 7: many coroutines of one process."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.environments import CONTENDERS
from benchmarks.race import Entry, Race, Settings, opened
from benchmarks.results import Row
from benchmarks.workers import Worker, WorkerError

MOST_CONNECTIONS = 3


def throughput(settings: Settings) -> list[Row]:
    """Case 6: time for each acquire and release of 100 coroutines that run at once."""
    settings.flush()
    many = {"n": 3 if settings.quick else 10, "count": 100}
    single = {"op": "pair", "n": 150, "budget": 0.1}
    one = "raw, one at a time"
    rows = Race(
        settings,
        [
            Entry("raw await", single, label=one),
            Entry("pipeline", many, {one: None}, "timing:gather"),
            Entry("fencekit await", many, {"pipeline": 1.5, one: 1 / 3}, "timing:gather"),
            Entry("raw await", many, {"pipeline": None}, "timing:gather", "raw, 100 at once"),
            Entry("redis-py Lock await", single, {one: None}, label="redis-py Lock, one at a time"),
            Entry("redis-py Lock await", many, {"pipeline": None}, "timing:gather"),
        ],
    ).rows()
    for row in rows:
        row.what = "each pair"
    return rows


def _watched(settings: Settings, worker: Worker, call: str, **arguments: Any) -> tuple[Any, int]:
    """What the worker answered, and the most connections there were meanwhile."""
    before = len(settings.client.client_list())
    worker.send(call=call, args=arguments)
    most = 0
    until = time.monotonic() + 300
    while not worker.answered(0.02) and time.monotonic() < until:
        most = max(most, len(settings.client.client_list()) - before)
    return worker.receive(1), most


def _crowd_rows(settings: Settings, name: str, n: int, one_lock: bool) -> list[Row]:
    own = CONTENDERS[name].own
    what = f"{n:,} on {'one lock' if one_lock else 'distinct locks'}"
    patience = 120.0 if own else 10.0
    errors: dict[str, str] = {}
    with opened([Entry(name, {})], settings.url, errors) as workers:
        if name in errors:
            return [Row(name, what=what, error=errors[name], own=own)]
        try:
            if one_lock:
                order = {"n": n, "patience": patience}
                answer, most = _watched(settings, workers[name], "crowds:same", **order)
            else:
                answer, most = _watched(settings, workers[name], "crowds:distinct", n=n)
            each = None
            if own:
                each = workers[name].ask("crowds:memory", n=n, one_lock=one_lock)
        except WorkerError as error:
            return [Row(name, what=what, error=str(error), own=own)]
    failed = sum(answer["errors"].values())
    kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(answer["errors"].items()))
    target = {"target": 0.0, "of": "value"} if own else {}
    connections = {"target": float(MOST_CONNECTIONS), "of": "value"} if own else {}
    row = Row(name, failed, "errors", f"{what}: {kinds or 'none'}", own=own, **target)  # type: ignore[arg-type]
    rows = [row, Row(name, answer["seconds"], "s", f"{what}: all of it", own=own)]
    rows.append(Row(name, most, "connections", what, own=own, **connections))  # type: ignore[arg-type]
    if each is not None:
        kind = "waiter" if one_lock else "holder"
        rows.append(Row(name, each, "bytes", f"{what}: each {kind}, its task included", own=own))
    return rows


def crowd(settings: Settings) -> list[Row]:
    """Case 7: 300 and 10,000 coroutines, each with a lock of its own and all with one."""
    rows: list[Row] = []
    for n in (300, 10_000):
        for one_lock in (False, True):
            settings.flush()
            rows += _crowd_rows(settings, "fencekit await", n, one_lock)
    for one_lock in (False, True):
        settings.flush()
        rows += _crowd_rows(settings, "redis-py Lock await", 300, one_lock)
    return rows
