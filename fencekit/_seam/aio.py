"""The asynchronous half of the seam, on anyio and asyncio."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from fencekit import _policy
from fencekit._seam import shared
from fencekit._seam.aio_link import Link
from fencekit._seam.aio_sources import check_adopted

T = TypeVar("T")
NAME = "async"

__all__ = [
    "Event", "Link", "Scope", "Worker", "call", "check_adopted", "check_client", "check_function",
    "current_task", "decorate", "identity", "protected", "sleep",
]  # fmt: skip

sleep = anyio.sleep


class Event:
    """Something to wait for, with a limit. Set it in the loop it is waited for in."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self, timeout: float | None) -> bool:
        """Wait for `timeout` seconds, or without end; False when nobody set it."""
        if timeout is None:
            await self._event.wait()
            return True
        with anyio.move_on_after(max(0.0, timeout)):
            await self._event.wait()
        return self._event.is_set()


class Worker:
    """A background task of the running loop. It dies with the loop."""

    def __init__(self, main: Callable[[], Any], name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(main(), name=f"fencekit-{name}")
        self._task.add_done_callback(_look_at)

    @property
    def alive(self) -> bool:
        return not self._task.done()


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class Scope:
    """A block that can be cancelled from outside, from any thread."""

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()
        self._cancelling = _cancelling()

    def __enter__(self) -> Scope:
        self._scope.__enter__()
        return self

    def __exit__(self, *exc: Any) -> bool:
        # A cancellation from elsewhere that came at the same time is not this scope's to end.
        return bool(self._scope.__exit__(*exc)) and _cancelling() <= self._cancelling

    def cancel(self) -> None:
        try:
            running = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            running = False
        if running:
            self._scope.cancel()
        else:
            self._loop.call_soon_threadsafe(self._scope.cancel)


def _cancelling() -> int:
    """How many cancellations the current task was asked for and has not dealt with."""
    task = asyncio.current_task()
    if sys.version_info < (3, 11) or task is None:
        return 0
    return task.cancelling()


async def protected(function: Callable[[float], Awaitable[T]], timeout: float) -> T:
    """Run to the end though the caller is cancelled; then pass the cancellation on.

    `function` is told the seconds to which it has to bound itself. Here that is done from outside:
    raises TimeoutError when it took longer than `timeout`.
    """
    started = False

    async def run() -> T:
        nonlocal started
        started = True
        return await function(math.inf)

    task = asyncio.ensure_future(run())
    cancelled: asyncio.CancelledError | None = None
    until, late = _policy.now() + timeout, False
    with anyio.CancelScope(shield=True):
        while not task.done() or not started:
            if task.done():  # a closing loop cancels every task, also one that has not begun
                task = asyncio.ensure_future(run())
            left = until - _policy.now()
            if left <= 0:
                if late:
                    break
                until, late = until + 1.0, True
                task.cancel()
                continue
            try:
                await asyncio.wait({task}, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        if task.done() and not task.cancelled():
            task.exception()
        raise cancelled
    if not task.done() or task.cancelled():
        raise TimeoutError(f"not done within {timeout:g} s")
    return task.result()


def current_task() -> object:
    """Who is asking: used to notice that the asker waits for itself."""
    return asyncio.current_task()


def check_client(client: object, user: str) -> None:
    """TypeError unless the client is one that can be awaited."""
    if isinstance(client, (Redis, RedisCluster)):
        return
    if isinstance(client, (redis.Redis, redis.RedisCluster)):
        raise TypeError(
            f"{user} needs a redis.asyncio client, not {type(client).__module__}."
            f"{type(client).__name__}: use redis.asyncio.Redis, or the class without 'Async'"
        )
    raise TypeError(f"{user} needs a redis.asyncio.Redis client, not {type(client).__name__}")


def identity(client: Any) -> tuple[int, int, int]:
    """What a backend may be shared by: the pool, the loop and the process."""
    pool = getattr(client, "connection_pool", client)
    return (id(pool), id(asyncio.get_running_loop()), _policy.pid())


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's, plain or a coroutine function."""
    result = function(*args, **kwargs)
    if inspect.isawaitable(result):
        return await result
    return shared.finished(result)


def check_function(function: Any, user: str) -> None:
    """TypeError for what cannot be run once and remembered."""
    target = shared.function_behind(function)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise TypeError(f"{user} cannot guard a generator: its result is not one value")
    if not callable(function):
        raise TypeError(f"{user} guards a function, not {type(function).__name__}")


def decorate(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[Any]],
) -> Callable[..., Any]:
    """A function that passes its arguments on to `run`."""

    async def guarded(*args: Any, **kwargs: Any) -> Any:
        return await run(args, kwargs)

    return guarded
