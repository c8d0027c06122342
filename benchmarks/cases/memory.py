"""Cases 9 and 11: what is left on the server, and what an import takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.environments import CONTENDERS, ENVIRONMENTS
from benchmarks.race import Entry, Settings, opened
from benchmarks.results import Row
from benchmarks.workers import Worker, WorkerError

MOST_BYTES = 220.0
MOST_IMPORT = 30.0
JOBS = ("fencekit", "fencekit 0.6.1", "powertools", "idemkit")
LOCKS = ("fencekit", "fencekit 0.6.1", "redis-py Lock", "python-redis-lock")


def _left(settings: Settings) -> tuple[int, int]:
    """How many keys there are, and their bytes by MEMORY USAGE."""
    names = list(settings.client.scan_iter(count=1000))
    return len(names), sum(int(settings.client.memory_usage(name) or 0) for name in names)


def _after(settings: Settings, worker: Worker, op: str, what: str, row: Row) -> list[Row]:
    """Rows for what one operation leaves behind."""
    settings.flush()
    worker.ask("timing:once", op=op)
    keys, size = _left(settings)
    plain = op == "work"
    return [
        Row(row.contender, keys, "keys", what, own=row.own,
            target=1.0 if plain else None, of="value"),
        Row(row.contender, size, "bytes", what, own=row.own,
            target=MOST_BYTES if plain else None, of="value"),
    ]  # fmt: skip


def server(settings: Settings) -> list[Row]:
    """Case 9: MEMORY USAGE after one job with a memo of 20 bytes, and after one lock."""
    rows: list[Row] = []
    for name in dict.fromkeys((*JOBS, *LOCKS)):
        if not settings.wants(name):
            continue
        own = CONTENDERS[name].own
        errors: dict[str, str] = {}
        with opened([Entry(name, {})], settings.url, errors) as workers:
            try:
                if name in errors:
                    raise WorkerError(errors[name])
                blank = Row(name, own=own)
                if name in JOBS:
                    what = "a finished job" if not own else "a finished job that took a lock"
                    rows += _after(settings, workers[name], "job", what, blank)
                if own:
                    rows += _after(settings, workers[name], "work", "a finished job", blank)
                if name in LOCKS:
                    rows += _after(settings, workers[name], "pair", "a released lock", blank)
            except WorkerError as error:
                rows.append(Row(name, error=str(error), own=own))
    return rows + _retained(settings)


def _retained(settings: Settings) -> list[Row]:
    """Nothing is for ever: with a retention and a ttl of a second, all is gone after two."""
    settings.flush()
    errors: dict[str, str] = {}
    entry = Entry("fencekit", {}, options={"retention": 1.0, "ttl": 1.0, "lease": 0.9})
    with opened([entry], settings.url, errors) as workers:
        if errors:
            return [Row("fencekit", error=errors["fencekit"], own=True)]
        for op in ("job", "pair"):
            workers["fencekit"].ask("timing:once", op=op)
    time.sleep(2.2)
    keys, _ = _left(settings)
    return [Row("fencekit", keys, "keys", "left after retention", target=0.0, of="value", own=True)]


IMPORTS = """
import time
started = time.perf_counter()
import redis
between = time.perf_counter()
import fencekit
print(between - started, time.perf_counter() - between)
"""


def _imported() -> tuple[float, float]:
    """Milliseconds of each import in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=tempfile.gettempdir(),
        env=ENVIRONMENTS["main"].variables(),
    )
    first, second = map(float, done.stdout.split())
    return 1000 * first, 1000 * second


def importing(settings: Settings) -> list[Row]:
    """Case 11: fresh processes that import redis, and then fencekit."""
    _imported()  # the files are in memory from here on
    found = [_imported() for _ in range(15 if settings.quick else 50)]
    alone = statistics.median(first for first, _ in found)
    added = statistics.median(second for _, second in found)
    return [
        Row("import redis", alone, "ms"),
        Row("fencekit", added, "ms", "over import redis", target=MOST_IMPORT, of="value", own=True),
    ]
