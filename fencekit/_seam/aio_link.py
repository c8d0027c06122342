"""All ways from one client to its server: a wire for calls, one for beats, a line to listen on."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import _policy
from fencekit._scripts import Call
from fencekit._seam import shared
from fencekit._seam.aio_sources import OwnSource, PoolSource, adopt, hang_up
from fencekit._seam.aio_wire import Wire

CLUSTER_CALLS = 64
"""Calls under way at once on a Cluster, where every call has a connection to itself."""


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
        call.sent = _policy.now()  # from here on: finding the nodes is no part of the call
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
        if not self._connection.is_connected:
            return  # `read` has said so, or will: writing would connect anew, unheard
        task = asyncio.get_running_loop().create_task(self._write(words))
        self._writes.add(task)
        task.add_done_callback(self._written)

    async def _write(self, words: tuple[bytes, ...]) -> None:
        if self._connection.is_connected:  # else it would connect again, and nobody close it
            await self._connection.send_command(*words, check_health=False)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()

    async def read(self, timeout: float) -> Any:
        """The next message, or None after so many seconds."""
        return await self._connection.read_response(timeout=timeout)

    async def close(self) -> None:
        await hang_up(self._connection)
        if self._writes:  # nothing is left to a loop that is being closed
            await asyncio.wait(self._writes, timeout=shared.PARTING)


class Link:
    """All ways from one client to its server, for one event loop."""

    def __init__(self, client: Redis | RedisCluster) -> None:
        self._client = client
        self.clustered = isinstance(client, RedisCluster)
        self._loop = asyncio.get_running_loop()
        self._pid = _policy.pid()
        if isinstance(client, RedisCluster):
            adopt(client, self._loop)
            self.calls: Wire | ClusterWire = ClusterWire(client)
            self._pool: Any = None
            self._own: OwnSource | None = None
            self.beats: Wire | ClusterWire = self.calls
        else:
            pool = client.connection_pool
            adopt(pool, self._loop)
            self.calls = Wire(PoolSource(pool, self._make))
            self._pool = pool
            self._own = OwnSource(self._make)
            self.beats = Wire(self._own)

    def _make(self, timeout: float = shared.LINE_TIMEOUT) -> Any:
        pool = self._client.connection_pool  # type: ignore[union-attr]
        return pool.connection_class(**shared.own_settings(pool.connection_kwargs, Retry, timeout))

    def durable(self) -> Wire | None:
        """A way of its own for a call that waits on the server; None where there is none."""
        return None if self._pool is None else Wire(PoolSource(self._pool, self._make))

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
            await hang_up(connection)
            raise
        return Line(connection)

    async def rest(self) -> None:
        """Close what only the heartbeat used."""
        if self._own is not None:
            await self._own.close()
