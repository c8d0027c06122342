"""Very many coroutines: each with a lock of its own, or all in line for one."""

from __future__ import annotations

import asyncio
import collections
import time
import tracemalloc
from typing import Any

from .loop import run

ONE = "benchmark:one"


def distinct(bench: Any, n: int) -> dict[str, Any]:
    """So many coroutines take a lock each, hold it until all have theirs, and give it back."""
    return run(_crowd(bench, [f"benchmark:own:{number}" for number in range(n)], 0, True))


def same(bench: Any, n: int, patience: float) -> dict[str, Any]:
    """So many coroutines stand in line for one lock and give it back at once."""
    return run(_crowd(bench, [ONE] * n, patience, False))


async def _crowd(bench: Any, names: list[str], wait: float, keep: bool) -> dict[str, Any]:
    errors: collections.Counter[str] = collections.Counter()
    done = asyncio.Event()
    arrived = [0]

    async def one(name: str) -> None:
        try:
            held = await bench.acquire(name, wait)
        except Exception as error:
            errors[type(error).__name__] += 1
            held = None
        arrived[0] += 1
        if keep:
            if arrived[0] == len(names):
                done.set()
            await done.wait()
        if held is not None:
            try:
                await bench.release(held)
            except Exception as error:
                errors[type(error).__name__] += 1

    started = time.perf_counter()
    await asyncio.gather(*map(one, names))
    return {"seconds": time.perf_counter() - started, "errors": dict(errors)}


def memory(bench: Any, n: int, one_lock: bool) -> float:
    """Bytes of this process for each waiter or holder, its task included (tracemalloc)."""
    return run(_memory(bench, n, one_lock))


async def _memory(bench: Any, n: int, one_lock: bool) -> float:
    first = await bench.acquire(ONE)
    come, full = asyncio.Event(), asyncio.Event()
    here = [0]

    async def stand(number: int) -> None:
        held = await bench.acquire(ONE if one_lock else f"benchmark:own:{number}", 600 * one_lock)
        here[0] += 1
        if here[0] == n:
            full.set()
        try:
            await come.wait()
        finally:
            await bench.release(held)

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tasks = [asyncio.ensure_future(stand(number)) for number in range(n)]
    if one_lock:
        await asyncio.sleep(0.5 + n / 5000)
    else:
        await asyncio.wait_for(full.wait(), 100)
    each = (tracemalloc.get_traced_memory()[0] - before) / n
    tracemalloc.stop()
    if one_lock:
        for task in tasks:
            task.cancel()
    come.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await bench.release(first)
    return each


def line(bench: Any, n: int, hold: float) -> list[float]:
    """Take part in a crowd of several processes; when each of the ``n`` here got the lock."""
    return run(_line(bench, n, hold))


async def _line(bench: Any, n: int, hold: float) -> list[float]:
    async def one() -> float:
        held = await bench.acquire(ONE, 300)
        at = time.perf_counter()
        await asyncio.sleep(hold)
        await bench.release(held)
        return at

    return list(await asyncio.gather(*(one() for _ in range(n))))
