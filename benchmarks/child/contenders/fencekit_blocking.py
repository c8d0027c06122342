"""fencekit without ``await``."""

from __future__ import annotations

import os
from typing import Any

import redis

from fencekit import DistributedLock, FenceGate, IdempotencyGuard

MEMO = "x" * 18
"""Twenty bytes as JSON."""
GATE = f"gate:{os.getpid():08d}"


class Blocking:
    """The three pieces on one client."""

    ASYNC = False

    def __init__(
        self, url: str, retention: float = 604800, ttl: float = 86400, lease: float = 30
    ) -> None:
        self.client: Any = redis.Redis.from_url(url)
        self.lock = DistributedLock(self.client, retention=retention)
        self.guard = IdempotencyGuard(self.client, retention=retention)
        self.gate = FenceGate(self.client, retention=retention)
        self.ttl, self.lease = ttl, lease
        self.handle: Any = None

    def close(self) -> None:
        self.client.close()

    def acquire(self, name: str, wait: float = 0) -> Any:
        return self.lock.acquire(name, wait=wait, ttl=self.lease)

    def release(self, held: Any) -> None:
        self.lock.release(held)

    def job(self, name: str) -> None:
        claim = self.guard.begin(name, lock=name, ttl=self.ttl, lease=self.lease)
        self.guard.finish(claim, MEMO)

    def work(self, name: str) -> None:
        """A job that takes no lock."""
        claim = self.guard.begin(name, ttl=self.ttl, lease=self.lease)
        self.guard.finish(claim, MEMO)

    def prepare(self, op: str, names: list[str]) -> None:
        if op == "write" and self.handle is None:
            self.handle = self.lock.acquire(GATE, ttl=3600)

    def write(self, name: str) -> None:
        self.gate.set_if_fresh(self.handle.token, f"{GATE}:status", "x" * 20)
