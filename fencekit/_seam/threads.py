"""The blocking half of the seam, on threads (or greenlets, where gevent has patched threading)."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster

from fencekit import _policy
from fencekit._seam import shared
from fencekit._seam.threads_wire import Link, check_adopted

T = TypeVar("T")
NAME = "sync"

__all__ = [
    "Event", "Link", "Scope", "Worker", "call", "check_adopted", "check_client", "check_function",
    "current_task", "decorate", "identity", "protected", "sleep",
]  # fmt: skip


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class Event:
    """Something to wait for, with a limit."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def wait(self, timeout: float | None) -> bool:
        """Wait for `timeout` seconds, or without end; False when nobody set it."""
        if timeout is not None:
            timeout = min(max(0.0, timeout), threading.TIMEOUT_MAX)
        return self._event.wait(timeout)


class Worker:
    """A background thread. It dies with the process."""

    def __init__(self, main: Callable[[], Any], name: str) -> None:
        self._thread = threading.Thread(target=main, name=f"fencekit-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


class Scope:
    """A block that, in a thread, cannot be cancelled from outside: its body has to ask."""

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *exc: object) -> Literal[False]:
        return False

    def cancel(self) -> None:
        """Nothing can be done; `handle.check()` tells the body."""


def protected(function: Callable[[float], T], timeout: float) -> T:
    """Run to the end: nobody can cancel a thread, so the function bounds itself."""
    return function(timeout)


def current_task() -> object:
    """Who is asking: used to notice that the asker waits for itself."""
    return threading.current_thread()


def check_client(client: object, user: str) -> None:
    """TypeError unless the client is one that blocks."""
    if isinstance(client, (AsyncRedis, AsyncRedisCluster)):
        raise TypeError(
            f"{user} needs a redis.Redis client, not {type(client).__module__}."
            f"{type(client).__name__}: use redis.Redis, or the class with 'Async' in its name"
        )
    if not isinstance(client, (redis.Redis, redis.RedisCluster)):
        raise TypeError(f"{user} needs a redis.Redis client, not {type(client).__name__}")


def identity(client: Any) -> tuple[int, int, int]:
    """What a backend may be shared by: the pool and the process."""
    pool = getattr(client, "connection_pool", client)
    return (id(pool), 0, _policy.pid())


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's."""
    return shared.finished(function(*args, **kwargs))


def check_function(function: Any, user: str) -> None:
    """TypeError for what cannot be run once and remembered."""
    target = shared.function_behind(function)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise TypeError(f"{user} cannot guard a generator: its result is not one value")
    if inspect.iscoroutinefunction(target):
        raise TypeError(f"{user} cannot run a coroutine function: use AsyncGuard")
    if not callable(function):
        raise TypeError(f"{user} guards a function, not {type(function).__name__}")


def decorate(run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function that passes its arguments on to `run`."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    return guarded
