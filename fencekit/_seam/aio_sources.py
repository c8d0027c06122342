"""Where an event loop's connections come from, and whose they are.

Rules this module obeys:

* A pool's connections belong to one event loop and one process. Those of a closed loop are closed
  and forgotten, those of a forking parent are put aside unclosed, and a loop that is still open
  keeps its client to itself.
* A pool that takes long to connect is not the one who says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
from redis.exceptions import RedisError

from fencekit import _policy
from fencekit._seam import shared
from fencekit.events import logger

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:

    @contextlib.asynccontextmanager
    async def timeout(delay: float) -> AsyncIterator[None]:
        with anyio.fail_after(delay):
            yield


ENOUGH = 8
"""From a pool of so many connections one is kept for a moment after use."""


async def hang_up(connection: Any) -> None:
    """Close it at once: TLS would wait for an answer first, which the loop may not live to see."""
    transport = getattr(getattr(connection, "_writer", None), "transport", None)
    await connection.disconnect(nowait=True)
    if transport is not None:
        transport.abort()


class PoolSource:
    """Connections borrowed from the client's own pool while there is something to send."""

    def __init__(self, pool: Any, make: Any) -> None:
        self._pool = pool
        self._make = make
        # From a small pool nothing is kept that somebody else may need.
        self.spare = getattr(pool, "max_connections", 0) >= ENOUGH

    async def get(self, limit: float) -> Any:
        try:
            async with timeout(limit / 3):
                return await self._get()
        except TimeoutError:
            await self._knock(limit / 3)
            return await self._get()

    async def _get(self) -> Any:
        try:
            return await self._pool.get_connection(*shared.GET_CONNECTION_ARGS)
        except RuntimeError:  # left over from a loop that has been closed
            put_aside(self._pool, close=True)
            return await self._pool.get_connection(*shared.GET_CONNECTION_ARGS)
        except RedisError:
            raise
        except BaseException:
            # redis-py gives back what it was greeting: the next call would get that answer.
            for connection in tuple(getattr(self._pool, "_available_connections", ())):
                await hang_up(connection)
            raise

    async def _knock(self, limit: float) -> None:
        """Find out whether anybody answers: a pool that connects keeps its errors to itself."""
        connection = self._make(limit)
        try:
            await connection.connect()
        finally:
            await hang_up(connection)

    async def put(self, connection: Any) -> None:
        try:
            await self._pool.release(connection)
        except Exception as error:  # the pool was reset meanwhile: it is nobody's now
            logger.debug("a connection could not be given back to its pool: %s", error)
            await hang_up(connection)

    async def drop(self, connection: Any) -> None:
        await hang_up(connection)
        await self.put(connection)


class OwnSource:
    """One connection that is fencekit's own, with settings of its own."""

    spare = False

    def __init__(self, make: Any) -> None:
        self._make = make
        self._connection: Any = None

    async def get(self, limit: float) -> Any:
        if self._connection is None:
            connection = self._make(min(limit, shared.LINE_TIMEOUT))
            try:
                await connection.connect()
            except BaseException:
                await hang_up(connection)
                raise
            connection.socket_timeout = shared.LINE_TIMEOUT
            self._connection = connection
        return self._connection

    async def put(self, connection: Any) -> None:
        """Kept for the next time."""

    async def drop(self, connection: Any) -> None:
        self._connection = None
        await hang_up(connection)

    async def close(self) -> None:
        if self._connection is not None:
            await self.drop(self._connection)


_adopted: weakref.WeakKeyDictionary[Any, tuple[asyncio.AbstractEventLoop, int]]
_adopted = weakref.WeakKeyDictionary()
_aside: list[Any] = []


def check_adopted(client: Any) -> None:
    """TypeError when the client's connections belong to another loop that is still open.

    A cluster client's cannot be put aside: it stays with its first loop and process.
    """
    pool = getattr(client, "connection_pool", client)
    known = _adopted.get(pool)
    if known is None or known == (asyncio.get_running_loop(), _policy.pid()):
        return
    if pool is client:
        raise TypeError(
            "this cluster client belongs to the event loop and process that first used it: "
            "make one for each"
        )
    loop, pid = known
    if pid == _policy.pid() and not loop.is_closed():
        raise TypeError(
            "this redis.asyncio client is in use by another event loop: make one for each loop"
        )


def adopt(pool: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Take note of the loop that connections belong to, and put aside those of another."""
    known = _adopted.get(pool)
    if known is not None and (known[0] is not loop or known[1] != _policy.pid()):
        put_aside(pool, close=known[1] == _policy.pid())
    _adopted[pool] = (loop, _policy.pid())


def put_aside(pool: Any, *, close: bool) -> None:
    """Forget a pool's idle connections: their loop is gone, or they are a forking parent's.

    Those of a parent stay open and referenced: closing them would unregister the parent's
    sockets from a selector that both processes share.
    """
    idle = list(getattr(pool, "_available_connections", ()))
    busy = list(getattr(pool, "_in_use_connections", ()))
    if not close:
        _aside.extend([*idle, *busy])
    pool.reset()
    if not close:
        return
    for connection in (*idle, *filter(_left_over, busy)):
        writer = getattr(connection, "_writer", None)
        connection._reader = connection._writer = None
        transport = getattr(writer, "transport", None)
        with suppress(RuntimeError, AttributeError):
            transport.abort()  # type: ignore[union-attr]
        socket = getattr(transport, "_sock", None)
        if socket is not None:
            socket.close()
            transport._sock = None  # type: ignore[union-attr]


def _left_over(connection: Any) -> bool:
    """Whether the loop that this connection was used in has been closed."""
    loop = getattr(getattr(connection, "_writer", None), "_loop", None)
    return loop is not None and loop.is_closed()
