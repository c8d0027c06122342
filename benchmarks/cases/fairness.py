"""Fairness under load: one lock, five processes, holds of one millisecond."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.race import Entry, Settings, opened
from benchmarks.results import Row
from benchmarks.workers import WorkerError

PROCESSES = 5
HOLD = 0.001
NAME = "fencekit await"
LOCK = "benchmark:one"


def _calls(settings: Settings) -> dict[str, int]:
    stats: Any = settings.client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(row["calls"]) for name, row in stats.items()}


def line(settings: Settings) -> list[Row]:
    """All stand in line while the lock is held; the clock runs from when it is let go."""
    settings.flush()
    each = (200 if settings.quick else 1000) // PROCESSES
    waiters = each * PROCESSES
    crowd = [Entry(NAME, {}, label=f"{NAME}/{number}") for number in range(PROCESSES)]
    errors: dict[str, str] = {}
    served: list[float] = []
    with opened([Entry("fencekit", {}), *crowd], settings.url, errors) as workers:
        if errors:
            return [Row(NAME, error=error, own=True) for error in errors.values()]
        holder = workers.pop("fencekit")
        holder.ask("handing:hold", name=LOCK)
        before = _calls(settings)
        for worker in workers.values():
            worker.send(call="crowds:line", args={"n": each, "hold": HOLD})
        time.sleep(1.0 + waiters / 1000)
        started = holder.ask("handing:release")
        for name, worker in workers.items():
            try:
                served += [at - started for at in worker.receive(300)]
            except WorkerError as error:
                errors[name] = str(error)
        after = _calls(settings)
    if errors:
        return [Row(NAME, error=error, own=True) for error in errors.values()]
    spent = {name: count - before.get(name, 0) for name, count in after.items()}
    sent = spent.get("evalsha", 0) + spent.get("subscribe", 0) + spent.get("unsubscribe", 0)
    what = f"{waiters:,} waiters in {PROCESSES} processes"
    median, longest = statistics.median(served), max(served)
    return [
        Row(NAME, waiters - len(served), "not served", what, target=0.0, of="value", own=True),
        Row(NAME, 1000 * median, "ms", "median wait", own=True),
        Row(NAME, 1000 * longest, "ms", "longest wait", "median wait", longest / median,
            target=3.0, own=True),
        Row(NAME, 1e6 * (longest / len(served) - HOLD), "µs", "each hand-over, without the hold",
            own=True),
        Row(NAME, sent / waiters, "commands", "sent, for each waiter", own=True),
        Row(NAME, sum(spent.values()) / waiters, "commands",
            "for each waiter, with those that the scripts run", own=True),
    ]  # fmt: skip
