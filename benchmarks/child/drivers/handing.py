"""Handing a lock over: from just before a release to the return of the next holder's acquire.

``time.perf_counter`` is the system's monotonic clock, so times of two processes compare.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from typing import Any

from .loop import run
from .quiet import quiet
from .timing import ready

PATIENCE = 30.0
RESTED = "benchmark:rested"

_held: list[Any] = []


def hold(bench: Any, name: str) -> None:
    """Take the lock and keep it until ``release``."""
    made = bench.acquire(name, PATIENCE)
    _held.append(run(made) if bench.ASYNC else made)


def release(bench: Any) -> float:
    """Give it back; the time just before."""
    held = _held.pop()
    if bench.ASYNC:
        return run(_release(bench, held))
    before = time.perf_counter()
    bench.release(held)
    return before


async def _release(bench: Any, held: Any) -> float:
    before = time.perf_counter()
    await bench.release(held)
    return before


def wait(bench: Any, name: str) -> float:
    """Stand in line; the time of the return. The lock is given back after that."""
    if bench.ASYNC:
        return run(_wait(bench, name))
    held = bench.acquire(name, PATIENCE)
    after = time.perf_counter()
    bench.release(held)
    return after


async def _wait(bench: Any, name: str) -> float:
    held = await bench.acquire(name, PATIENCE)
    after = time.perf_counter()
    await bench.release(held)
    return after


def _wait_in_thread(bench: Any, name: str, got: list[float]) -> None:
    got.append(wait(bench, name))


def rested(bench: Any, n: int, low: float, high: float) -> float:
    """One acquire after as long a rest as a hand-over comes after: the median of ``n``."""
    ready(bench, "pair", [RESTED])
    with quiet():
        found = run(_rested(bench, n, low, high)) if bench.ASYNC else []
        for _ in range(0 if found else n):
            time.sleep(random.uniform(low, high))
            before = time.perf_counter()
            held = bench.acquire(RESTED)
            found.append(time.perf_counter() - before)
            bench.release(held)
    return statistics.median(found)


async def _rested(bench: Any, n: int, low: float, high: float) -> list[float]:
    found = []
    for _ in range(n):
        await asyncio.sleep(random.uniform(low, high))
        before = time.perf_counter()
        held = await bench.acquire(RESTED)
        found.append(time.perf_counter() - before)
        await bench.release(held)
    return found


def within(bench: Any, url: str, n: int, low: float, high: float) -> list[float]:
    """``n`` times between two clients of this process, the waiter having waited a random while."""
    other = type(bench)(url)
    with quiet():
        if bench.ASYNC:
            return run(_within_loop(bench, other, n, low, high))
        return _within_threads(bench, other, n, low, high)


def _within_threads(bench: Any, other: Any, n: int, low: float, high: float) -> list[float]:
    found: list[float] = []
    for number in range(n):
        name = f"benchmark:hand:{number % 2}"
        held = bench.acquire(name)
        got: list[float] = []
        waiter = threading.Thread(target=_wait_in_thread, args=(other, name, got))
        waiter.start()
        time.sleep(random.uniform(low, high))
        before = time.perf_counter()
        bench.release(held)
        waiter.join(PATIENCE)
        found.append(got[0] - before)
    other.close()
    return found


async def _within_loop(bench: Any, other: Any, n: int, low: float, high: float) -> list[float]:
    found: list[float] = []
    for number in range(n):
        name = f"benchmark:hand:{number % 2}"
        held = await bench.acquire(name)
        waiter = asyncio.ensure_future(_wait(other, name))
        await asyncio.sleep(random.uniform(low, high))
        before = time.perf_counter()
        await bench.release(held)
        found.append(await waiter - before)
    await other.close()
    return found


def crowded(bench: Any, n: int, waiters: int) -> list[float]:
    """``n`` hand-overs while so many coroutines stand in line, each going back to its end."""
    with quiet():
        return run(_crowded(bench, n, waiters))


async def _crowded(bench: Any, n: int, waiters: int) -> list[float]:
    found: list[float] = []
    name, released = "benchmark:crowd", [0.0]
    first = await bench.acquire(name)

    async def stand() -> None:
        while len(found) < n:
            held = await bench.acquire(name, PATIENCE)
            found.append(time.perf_counter() - released[0])
            await asyncio.sleep(0)
            released[0] = time.perf_counter()
            await bench.release(held)

    tasks = [asyncio.ensure_future(stand()) for _ in range(waiters)]
    await asyncio.sleep(0.2 + waiters / 2000)
    released[0] = time.perf_counter()
    await bench.release(first)
    await asyncio.gather(*tasks)
    return found[:n]
