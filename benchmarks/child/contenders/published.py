"""fencekit 0.6.1 as it was published: the interface that this one keeps."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import redis

import fencekit

TTL = timedelta(seconds=30)
DAY = timedelta(days=1)
MEMO = "x" * 18
GATE = f"gate:{os.getpid():08d}"


class Blocking:
    ASYNC = False

    def __init__(self, url: str) -> None:
        if not fencekit.__version__.startswith("0.6."):
            raise RuntimeError(f"this is fencekit {fencekit.__version__}, not 0.6.1")
        self.client: Any = redis.Redis.from_url(url)
        self.lock: Any = fencekit.DistributedLock(self.client)
        self.guard: Any = fencekit.IdempotencyGuard(self.client)
        self.gate: Any = fencekit.FenceGate(self.client)
        self.handle: Any = None

    def close(self) -> None:
        self.client.close()

    def acquire(self, name: str, wait: float = 0) -> Any:
        if wait:
            return self.lock.acquire(name, ttl=TTL, blocking=True, wait=timedelta(seconds=wait))
        return self.lock.acquire(name, ttl=TTL)

    def release(self, held: Any) -> None:
        self.lock.release(held)

    def job(self, name: str) -> None:
        """What its documentation shows, in six round trips at most."""
        if not self.guard.try_begin(name, ttl=DAY):
            raise RuntimeError(f"{name} was begun before")
        handle = self.lock.acquire(name, ttl=TTL)
        try:
            self.guard.mark_done(name, result=MEMO)
        finally:
            self.lock.release(handle)

    def prepare(self, op: str, names: list[str]) -> None:
        if op == "write" and self.handle is None:
            self.handle = self.lock.acquire(GATE, ttl=timedelta(hours=1))

    def write(self, name: str) -> None:
        self.gate.set_if_fresh(self.handle.token, f"{GATE}:status", "x" * 20)
