"""How a script call reaches Redis from a thread.

Rules this module obeys:

* A connection on which anything went wrong is closed, never given back half read.
* A call is tried again until its own deadline; it keeps its nonce, so that is safe (I7).
* Whoever gives up sends an undo (I10).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fencekit import _policy
from fencekit._scripts import Call
from fencekit._seam import shared
from fencekit._seam.threads_fork import free_in_children
from fencekit._seam.threads_sources import OwnSource, PoolSource

AT_ONCE = 0.1
"""Seconds that whoever gives up waits for its undo to be sent."""


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "a blocking fencekit call inside a running event loop would stop it: "
        "use AsyncLock, AsyncGuard or AsyncFenceGate there, or call from a thread"
    )


def _persist(attempt: Callable[[], Any], deadline: float) -> Any:
    """Try until it works, until trying again cannot help, or until the deadline."""
    failures = 0
    told: Exception | None = None
    while True:
        try:
            return attempt()
        except Exception as error:
            failures += 1
            if told is None or not isinstance(error, RedisTimeoutError):
                told = error  # what was answered says more than that the time was up
            rest = _policy.pause(failures)
            if not _policy.passes(error) or _policy.now() + rest >= deadline:
                if told is error:
                    raise
                raise told from None
        time.sleep(rest)


class Wire:
    """Sends a call on a connection of its source and reads the reply, for any number of threads."""

    def __init__(self, source: PoolSource | OwnSource) -> None:
        self._source = source

    def run(self, call: Call, *, deadline: float, undo: Call | None = None) -> Any:
        """The script's reply, in bytes. Raises what Redis or the network raised at the deadline."""
        _refuse_event_loop()
        try:
            return _persist(lambda: self._once(call, deadline), deadline)
        except BaseException:
            if undo is not None and call.attempts:
                self.post(undo)
            raise

    def post(self, call: Call) -> None:
        """Send a call whose answer nobody waits for. One try: the lease bounds the rest.

        A server that answers does so at once; one that does not is left to a thread.
        """
        thread = threading.Thread(
            target=self._post, args=(call,), name="fencekit-undo", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._post(call)
        else:
            thread.join(AT_ONCE)

    def _post(self, call: Call) -> None:
        with suppress(Exception):  # what made the caller give up is what counts
            self._once(call, _policy.now() + 1.0)

    def _once(self, call: Call, deadline: float) -> Any:
        connection, fine = None, False
        try:
            connection = self._source.get(max(0.001, deadline - _policy.now()))
            reply = self._talk(connection, call, deadline)
            if isinstance(reply, Exception) and shared.is_missing(reply):
                connection.send_packed_command([call.script.load], check_health=False)
                loaded = _reply(connection, self._limit(connection, deadline))
                if isinstance(loaded, Exception):
                    raise loaded
                reply = self._talk(connection, call, deadline)
            fine = not (isinstance(reply, Exception) and _policy.role_changed(reply))
        finally:
            if fine:
                self._source.put(connection)
            elif connection is not None:
                self._source.drop(connection)
        if isinstance(reply, Exception):
            raise call.explain(reply)
        return reply

    def _limit(self, connection: Any, deadline: float) -> float:
        own = getattr(connection, "socket_timeout", None) or shared.IO_TIMEOUT
        return max(0.001, min(own, shared.IO_TIMEOUT, deadline - _policy.now()))

    def _talk(self, connection: Any, call: Call, deadline: float) -> Any:
        limit = self._limit(connection, deadline)
        call.sent = _policy.now()
        call.attempts += 1
        connection.send_packed_command([call.packed()], check_health=False)
        reply = _reply(connection, limit)
        if call.follow is not None:
            call.followed = _reply(connection, limit + call.patience)
        if isinstance(reply, Exception):
            call.attempts -= shared.did_not_run(reply)
        return reply


def _reply(connection: Any, limit: float) -> Any:
    own = getattr(connection, "socket_timeout", None)
    if own != limit and not connection.can_read(limit):
        raise RedisTimeoutError("no answer from Redis in time")
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
    except RedisConnectionError as error:
        # LOADING and READONLY may come as connection errors: the connection itself is fine then.
        if getattr(connection, "_sock", None) is not None and _policy.passes(error):
            return error
        raise


class ClusterWire:
    """Calls go through the cluster client, which follows the slots."""

    def __init__(self, client: redis.RedisCluster) -> None:
        self._client: Any = client

    def run(self, call: Call, *, deadline: float, undo: Call | None = None) -> Any:
        _refuse_event_loop()
        try:
            return _persist(lambda: self._evaluate(call), deadline)
        except BaseException:
            if undo is not None and call.attempts:
                self.post(undo)
            raise

    def post(self, call: Call) -> None:
        """Send a call whose answer nobody waits for."""
        with suppress(Exception):
            self._evaluate(call)

    def _evaluate(self, call: Call) -> Any:
        rest = (len(call.keys), *call.keys, *call.args)
        # With the node named, the cluster client follows redirections but sends only once.
        node = shared.node_of(self._client, call.keys[0])
        options = {NEVER_DECODE: True, "target_nodes": node}
        call.sent = _policy.now()
        call.attempts += 1 if node else 2
        try:
            try:
                return self._client.execute_command("EVALSHA", call.script.digest, *rest, **options)
            except ResponseError as error:
                if not shared.is_missing(error):
                    raise
            return self._client.execute_command("EVAL", call.script.source, *rest, **options)
        except ResponseError as error:
            call.attempts -= shared.did_not_run(error)
            raise call.explain(error) from None

    def close(self) -> None:
        """Nothing of our own is open."""


class Line:
    """A subscription: a connection of our own that only listens; any thread may write to it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._mutex = _policy.Mutex()

    def post(self, *words: bytes) -> None:
        """Write a command; its answer comes as a message, an error ends `read`."""
        if getattr(self._connection, "_sock", None) is None:
            return  # `read` has said so, or will: writing would connect anew, unheard
        with self._mutex, suppress(RedisError, OSError):
            self._connection.send_command(*words, check_health=False)

    def read(self, timeout: float) -> Any:
        """The next message, or None after so many seconds."""
        if getattr(self._connection, "_sock", None) is None:
            raise RedisConnectionError("the subscription's connection is closed")
        if not self._connection.can_read(timeout):
            return None
        return self._connection.read_response()

    def close(self) -> None:
        self._connection.disconnect()


class Link:
    """All ways from one client to its server, for one process."""

    def __init__(self, client: redis.Redis | redis.RedisCluster) -> None:
        self._client: Any = client
        free_in_children(client)
        self.clustered = isinstance(client, redis.RedisCluster)
        if isinstance(client, redis.RedisCluster):
            self.calls: Wire | ClusterWire = ClusterWire(client)
            self._own: OwnSource | None = None
            self.beats: Wire | ClusterWire = self.calls
        else:
            self.calls = Wire(PoolSource(client.connection_pool, self._make))
            self._own = OwnSource(self._make)
            self.beats = Wire(self._own)

    def _pool(self) -> Any:
        if self.clustered:
            nodes = self._client.get_nodes()
            return _policy.dice.choice(nodes).redis_connection.connection_pool
        return self._client.connection_pool

    def _make(self, timeout: float = shared.LINE_TIMEOUT) -> Any:
        pool = self._pool()
        return pool.connection_class(**shared.own_settings(pool.connection_kwargs, Retry, timeout))

    def durable(self) -> Wire | None:
        """A way of its own for a call that waits on the server; None where there is none."""
        return self.calls if isinstance(self.calls, Wire) else None

    def open_line(self) -> Line:
        """A fresh connection for a subscription."""
        connection = self._make()
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return Line(connection)

    def rest(self) -> None:
        """Close what only the heartbeat used."""
        if self._own is not None:
            self._own.close()


def check_adopted(client: object) -> None:
    """Blocking clients belong to no loop, and redis-py's pools notice a fork themselves."""
