"""A process that stands in line many times; tests/_async/test_waiting.py starts several.

    python tests/waiting_worker.py URL sync|async WAITERS

Says "ready", begins when it reads a line, and tells how often it had the lock for itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import redis
import redis.asyncio

from fencekit import AsyncLock, DistributedLock


def in_threads(url: str, waiters: int) -> int:
    client = redis.Redis.from_url(url)
    lock = DistributedLock(client)
    client.ping()
    alone: list[bool] = []

    def visit() -> None:
        with lock.hold("a", ttl=30, wait=50):
            alone.append(client.incr("inside") == 1)
            time.sleep(0.01)
            client.decr("inside")

    begin()
    threads = [threading.Thread(target=visit) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    return sum(alone)


async def in_a_loop(url: str, waiters: int) -> int:
    client = redis.asyncio.Redis.from_url(url)
    lock = AsyncLock(client)
    await client.ping()
    alone: list[bool] = []

    async def visit() -> None:
        async with lock.hold("a", ttl=30, wait=50):
            alone.append(await client.incr("inside") == 1)
            await asyncio.sleep(0.01)
            await client.decr("inside")

    begin()
    await asyncio.gather(*(visit() for _ in range(waiters)))
    await getattr(client, "aclose", client.close)()
    return sum(alone)


def begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    _, url, half, waiters = sys.argv
    if half == "async":
        count = asyncio.run(in_a_loop(url, int(waiters)))
    else:
        count = in_threads(url, int(waiters))
    print(f"{count} had it alone")
