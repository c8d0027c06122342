"""Doing several things at once, for tests in an event loop; tests/threads.py is its twin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fencekit._policy import now
from tests.site import OPTIONS, reached

__all__ = ["BlockingConnectionPool", "ConnectionPool", "Redis"]

NAME = "async"
COROUTINES = True
"""Whether what this half decorates becomes a coroutine function."""


class Running:
    """A call that goes on in the background."""

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self._task = asyncio.ensure_future(function())

    @property
    def done(self) -> bool:
        return self._task.done()

    async def result(self, timeout: float = 20.0) -> Any:
        """What it returned or raised."""
        return await asyncio.wait_for(self._task, timeout)


async def together(functions: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Run all at once; their results, or what they raised."""
    return await asyncio.gather(*(function() for function in functions), return_exceptions=True)


async def until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Wait for a plain condition to come true; fail when it does not."""
    end = now() + timeout
    while not condition():
        assert now() < end, f"did not come true within {timeout} s"
        await asyncio.sleep(0.005)


def client_of(site: Any, **options: Any) -> Any:
    """A client of this half's kind."""
    return site.aio_client(**options)


def client_before(servers: Any, **options: Any) -> Any:
    """A client of this half's kind for a server, proxy or cluster of the test's own."""
    return reached(servers).async_client(**{**OPTIONS, **options})


def plain_client_before(servers: Any, **options: Any) -> Any:
    """The same, without redis-py's own repeats."""
    return client_before(servers, retry=Retry(NoBackoff(), 0), **options)


def master_client_of(group: Any, **options: Any) -> Any:
    """A client of this half's kind for the master of a Sentinel group."""
    return group.async_master_client(**{**OPTIONS, **options})


def client_at(url: str, **options: Any) -> Any:
    """A client of this half's kind for a URL."""
    return Redis.from_url(url, **{**OPTIONS, **options})


def client_without_server() -> Any:
    """A client of this half's kind for a port that nobody listens on."""
    return Redis(port=1, retry=Retry(NoBackoff(), 0))


def main(function: Callable[..., Any], *args: Any) -> Any:
    """Run a whole program of this half's kind."""
    return asyncio.run(function(*args))


async def close(client: Any) -> None:
    """Close it, whatever its version calls that."""
    await getattr(client, "aclose", client.close)()
