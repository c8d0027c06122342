"""Locks of redis-py that a forked child finds held by threads which only its parent has.

redis-py's pools notice a fork and start afresh, but take their own lock first, which may never be
free: https://github.com/redis/redis-py, `ConnectionPool.reset`. Only the child's one thread runs
here, before anything else does, so the locks can simply be new.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_clients: weakref.WeakSet[Any] = weakref.WeakSet()

_LOCKS = ("_lock", "_fork_lock", "_initialization_lock")


def free_in_children(client: object) -> None:
    """From now on a forked child can use this client whatever its parent's threads were doing."""
    _clients.add(client)


def _lockers(client: Any) -> Iterator[Any]:
    yield client
    nodes = getattr(client, "nodes_manager", None)
    yield nodes
    owners = [node.redis_connection for node in list(getattr(nodes, "nodes_cache", {}).values())]
    for owner in (client, *owners):
        pool = getattr(owner, "connection_pool", None)
        yield pool
        yield getattr(pool, "_event_dispatcher", None)
        for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
            yield sentinel.connection_pool
            yield getattr(sentinel.connection_pool, "_event_dispatcher", None)


def _free() -> None:
    for client in list(_clients):
        for locker in _lockers(client):
            for name in _LOCKS:
                if getattr(locker, name, None) is not None:
                    setattr(locker, name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
