"""Where a thread's connections come from.

Rules this module obeys:

* A connection belongs to the client's pool, also while it is kept between two calls: the pool can
  close it, and what it says of its connections is asked.
* Nothing is kept that somebody else may need: the pool is far from its limit, and does not block.
* Who is interrupted has lost no connection.
* A connection on which an answer is still to be read would answer the next call with it: redis-py
  gives one back to its pool when a signal's handler raises while it greets the server.
"""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from typing import Any

import redis
from redis.exceptions import RedisError

from fencekit import _policy
from fencekit._seam import shared

PART = 100
"""One connection is kept of so many that the pool may make,"""

MOST_KEPT = 8
"""and no more than these."""

LOOKS = 3
"""Connections with something unread that are closed before one is taken as it is."""

ROUND = 1.0
"""Seconds after which one that was kept goes through the pool, which may have something to do."""

# By pool, since locks and guards with other prefixes use the same one.
_kept: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kept.clear)  # those are the parent's


class PoolSource:
    """Connections borrowed from the client's own pool; a few are kept between calls."""

    def __init__(self, pool: Any, make: Any) -> None:
        self._pool = pool
        self._make = make
        self._mutex = _policy.Mutex()
        blocks = isinstance(pool, redis.BlockingConnectionPool)
        self._room = 0 if blocks else min(pool.max_connections // PART, MOST_KEPT)
        self._kept = _kept.setdefault(pool, deque())
        self._next_round = _policy.now() + ROUND

    def get(self, limit: float) -> Any:
        while self._kept:
            try:
                connection = self._kept.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                usable = _open(connection) and self._pool.owns_connection(connection)
            except BaseException:
                self._kept.append(connection)
                raise
            if usable:
                return connection
            self.drop(connection)
        with self._mutex:  # or two would see the same open connection, and one have to connect
            if _warm(self._pool):
                return self._sound()
        self._knock(limit)
        return self._sound()

    def _sound(self) -> Any:
        """A connection of the pool on which nothing is left to be read."""
        for _ in range(LOOKS):
            connection = self._from_pool()
            try:
                if not connection.can_read(0):
                    break
            except (RedisError, OSError):
                pass  # closed over there
            except BaseException:
                self.drop(connection)
                raise
            self.drop(connection)
        else:
            connection = self._from_pool()
        return connection

    def _from_pool(self) -> Any:
        try:
            return self._pool.get_connection(*shared.GET_CONNECTION_ARGS)
        except RedisError:
            raise
        except BaseException:
            for connection in _idle(self._pool):
                connection.disconnect()
            raise

    def _knock(self, limit: float) -> None:
        """Find out in time whether anybody answers: a pool that connects may take a minute."""
        connection = self._make(min(limit, shared.LINE_TIMEOUT))
        try:
            connection.connect()
        finally:
            connection.disconnect()

    def put(self, connection: Any) -> None:
        moment = _policy.now()
        if len(self._kept) < self._room and moment < self._next_round:
            self._kept.append(connection)
            return
        self._next_round = moment + ROUND
        self._pool.release(connection)

    def drop(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)


def _idle(pool: Any) -> list[Any]:
    """The connections that nobody uses now, the next one last."""
    queue = getattr(getattr(pool, "pool", None), "queue", None)  # of a pool that blocks
    idle = getattr(pool, "_available_connections", ()) if queue is None else queue
    return [connection for connection in tuple(idle) if connection is not None]


def _warm(pool: Any) -> bool:
    """Whether the connection that a pool hands out next is open, as far as one can see."""
    idle = _idle(pool)
    if not idle:
        return not hasattr(pool, "_available_connections") and not hasattr(pool, "pool")
    return _open(idle[-1])


def _open(connection: Any) -> bool:
    """Whether the connection is open, as far as one can see."""
    sock = getattr(getattr(connection, "_conn", connection), "_sock", None)
    if sock is None or sock.fileno() < 0:
        return False
    try:
        return not select.select([sock], [], [], 0)[0]  # readable: it was closed over there
    except (OSError, ValueError):  # more descriptors than this can take
        return True


class OwnSource:
    """One connection that is fencekit's own, with settings of its own, for one thread."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._connection: Any = None

    def get(self, limit: float) -> Any:
        if self._connection is None:
            connection = self._make(min(limit, shared.LINE_TIMEOUT))
            try:
                connection.connect()
            except BaseException:
                connection.disconnect()
                raise
            connection.socket_timeout = (
                None  # the socket's own is that of connecting: ask with ours
            )
            self._connection = connection
        return self._connection

    def put(self, connection: Any) -> None:
        """Kept for the next time."""

    def drop(self, connection: Any) -> None:
        self._connection = None
        connection.disconnect()

    def close(self) -> None:
        if self._connection is not None:
            self.drop(self._connection)
