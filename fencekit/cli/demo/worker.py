"""A worker of the demo: a process of its own that does what its parent says, and reports it.

What is worth copying is the class `Fenced`; `Unfenced` is the same job as it is often written.

Rules of this module:

1. The first line on stdin is the setup as JSON (a URL's password is never an argument). Each
   further line is a command; its reports are lines of JSON on stdout, the last one is ``end``.
2. A worker does nothing between two commands, so the parent decides the order of events.
3. It ends with its parent: at the end of stdin, and on Linux by the kernel also while frozen.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fencekit import (
    FencedOutError,
    FenceGate,
    FenceToken,
    IdempotencyGuard,
    IdempotencyNotOwned,
    LockNotAcquired,
)

JOB = "ship order 7"
ORDER = "order:7"
KEEP = 180.0  # seconds; every key of the demo expires by itself after that

# `fence` is the largest token that has written to the row. One statement checks and writes.
FENCED_UPDATE = """
    UPDATE orders SET status = :status, fence = :token
    WHERE id = 7 AND fence <= :token
"""
UNFENCED_UPDATE = "UPDATE orders SET status = :status WHERE id = 7"

Report = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a worker is told at its start."""

    name: str
    safe: bool
    url: str
    cluster: bool
    prefix: str
    database: str
    lease: float

    @property
    def status_key(self) -> str:
        """The Redis key with the order's status; on a Cluster in the order's slot."""
        return f"{self.prefix}:status:{{{ORDER}}}"

    @property
    def lock_key(self) -> str:
        """The ordinary lock of the run without tokens."""
        return f"{self.prefix}:plain-lock"

    def connect(self) -> Any:
        """A client; the caller closes it."""
        from redis import Redis, RedisCluster

        return RedisCluster.from_url(self.url) if self.cluster else Redis.from_url(self.url)

    def result(self) -> dict[str, str]:
        """What this worker's run of the job results in."""
        return {"parcel": f"{self.name}-7"}


class Fenced:
    """The job with fencekit: every write carries the token of the claim."""

    def __init__(self, setup: Setup) -> None:
        client = setup.connect()
        self.setup = setup
        self.guard = IdempotencyGuard(
            client, prefix=setup.prefix, label=f"worker {setup.name}", retention=KEEP
        )
        self.gate = FenceGate(client, prefix=setup.prefix, retention=KEEP)
        self.rows = sqlite3.connect(setup.database, isolation_level=None)

    def begin(self) -> Iterator[Report]:
        """Start the job, or say who runs it, or return the remembered result."""
        try:
            claim = self.guard.begin(JOB, ttl=KEEP, lease=self.setup.lease, lock=ORDER)
        except LockNotAcquired as busy:
            yield {"what": "busy", "left": busy.retry_after}
            return
        if claim.started:
            assert claim.token is not None
            self.claim, self.token = claim, claim.token
            yield {"what": "begun", "token": self.token.value, "attempts": claim.attempts}
        elif claim.has_result:
            yield {"what": "replayed", "result": claim.result}
        else:
            yield {"what": "busy", "left": claim.retry_after}

    def write(self, status: str) -> Iterator[Report]:
        """Write to both stores. A careful worker would ask ``claim.check()`` first; this one, like
        code that was frozen between two lines, does not."""
        yield self.write_to_redis(self.token, status)
        yield self.write_to_sqlite(self.token, status)

    def write_to_redis(self, token: FenceToken, status: str) -> Report:
        """The gate compares and writes in one step on the server."""
        try:
            self.gate.set_if_fresh(token, self.setup.status_key, status, ttl=KEEP)
        except FencedOutError as refused:
            return written("Redis", status, False, token.value, refused.current)
        return written("Redis", status, True, token.value)

    def write_to_sqlite(self, token: FenceToken, status: str) -> Report:
        """No row changed means: refused."""
        done = self.rows.execute(FENCED_UPDATE, {"status": status, "token": token.value})
        if done.rowcount == 0:
            (newest,) = self.rows.execute("SELECT fence FROM orders WHERE id = 7").fetchone()
            return written("SQLite", status, False, token.value, newest)
        return written("SQLite", status, True, token.value)

    def finish(self) -> Iterator[Report]:
        """Store the result, which also frees the job's lock."""
        try:
            self.guard.finish(self.claim, self.setup.result())
        except IdempotencyNotOwned as late:
            yield {"what": "not finished", "result": late.result}
        else:
            yield {"what": "finished", "result": self.setup.result()}


class Unfenced:
    """The same job with an ordinary lock, as it is often written: nothing carries a token."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.client = setup.connect()
        self.rows = sqlite3.connect(setup.database, isolation_level=None)

    def begin(self) -> Iterator[Report]:
        """Take the lock."""
        key, milliseconds = self.setup.lock_key, int(self.setup.lease * 1000)
        if self.client.set(key, self.setup.name, nx=True, px=milliseconds):
            yield {"what": "begun"}
        else:
            yield {"what": "busy", "left": max(0, self.client.pttl(key)) / 1000}

    def write(self, status: str) -> Iterator[Report]:
        """Write to both stores, which have no reason to refuse."""
        self.client.set(self.setup.status_key, status, ex=int(KEEP))
        yield written("Redis", status, True)
        self.rows.execute(UNFENCED_UPDATE, {"status": status})
        yield written("SQLite", status, True)

    def finish(self) -> Iterator[Report]:
        """Give the lock back if it is still ours; nothing is remembered."""
        own = self.client.get(self.setup.lock_key) in (self.setup.name, self.setup.name.encode())
        if own:
            self.client.delete(self.setup.lock_key)
        yield {"what": "finished", "freed": own}


def written(
    store: str, value: str, accepted: bool, token: int | None = None, newest: int | None = None
) -> Report:
    """The report of one write."""
    return {
        "what": "write",
        "store": store,
        "value": value,
        "accepted": accepted,
        "token": token,
        "newest": newest,
    }


def main() -> None:
    """Obey stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    setup = Setup(**json.loads(sys.stdin.readline()))
    job = Fenced(setup) if setup.safe else Unfenced(setup)
    _report({"what": "end"})
    for line in sys.stdin:
        verb, _, value = line.rstrip("\n").partition(" ")
        try:
            reports = job.write(value) if verb == "write" else getattr(job, verb)()
            for report in reports:
                _report(report)
        except Exception as error:
            _report({"what": "error", "text": f"{type(error).__name__}: {error}"})
        _report({"what": "end"})


def _report(report: Report) -> None:
    print(json.dumps({"at": time.time(), **report}), flush=True)


if __name__ == "__main__":
    main()
