"""Drivers that time an operation: one after another, in threads, as coroutines at once.

All of them answer with seconds per operation. The collector is off while the clock runs, and names
are made before.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .loop import run
from .quiet import quiet

# A process that slept through the others' chunks finds its caches cold.
WARM_UP, WARM_SECONDS = 20, 0.03
# One name lives through many operations where the case is about a resource that is used again;
# nobody else has it.
SAME = f"benchmark:resource:{os.getpid():08d}"
# As long as what fencekit.idempotency_key makes.
ONCE = "orders:" + 4 * "0123456789abcdef"

_numbers = itertools.count()


def _names(n: int, fresh: bool) -> list[str]:
    return (
        [f"benchmark:job:{os.getpid():08d}:{next(_numbers):07d}" for _ in range(n)]
        if fresh
        else [SAME] * n
    )


def _operation(bench: Any, op: str) -> Callable[[str], Any]:
    """What is timed. A pair is the two halves of a lock's life."""
    if op != "pair":
        found: Callable[[str], Any] = getattr(bench, op)
        return found
    acquire, release = bench.acquire, bench.release
    if not bench.ASYNC:
        return lambda name: release(acquire(name))

    async def pair(name: str) -> None:
        await release(await acquire(name))

    return pair


def ready(bench: Any, op: str, names: list[str]) -> None:
    """Let a limit make its arguments for these names before the clock runs."""
    if hasattr(bench, "prepare"):
        made = bench.prepare(op, sorted(set(names)))
        if bench.ASYNC:
            run(made)


def _loop(bench: Any, operation: Callable[[str], Any], names: list[str]) -> float:
    if not bench.ASYNC:
        started = time.perf_counter()
        for name in names:
            operation(name)
        return time.perf_counter() - started

    async def one_by_one() -> float:
        started = time.perf_counter()
        for name in names:
            await operation(name)
        return time.perf_counter() - started

    return run(one_by_one())


def loop(bench: Any, op: str, n: int, budget: float, fresh: bool = False) -> float:
    """``n`` operations one after another, fewer if they would take longer than ``budget``."""
    operation = _operation(bench, op)
    names = _names(WARM_UP, fresh)
    ready(bench, op, names)
    spent: list[float] = []
    for name in names:
        spent.append(_loop(bench, operation, [name]))
        if sum(spent[1:]) > WARM_SECONDS:
            break
    each = min(spent)
    names = _names(max(1, min(n, int(budget / each))), fresh)
    ready(bench, op, names)
    with quiet():
        return _loop(bench, operation, names) / len(names)


def repeat(bench: Any, op: str, n: int, fresh: bool = False) -> None:
    """``n`` operations, not timed: for who looks at what the server spends."""
    names = _names(n, fresh)
    ready(bench, op, names)
    _loop(bench, _operation(bench, op), names)


def once(bench: Any, op: str) -> None:
    """One operation, not timed: for who looks at what it leaves on the server."""
    ready(bench, op, [ONCE])
    _loop(bench, _operation(bench, op), [ONCE])


def threads(bench: Any, op: str, n: int, count: int) -> float:
    """``n`` operations by each of ``count`` threads, each on a resource of its own."""
    operation = _operation(bench, op)
    names = [f"benchmark:thread:{os.getpid()}:{number}" for number in range(count)]
    ready(bench, op, names)
    gate = threading.Barrier(count + 1)
    ends: list[float] = []
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            operation(name)
            gate.wait(60)
            for _ in range(n):
                operation(name)
            ends.append(time.perf_counter())
        except Exception as error:
            errors.append(error)
            gate.abort()

    workers = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
    with quiet():
        for worker in workers:
            worker.start()
        try:
            gate.wait(60)
        except threading.BrokenBarrierError:
            if not errors:
                raise
        started = time.perf_counter()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return (max(ends) - started) / (n * count)


def gather(bench: Any, n: int, count: int) -> float:
    """``n`` pairs by each of ``count`` coroutines at once, each on a resource of its own."""
    names = [f"benchmark:task:{os.getpid()}:{number}" for number in range(count)]
    ready(bench, "pair", names)
    together = getattr(bench, "together", None)
    pair = _operation(bench, "pair")

    async def work(name: str) -> None:
        for _ in range(n):
            await pair(name)

    async def all_at_once() -> float:
        await (together(names) if together else asyncio.gather(*map(pair, names)))
        with quiet():
            started = time.perf_counter()
            if together:
                for _ in range(n):
                    await together(names)
            else:
                await asyncio.gather(*map(work, names))
            return time.perf_counter() - started

    return run(all_at_once()) / (n * count)
