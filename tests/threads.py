"""Doing several things at once, for tests in threads; tests/aio.py is its twin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from redis import BlockingConnectionPool, ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fencekit._policy import now
from tests.site import OPTIONS, reached

__all__ = ["BlockingConnectionPool", "ConnectionPool", "Redis"]

NAME = "sync"
COROUTINES = False
"""Whether what this half decorates becomes a coroutine function."""


class Running:
    """A call that goes on in the background."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = [self._function(), None]
        except BaseException as error:
            self._outcome = [None, error]

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float = 20.0) -> Any:
        """What it returned or raised."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("still running")
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def together(functions: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all at once; their results, or what they raised."""
    results = []
    for running in [Running(function) for function in functions]:
        try:
            results.append(running.result(60.0))
        except BaseException as error:
            results.append(error)
    return results


def until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Wait for a plain condition to come true; fail when it does not."""
    end = now() + timeout
    while not condition():
        assert now() < end, f"did not come true within {timeout} s"
        time.sleep(0.005)


def client_of(site: Any, **options: Any) -> Any:
    """A client of this half's kind."""
    return site.threads_client(**options)


def client_before(servers: Any, **options: Any) -> Any:
    """A client of this half's kind for a server, proxy or cluster of the test's own."""
    return reached(servers).client(**{**OPTIONS, **options})


def plain_client_before(servers: Any, **options: Any) -> Any:
    """The same, without redis-py's own repeats."""
    return client_before(servers, retry=Retry(NoBackoff(), 0), **options)


def master_client_of(group: Any, **options: Any) -> Any:
    """A client of this half's kind for the master of a Sentinel group."""
    return group.master_client(**{**OPTIONS, **options})


def client_at(url: str, **options: Any) -> Any:
    """A client of this half's kind for a URL."""
    return Redis.from_url(url, **{**OPTIONS, **options})


def client_without_server() -> Any:
    """A client of this half's kind for a port that nobody listens on."""
    return Redis(port=1, retry=Retry(NoBackoff(), 0))


def main(function: Callable[..., Any], *args: Any) -> Any:
    """Run a whole program of this half's kind."""
    return function(*args)


def close(client: Any) -> None:
    """Close it."""
    client.close()
