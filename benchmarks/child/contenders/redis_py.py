"""The lock that redis-py brings, without and with ``await``."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio


class Blocking:
    ASYNC = False

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url)

    def close(self) -> None:
        self.client.close()

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.client.lock(name, timeout=30)
        if not lock.acquire(blocking=wait > 0, blocking_timeout=wait or None):
            raise TimeoutError(name)
        return lock

    def release(self, held: Any) -> None:
        held.release()


class Async:
    ASYNC = True

    def __init__(self, url: str) -> None:
        self.client: Any = redis.asyncio.Redis.from_url(url)

    async def close(self) -> None:
        await self.client.aclose()

    async def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.client.lock(name, timeout=30)
        if not await lock.acquire(blocking=wait > 0, blocking_timeout=wait or None):
            raise TimeoutError(name)
        return lock

    async def release(self, held: Any) -> None:
        await held.release()
