"""How a script call reaches Redis from a running event loop.

Rules this module obeys:

* A call's bytes are sent, and its reply read, by a task that callers cannot cancel.
* A connection on which anything went wrong is closed, never given back half read.
* A call is tried again until its own deadline; it keeps its nonce, so that is safe (I7).
* Whoever gives up leaves an undo behind, which follows on the same path (I10).
"""

from __future__ import annotations

import asyncio
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import partial
from typing import Any

import anyio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import _policy
from fencekit._scripts import Call, Script
from fencekit._seam import shared
from fencekit._seam.aio_sources import OwnSource, PoolSource, hang_up, timeout

if sys.version_info >= (3, 12):
    # It sends before the caller has been suspended, which saves a turn of the loop.
    _task = partial(asyncio.Task, name="fencekit-wire", eager_start=True)
else:
    _task = partial(asyncio.Task, name="fencekit-wire")

BATCH = 512
"""Calls in one pipeline: enough to fill a packet, few enough to keep the others' turn short."""


TURNS = 5
"""Turns of the loop within which tasks that were cancelled together have all been told."""

GROUP = 8
"""Replies that have to come within one limit: each gets longer than redis-py would give it."""

PATROL = 10.0
"""The longest that a timer runs which no call may need any more."""

RING = 0.01
"""Seconds between two looks for calls whose deadline has passed, however many there are."""

LINGER = 0.02
"""Seconds for which an idle connection is kept: calls often follow each other closely."""


class _Pending:
    __slots__ = ("call", "deadline", "error", "future")

    def __init__(self, call: Call, deadline: float, future: asyncio.Future[Any] | None) -> None:
        self.call = call
        self.deadline = deadline
        self.future = future
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
        self._own_limit: float | None = None
        self._kept: Any = None
        self._kept_since = 0.0
        self._lingering: asyncio.TimerHandle | None = None
        self._waiting: set[_Pending] = set()
        self._expiring: asyncio.TimerHandle | None = None
        self._expires_at = math.inf
        self._putting: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._closing = False

    async def run(self, call: Call, *, deadline: float, undo: Call | None = None) -> Any:
        """The script's reply, in bytes. Raises what Redis or the network raised at the deadline."""
        loop = asyncio.get_running_loop()
        pending = _Pending(call, deadline, loop.create_future())
        self._submit(pending)
        self._waiting.add(pending)
        if deadline < self._expires_at:
            self._expire_at(deadline)
        try:
            return await pending.future  # type: ignore[misc]
        except BaseException:
            if undo is not None and call.attempts:
                self.post(undo)
            raise
        finally:
            self._waiting.discard(pending)
            pending.future.cancel()  # type: ignore[union-attr]

    def _expire_at(self, moment: float) -> None:
        """One timer for all calls, set anew when it has rung: most calls never need it."""
        if self._expiring is not None:
            self._expiring.cancel()
        left = min(max(0.0, moment - _policy.now()), PATROL)
        self._expires_at = moment
        self._expiring = asyncio.get_running_loop().call_later(left, self._expire)

    def _expire(self) -> None:
        self._expiring, self._expires_at = None, math.inf
        moment = _policy.now()
        for pending in self._waiting:
            if pending.deadline <= moment:
                pending.expire()
        later = min((p.deadline for p in self._waiting if p.deadline > moment), default=math.inf)
        if later < math.inf:
            self._expire_at(max(later, moment + RING))

    def post(self, call: Call) -> None:
        """Send a call whose answer nobody waits for."""
        self._submit(_Pending(call, _policy.now() + shared.UNDO_SECONDS, None))

    def _submit(self, pending: _Pending) -> None:
        self._queue.append(pending)
        self._news.set()
        if self._worker is None:
            self._start()

    def _start(self) -> None:
        self._worker = _task(self._run(), loop=asyncio.get_running_loop())
        self._worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        if self._worker is worker:  # it was cancelled before its first step
            self._worker = None
            if self._queue:
                self._start()

    async def _run(self) -> None:
        try:
            await self._drain()
        except asyncio.CancelledError as error:
            # The loop is being closed, and waits for this task: what others give back or give up on
            # their way out still goes.
            self._closing = True
            with anyio.move_on_after(shared.PARTING):
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                await self._drain()
            self._give_up(error)
            raise
        except Exception as error:  # something nobody foresaw
            self._give_up(error)
            raise
        finally:
            self._worker, self._closing = None, False

    def _give_up(self, error: BaseException) -> None:
        queue, self._queue = self._queue, deque()
        for pending in queue:
            pending.fail(error)

    async def _drain(self) -> None:
        connection = self._take_kept()
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
                            limit = self._longest(batch)
                            async with timeout(limit):
                                connection = await self._source.get(limit)
                            # One limit for many replies costs less than one for each of them.
                            self._own_limit = connection.socket_timeout
                            connection.socket_timeout = None
                        again = await self._exchange(connection, batch)
                    except Exception as error:  # whatever broke, these calls have no answer yet
                        again = [pending for pending in batch if self._retry(pending, error)]
                        if connection is not None:
                            broken, connection = connection, None
                            await self._part(broken, self._source.drop)
                    batch = []
                    if not again:
                        failures = 0
                        continue
                    self._queue.extendleft(reversed(again))
                    failures += 1
                    await self._rest(_policy.pause(failures))
                if connection is not None and not self._keep(connection):
                    used, connection = connection, None
                    source = self._source
                    await self._part(used, source.drop if self._closing else source.put)
                if not self._queue:
                    return
                connection = self._take_kept()
        except (Exception, asyncio.CancelledError):
            self._queue.extendleft(reversed(batch))
            if connection is not None:
                await self._part(connection, self._source.drop)
            raise

    def _part(self, connection: Any, how: Callable[[Any], Coroutine[Any, Any, None]]) -> Any:
        """Give a connection back as it came."""
        connection.socket_timeout = self._own_limit
        return how(connection)

    async def _rest(self, pause: float) -> None:
        """Pause after a failure; a call that comes meanwhile does not have to wait for its end."""
        self._news.clear()
        await asyncio.sleep(min(pause, shared.LEAST_PAUSE))
        with anyio.move_on_after(pause - shared.LEAST_PAUSE):
            await self._news.wait()

    def _keep(self, connection: Any) -> bool:
        """Hold an idle connection for a moment, without a task that outlives the loop."""
        if self._closing or not self._source.spare:
            return False
        self._kept, self._kept_since = connection, _policy.now()
        if self._lingering is None:
            self._linger(LINGER)
        return True

    def _take_kept(self) -> Any:
        connection, self._kept = self._kept, None
        return connection

    def _linger(self, pause: float) -> None:
        self._lingering = asyncio.get_running_loop().call_later(pause, self._put_back)

    def _put_back(self) -> None:
        self._lingering = None
        if self._kept is None:
            return
        rest = self._kept_since + LINGER - _policy.now()
        if rest > 0:  # it was used meanwhile
            self._linger(rest)
            return
        putting = self._part(self._take_kept(), self._source.put)
        try:
            # As a rule that is done at once, without a task that a closing loop would miss.
            waiting = putting.send(None)
        except StopIteration:
            return
        task = asyncio.get_running_loop().create_task(_go_on(putting, waiting))
        self._putting.add(task)
        task.add_done_callback(self._putting.discard)

    def _take(self) -> list[_Pending]:
        batch: list[_Pending] = []
        while self._queue and len(batch) < BATCH:
            pending = self._queue.popleft()
            if pending.wanted:
                batch.append(pending)
        return batch

    def _longest(self, batch: Iterable[_Pending]) -> float:
        """Until the last of them gives up, and never for ever."""
        longest = max(pending.deadline for pending in batch) - _policy.now()
        return max(0.001, min(shared.IO_TIMEOUT, longest))

    def _limit(self, batch: Iterable[_Pending]) -> float:
        """For how long to wait for the next replies."""
        return min(self._longest(batch), self._own_limit or math.inf)

    async def _exchange(self, connection: Any, batch: list[_Pending]) -> list[_Pending]:
        """Send the batch and hand out its replies; returns the calls to try again.

        Between here and the sending nothing is awaited: who gives up before it is not sent (I10).
        """
        batch = [pending for pending in batch if pending.wanted]
        if not batch:
            return []
        sent = _policy.now()
        packed = []
        for pending in batch:
            pending.call.sent = sent
            pending.call.attempts += 1
            packed.append(pending.call.packed())
        again: list[_Pending] = []
        missing: list[_Pending] = []
        stale = False
        for start in range(0, len(batch), GROUP):
            group = batch[start : start + GROUP]
            patience = sum(pending.call.patience for pending in group)
            async with timeout(self._limit(batch) + patience):
                if not start:
                    await connection.send_packed_command(packed, check_health=False)
                for pending in group:
                    reply = await _reply(connection)
                    if pending.call.follow is not None:
                        pending.call.followed = await _reply(connection)
                    if not isinstance(reply, Exception):
                        pending.answer(reply)
                    elif shared.is_missing(reply):
                        pending.call.attempts -= 1
                        missing.append(pending)
                    else:
                        pending.call.attempts -= shared.did_not_run(reply)
                        stale = stale or _policy.role_changed(reply)
                        if self._retry(pending, pending.call.explain(reply)):
                            again.append(pending)
        if missing:
            async with timeout(self._limit(batch)):
                await _load(connection, {pending.call.script for pending in missing})
            again += await self._exchange(connection, missing)
        if stale:
            await hang_up(connection)
        return again

    def _retry(self, pending: _Pending, error: Exception) -> bool:
        """Whether to try again; fails the caller when that cannot help."""
        if not pending.wanted:
            return False
        if isinstance(error, TimeoutError) and not isinstance(error, RedisTimeoutError):
            error = RedisTimeoutError("no answer from Redis in time")
        if pending.error is None or not isinstance(error, RedisTimeoutError):
            pending.error = error  # what was answered says more than that the time was up
        if _policy.passes(error):
            return True
        pending.fail(error)
        return False


@types.coroutine
def _go_on(started: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that has been started by hand and waits for something."""
    while True:
        try:
            waiting = started.send((yield waiting))
        except StopIteration:
            return


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
