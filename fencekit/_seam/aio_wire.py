"""How a script call reaches Redis from a running event loop.

Rules this module obeys:

* A call's bytes are sent, and its reply read, by a task that callers cannot cancel.
* A connection on which anything went wrong is closed, never given back half read.
* A call is tried again until its own deadline; it keeps its nonce, so that is safe (I7).
* Whoever gives up leaves an undo behind, which follows on the same path (I10).
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import anyio
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import _policy
from fencekit._scripts import Call, Script
from fencekit._seam import shared

BATCH = 512
"""Calls in one pipeline: enough to fill a packet, few enough to keep the others' turn short."""

CLUSTER_CALLS = 64
"""Calls under way at once on a Cluster, where every call has a connection to itself."""


class _Pending:
    __slots__ = ("call", "deadline", "error", "future", "timer")

    def __init__(self, call: Call, deadline: float, future: asyncio.Future[Any] | None) -> None:
        self.call = call
        self.deadline = deadline
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.error: Exception | None = None

    @property
    def wanted(self) -> bool:
        if self.future is None:
            return _policy.now() < self.deadline
        return not self.future.done()

    def answer(self, reply: Any) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: BaseException) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(self.error or RedisTimeoutError("no answer from Redis before the deadline"))


class Wire:
    """Gathers pending calls into pipelines on one connection at a time."""

    def __init__(self, source: PoolSource | OwnSource) -> None:
        self._source = source
        self._queue: deque[_Pending] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def run(self, call: Call, *, deadline: float, undo: Call | None = None) -> Any:
        """The script's reply, in bytes. Raises what Redis or the network raised at the deadline."""
        loop = asyncio.get_running_loop()
        pending = _Pending(call, deadline, loop.create_future())
        self._submit(pending)
        if deadline != float("inf"):
            left = max(0.0, deadline - _policy.now())
            pending.timer = loop.call_later(left, pending.expire)
        try:
            return await pending.future  # type: ignore[misc]
        except BaseException:
            if undo is not None and call.attempts:
                self.post(undo)
            raise
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            if pending.future is not None:
                pending.future.cancel()

    def post(self, call: Call) -> None:
        """Send a call whose answer nobody waits for."""
        self._submit(_Pending(call, _policy.now() + shared.UNDO_SECONDS, None))

    def _submit(self, pending: _Pending) -> None:
        self._queue.append(pending)
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(
                self._drain(), name="fencekit-wire"
            )

    async def _drain(self) -> None:
        connection = None
        batch: list[_Pending] = []
        failures = 0
        try:
            while True:
                while self._queue:
                    batch = self._take()
                    if not batch:
                        continue
                    try:
                        if connection is None:
                            with anyio.fail_after(self._limit(batch)):
                                connection = await self._source.get(self._limit(batch))
                        again = await self._exchange(connection, batch)
                    except Exception as error:  # whatever broke, these calls have no answer yet
                        again = [pending for pending in batch if self._retry(pending, error)]
                        if connection is not None:
                            broken, connection = connection, None
                            await self._source.drop(broken)
                    batch = []
                    if not again:
                        failures = 0
                        continue
                    self._queue.extendleft(reversed(again))
                    failures += 1
                    await asyncio.sleep(_policy.pause(failures))
                if connection is not None:
                    kept, connection = connection, None
                    await self._source.put(kept)
                if not self._queue:
                    return
        except asyncio.CancelledError as error:  # the loop is being closed
            for pending in (*batch, *self._queue):
                pending.fail(error)
            self._queue.clear()
            if connection is not None:
                await self._source.drop(connection)
            raise
        finally:
            self._worker = None

    def _take(self) -> list[_Pending]:
        batch: list[_Pending] = []
        while self._queue and len(batch) < BATCH:
            pending = self._queue.popleft()
            if pending.wanted:
                batch.append(pending)
        return batch

    def _limit(self, batch: Iterable[_Pending]) -> float:
        longest = max(pending.deadline for pending in batch) - _policy.now()
        return max(0.001, min(shared.IO_TIMEOUT, longest))

    async def _exchange(self, connection: Any, batch: list[_Pending]) -> list[_Pending]:
        """Send the batch and hand out its replies; returns the calls to try again."""
        limit = self._limit(batch)
        timeout = connection.socket_timeout
        if timeout and timeout <= limit:
            return await self._talk(connection, batch)
        with anyio.fail_after(limit):
            return await self._talk(connection, batch)

    async def _talk(self, connection: Any, batch: list[_Pending]) -> list[_Pending]:
        sent = _policy.now()
        packed = []
        for pending in batch:
            pending.call.sent = sent
            pending.call.attempts += 1
            packed.append(pending.call.packed())
        await connection.send_packed_command(packed, check_health=False)
        again: list[_Pending] = []
        missing: list[_Pending] = []
        stale = False
        for pending in batch:
            reply = await _reply(connection)
            if pending.call.follow is not None:
                pending.call.followed = await _reply(connection)
            if not isinstance(reply, Exception):
                pending.answer(reply)
                continue
            pending.call.attempts -= shared.did_not_run(reply)
            if shared.is_missing(reply):
                missing.append(pending)
            else:
                stale = stale or _policy.role_changed(reply)
                if self._retry(pending, pending.call.explain(reply)):
                    again.append(pending)
        if missing:
            await _load(connection, {pending.call.script for pending in missing})
            again += await self._talk(connection, missing)
        if stale:
            await connection.disconnect(nowait=True)
        return again

    def _retry(self, pending: _Pending, error: Exception) -> bool:
        """Whether to try again; fails the caller when that cannot help."""
        if not pending.wanted:
            return False
        if isinstance(error, TimeoutError) and not isinstance(error, RedisTimeoutError):
            error = RedisTimeoutError("no answer from Redis in time")
        pending.error = error
        if _policy.passes(error):
            return True
        pending.fail(error)
        return False


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
    except RedisConnectionError as error:
        # LOADING and READONLY may come as connection errors: the connection itself is fine then.
        if connection.is_connected and _policy.passes(error):
            return error
        raise


async def _load(connection: Any, scripts: set[Script]) -> None:
    await connection.send_packed_command([script.load for script in scripts], check_health=False)
    for _ in scripts:
        reply = await _reply(connection)
        if isinstance(reply, Exception):
            raise reply


class PoolSource:
    """Connections borrowed from the client's own pool while there is something to send."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def get(self, limit: float) -> Any:
        del limit
        try:
            return await self._pool.get_connection(*shared.GET_CONNECTION_ARGS)
        except RuntimeError:  # left over from a loop that has been closed
            _put_aside(self._pool, close=True)
            return await self._pool.get_connection(*shared.GET_CONNECTION_ARGS)

    async def put(self, connection: Any) -> None:
        await self._pool.release(connection)

    async def drop(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)


class OwnSource:
    """One connection that is fencekit's own, with settings of its own."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._connection: Any = None

    async def get(self, limit: float) -> Any:
        if self._connection is None:
            connection = self._make(min(limit, shared.LINE_TIMEOUT))
            try:
                await connection.connect()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            connection.socket_timeout = shared.LINE_TIMEOUT
            self._connection = connection
        return self._connection

    async def put(self, connection: Any) -> None:
        """Kept for the next time."""

    async def drop(self, connection: Any) -> None:
        self._connection = None
        await connection.disconnect(nowait=True)

    async def close(self) -> None:
        if self._connection is not None:
            await self.drop(self._connection)


class ClusterWire:
    """Calls go through the cluster client, which follows the slots; each is a task of its own."""

    def __init__(self, client: RedisCluster) -> None:
        self._client: Any = client
        self._tasks: set[asyncio.Task[Any]] = set()
        self._free = asyncio.Semaphore(CLUSTER_CALLS)

    async def run(self, call: Call, *, deadline: float, undo: Call | None = None) -> Any:
        task = self._start(call, deadline)
        left = None if deadline == float("inf") else max(0.0, deadline - _policy.now())
        try:
            await asyncio.wait({task}, timeout=left)
        except BaseException:
            self._after(task, undo)
            raise
        if not task.done():
            self._after(task, undo)
            raise RedisTimeoutError("no answer from the Redis Cluster before the deadline")
        error = task.exception()
        if error is not None and undo is not None and _policy.passes(error):
            self.post(undo)
        return task.result()

    def post(self, call: Call) -> None:
        self._start(call, _policy.now() + shared.UNDO_SECONDS)

    def _start(self, call: Call, deadline: float) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(self._send(call, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _after(self, task: asyncio.Task[Any], undo: Call | None) -> None:
        if undo is not None:
            task.add_done_callback(lambda _: self.post(undo))

    async def _send(self, call: Call, deadline: float) -> Any:
        failures = 0
        async with self._free:
            while True:
                call.sent = _policy.now()
                try:
                    return await self._evaluate(call)
                except Exception as error:
                    failures += 1
                    rest = _policy.pause(failures)
                    explained = call.explain(error)
                    if not _policy.passes(explained) or _policy.now() + rest >= deadline:
                        raise explained from None
                    await asyncio.sleep(rest)

    async def _evaluate(self, call: Call) -> Any:
        rest = (len(call.keys), *call.keys, *call.args)
        await self._client.initialize()
        # With the node named, the cluster client follows redirections but sends only once.
        node = shared.node_of(self._client, call.keys[0])
        options = {NEVER_DECODE: True, "target_nodes": node}
        call.attempts += 1 if node else 2
        try:
            try:
                return await self._client.execute_command(
                    "EVALSHA", call.script.digest, *rest, **options
                )
            except ResponseError as error:
                if not shared.is_missing(error):
                    raise
            return await self._client.execute_command("EVAL", call.script.source, *rest, **options)
        except ResponseError as error:
            call.attempts -= shared.did_not_run(error)
            raise

    async def close(self) -> None:
        """Nothing of our own is open."""


class Line:
    """A subscription: a connection of our own that only listens."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._writes: set[asyncio.Task[Any]] = set()

    def post(self, *words: bytes) -> None:
        """Write a command; its answer comes as a message, an error ends `read`."""
        writing = self._connection.send_command(*words, check_health=False)
        task = asyncio.get_running_loop().create_task(writing)
        self._writes.add(task)
        task.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()

    async def read(self, timeout: float) -> Any:
        """The next message, or None after so many seconds."""
        return await self._connection.read_response(timeout=timeout)

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


class Link:
    """All ways from one client to its server, for one event loop."""

    def __init__(self, client: Redis | RedisCluster) -> None:
        self._client = client
        self.clustered = isinstance(client, RedisCluster)
        self._loop = asyncio.get_running_loop()
        self._pid = _policy.pid()
        if isinstance(client, RedisCluster):
            self.calls: Wire | ClusterWire = ClusterWire(client)
            self.durable: Wire | None = None
            self._own: OwnSource | None = None
            self.beats: Wire | ClusterWire = self.calls
        else:
            pool = client.connection_pool
            _adopt(pool, self._loop)
            self.calls = Wire(PoolSource(pool))
            self.durable = Wire(PoolSource(pool))
            self._own = OwnSource(self._make)
            self.beats = Wire(self._own)

    def _make(self, timeout: float = shared.LINE_TIMEOUT) -> Any:
        pool = self._client.connection_pool  # type: ignore[union-attr]
        return pool.connection_class(**shared.own_settings(pool.connection_kwargs, Retry, timeout))

    async def open_line(self) -> Line:
        """A fresh connection for a subscription."""
        if isinstance(self._client, RedisCluster):
            await self._client.initialize()
            node: Any = self._client.get_random_node()
            settings = shared.own_settings(node.connection_kwargs, Retry, shared.LINE_TIMEOUT)
            connection = node.connection_class(**settings)
        else:
            connection = self._make()
        try:
            with anyio.fail_after(shared.LINE_TIMEOUT):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Line(connection)

    async def rest(self) -> None:
        """Close what only the heartbeat used."""
        if self._own is not None:
            await self._own.close()


_adopted: weakref.WeakKeyDictionary[Any, tuple[asyncio.AbstractEventLoop, int]]
_adopted = weakref.WeakKeyDictionary()
_aside: list[Any] = []


def check_adopted(client: Any) -> None:
    """TypeError when the client's connections belong to another loop that is still open."""
    pool = getattr(client, "connection_pool", None)
    known = _adopted.get(pool) if pool is not None else None
    if known is None or known[1] != _policy.pid():
        return
    loop = known[0]
    if loop is not asyncio.get_running_loop() and not loop.is_closed():
        raise TypeError(
            "this redis.asyncio client is in use by another event loop: make one for each loop"
        )


def _adopt(pool: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Take note of the loop that a pool's connections belong to, and put aside those of another."""
    known = _adopted.get(pool)
    if known is not None and (known[0] is not loop or known[1] != _policy.pid()):
        _put_aside(pool, close=known[1] == _policy.pid())
    _adopted[pool] = (loop, _policy.pid())


def _put_aside(pool: Any, *, close: bool) -> None:
    """Forget a pool's idle connections: their loop is gone, or they are a forking parent's.

    Those of a parent stay open and referenced: closing them would unregister the parent's
    sockets from a selector that both processes share.
    """
    idle = list(getattr(pool, "_available_connections", ()))
    pool.reset()
    if not close:
        _aside.extend(idle)
        return
    for connection in idle:
        writer = getattr(connection, "_writer", None)
        connection._reader = connection._writer = None
        transport = getattr(writer, "transport", None)
        socket = getattr(transport, "_sock", None)
        if socket is not None:
            socket.close()
            transport._sock = None  # type: ignore[union-attr]
