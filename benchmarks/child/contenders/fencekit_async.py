"""fencekit with ``await``."""

from __future__ import annotations

import os
from typing import Any

import redis.asyncio

from fencekit import AsyncFenceGate, AsyncGuard, AsyncLock

MEMO = "x" * 18
"""Twenty bytes as JSON."""
GATE = f"gate:{os.getpid():08d}"


class Async:
    """The three pieces on one client."""

    ASYNC = True

    def __init__(
        self, url: str, retention: float = 604800, ttl: float = 86400, lease: float = 30
    ) -> None:
        self.client: Any = redis.asyncio.Redis.from_url(url)
        self.lock = AsyncLock(self.client, retention=retention)
        self.guard = AsyncGuard(self.client, retention=retention)
        self.gate = AsyncFenceGate(self.client, retention=retention)
        self.ttl, self.lease = ttl, lease
        self.handle: Any = None

    async def close(self) -> None:
        await self.client.aclose()

    async def acquire(self, name: str, wait: float = 0) -> Any:
        return await self.lock.acquire(name, wait=wait, ttl=self.lease)

    async def release(self, held: Any) -> None:
        await self.lock.release(held)

    async def job(self, name: str) -> None:
        claim = await self.guard.begin(name, lock=name, ttl=self.ttl, lease=self.lease)
        await self.guard.finish(claim, MEMO)

    async def work(self, name: str) -> None:
        """A job that takes no lock."""
        claim = await self.guard.begin(name, ttl=self.ttl, lease=self.lease)
        await self.guard.finish(claim, MEMO)

    async def prepare(self, op: str, names: list[str]) -> None:
        if op == "write" and self.handle is None:
            self.handle = await self.lock.acquire(GATE, ttl=3600)

    async def write(self, name: str) -> None:
        await self.gate.set_if_fresh(self.handle.token, f"{GATE}:status", "x" * 20)
