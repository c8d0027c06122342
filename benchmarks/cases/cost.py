"""What an operation costs the server: the processor time it spent, by ``INFO cpu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.environments import CONTENDERS
from benchmarks.race import Entry, Settings, opened
from benchmarks.results import Row
from benchmarks.workers import WorkerError


def _spent(settings: Settings) -> float:
    """Seconds so far."""
    found: dict[str, Any] = settings.client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def server_rows(
    settings: Settings, op: str, names: Sequence[str], fresh: bool = False
) -> list[Row]:
    """A row for each contender; its network traffic is part of it."""
    n = 500 if settings.quick else 2000
    what = "the server's processor time"
    rows: list[Row] = []
    for name in filter(settings.wants, names):
        own = CONTENDERS[name].own
        errors: dict[str, str] = {}
        with opened([Entry(name, {})], settings.url, errors) as workers:
            try:
                if name in errors:
                    raise WorkerError(errors[name])
                workers[name].ask("timing:repeat", op=op, n=20, fresh=fresh)
                before = _spent(settings)
                workers[name].ask("timing:repeat", op=op, n=n, fresh=fresh)
                each = 1e6 * (_spent(settings) - before) / n
                rows.append(Row(name, each, what=what, own=own))
            except WorkerError as error:
                rows.append(Row(name, what=what, error=str(error), own=own))
    return rows
