"""What groups of servers share: starting and stopping together, and waiting for them to agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ._binary import ServerError
from .servers import RedisServer


def wait_until(
    true: Callable[[], bool], timeout: float, what: str, servers: Sequence[RedisServer] = ()
) -> None:
    """Ask until the answer is yes; raise `ServerError`, with the servers' logs, when time is up.

    A client's errors count as no: servers that are about to agree drop connections.
    """
    from redis.exceptions import RedisError

    end = time.monotonic() + timeout
    last: Exception | None = None
    while True:
        try:
            if true():
                return
        except (RedisError, OSError) as error:
            last = error
        if time.monotonic() >= end:
            logs = "\n".join(f"{server!r} said:\n{server.log()[-1000:]}" for server in servers)
            raise ServerError(f"{what} did not happen within {timeout} s ({last}).\n{logs}")
        time.sleep(0.02)


def start_all(servers: Sequence[RedisServer]) -> None:
    """Start each of them, or none."""
    try:
        for server in servers:
            server.start()
    except BaseException:
        stop_all(servers)
        raise


def stop_all(servers: Sequence[RedisServer]) -> None:
    """Stop each of them, whatever happens to the others."""
    errors: list[Exception] = []
    for server in reversed(servers):
        try:
            server.stop()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
