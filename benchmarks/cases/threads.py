"""Case 12: blocking calls of eight threads at once, and of eight greenlets."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.race import Entry, Race, Settings
from benchmarks.results import Row

MOST = 1 / 0.9
"""Time for each pair at nine tenths of the throughput."""


def throughput(settings: Settings) -> list[Row]:
    """Acquire and release on a resource of each thread's own; redis-py's calls beside them."""
    settings.flush()
    order = {"op": "pair", "n": 40 if settings.quick else 100, "count": 8}
    call = "timing:threads"
    rows: list[Row] = []
    for kind, flags in (("8 greenlets", ("--gevent",)), ("8 threads", ())):
        if flags and find_spec("gevent") is None:
            rows.append(Row("all", what=kind, error="gevent is not installed"))
            continue
        raw, lock = f"raw, {kind}", f"redis-py Lock, {kind}"
        rows += Race(
            settings,
            [
                Entry("raw", order, {}, call, raw, flags),
                Entry("fencekit", order, {raw: MOST}, call, f"fencekit, {kind}", flags),
                Entry("redis-py Lock", order, {raw: None}, call, lock, flags),
            ],
        ).rows()
    for row in rows:
        row.what = row.what or "each pair"
    return rows
