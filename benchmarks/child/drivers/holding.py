"""Ten thousand leases in one process, kept by fencekit's heartbeat."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import redis
import redis.asyncio

from fencekit import AsyncLock, DistributedLock
from fencekit.events import Lost, RenewalFailed

from .loop import run


class _Watch:
    """What a listener hears, what this process spends, and what the server does meanwhile."""

    def __init__(self, url: str) -> None:
        self.lost = self.failed = 0
        self._client: Any = redis.Redis.from_url(url)

    def __call__(self, event: object) -> None:
        self.lost += isinstance(event, Lost)
        self.failed += isinstance(event, RenewalFailed)

    def start(self) -> None:
        self._commands = self._calls()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def stop(self, handles: list[Any]) -> dict[str, Any]:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        commands = {
            name: count - self._commands.get(name, 0) for name, count in self._calls().items()
        }
        return {
            "cpu": cpu,
            "wall": wall,
            "held": sum(handle.state.value == "held" for handle in handles),
            "lost": self.lost,
            "failed": self.failed,
            "commands": commands,
        }

    def _calls(self) -> dict[str, int]:
        stats = self._client.info("commandstats")
        return {name.removeprefix("cmdstat_"): int(row["calls"]) for name, row in stats.items()}


def blocking(url: str, n: int, ttl: float, seconds: float) -> dict[str, Any]:
    """Hold them in a thread that sleeps; the heartbeat is another thread."""
    watch = _Watch(url)
    with redis.Redis.from_url(url) as client, ExitStack() as stack:
        lock = DistributedLock(client, listeners=[watch])
        handles = [
            stack.enter_context(lock.hold(f"benchmark:held:{number}", ttl=ttl))
            for number in range(n)
        ]
        watch.start()
        time.sleep(seconds)
        answer = watch.stop(handles)
    return answer


def coroutines(url: str, n: int, ttl: float, seconds: float) -> dict[str, Any]:
    """Hold them in one task each; the heartbeat is a task too."""
    return run(_coroutines(url, n, ttl, seconds))


async def _coroutines(url: str, n: int, ttl: float, seconds: float) -> dict[str, Any]:
    watch = _Watch(url)
    full, over = asyncio.Event(), asyncio.Event()
    handles: list[Any] = []
    async with AsyncExitStack() as stack:
        client = redis.asyncio.Redis.from_url(url)
        stack.push_async_callback(client.aclose)
        lock = AsyncLock(client, listeners=[watch])

        async def one(number: int) -> None:
            async with lock.hold(f"benchmark:held:{number}", ttl=ttl) as handle:
                handles.append(handle)
                if len(handles) == n:
                    full.set()
                await over.wait()

        tasks = [asyncio.ensure_future(one(number)) for number in range(n)]
        await asyncio.wait_for(full.wait(), 100)
        watch.start()
        await asyncio.sleep(seconds)
        answer = watch.stop(handles)
        over.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answer
