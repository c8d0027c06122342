"""A blocking client's pool while fencekit keeps one of its connections between calls."""

from __future__ import annotations

import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from fencekit import AsyncLock, DistributedLock, IdempotencyGuard
from fencekit._seam.shared import GET_CONNECTION_ARGS
from fencekit.testing import Proxy, RedisServer
from tests import aio


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def pool_of(server: RedisServer, kind: Any = redis.ConnectionPool, **options: Any) -> Any:
    return kind(host="127.0.0.1", port=server.port, **options)


def use(pool: Any, **options: Any) -> None:
    lock = DistributedLock(redis.Redis(connection_pool=pool), **options)
    for _ in range(3):
        lock.release(lock.acquire("a"))


@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_nothing_is_kept_of_a_pool_that_its_owner_may_need_to_the_last(
    server: RedisServer, kind: Any
) -> None:
    pool = pool_of(server, kind, max_connections=8)
    use(pool)
    all_of_them = [pool.get_connection(*GET_CONNECTION_ARGS) for _ in range(8)]
    for connection in all_of_them:
        pool.release(connection)
    pool.disconnect()


def test_all_key_spaces_of_a_pool_keep_the_same_connection(server: RedisServer) -> None:
    pool = pool_of(server, max_connections=100)
    for number in range(20):
        use(pool, prefix=f"p{number}")
    assert len(pool._in_use_connections) == 1
    pool.disconnect()


def test_a_connection_that_the_pool_disowns_is_not_used_again(server: RedisServer) -> None:
    class Moved(redis.ConnectionPool):
        """As a Sentinel's pool that has learned of another master."""

        moved = False

        def owns_connection(self, connection: Any) -> bool:
            return not self.moved and super().owns_connection(connection)

    pool = pool_of(server, Moved, max_connections=100)
    use(pool)
    (kept,) = pool._in_use_connections
    pool.moved = True
    use(pool)
    assert kept._sock is None
    pool.disconnect()


def test_who_is_interrupted_with_a_kept_connection_in_hand_does_not_lose_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(server, max_connections=100)
    use(pool)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupted)  # where a greenlet would be switched
        with pytest.raises(KeyboardInterrupt):
            use(pool)
    use(pool)
    assert len(pool._in_use_connections) == 1
    pool.disconnect()


def test_the_pools_owner_may_close_it_at_any_time(server: RedisServer) -> None:
    pool = pool_of(server, max_connections=100)
    use(pool)
    (kept,) = pool._in_use_connections
    redis.Redis(connection_pool=pool).connection_pool.disconnect()
    assert kept._sock is None
    use(pool)
    pool.disconnect()


class Interrupted(BaseException):
    """What a signal's handler raises, such as a soft time limit."""


def interrupt_the_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise once, when redis-py has greeted the server and not yet read its answer."""
    read = redis.connection.Connection.read_response
    left = [1]

    def read_response(self: Any, *args: Any, **options: Any) -> Any:
        frame: Any = sys._getframe()
        while frame and left[0]:
            if frame.f_code.co_name == "get_connection":
                left[0] = 0
                raise Interrupted
            frame = frame.f_back
        return read(self, *args, **options)

    monkeypatch.setattr(redis.connection.Connection, "read_response", read_response)


@pytest.mark.parametrize("who", ["fencekit", "the user"])
@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_a_greeting_that_was_interrupted_answers_no_later_call(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, kind: Any, who: str
) -> None:
    pool = pool_of(server, kind)
    client = redis.Redis(connection_pool=pool)
    lock, guard = DistributedLock(client), IdempotencyGuard(client)
    with server.client() as direct:
        direct.flushall()
        others = DistributedLock(direct)
        held = others.acquire("held", ttl=60)
        for number in (1, 2):
            IdempotencyGuard(direct).once(f"job:{number}", lambda n=number: f"memo of {n}")
        interrupt_the_greeting(monkeypatch)
        with pytest.raises(Interrupted):
            if who == "fencekit":
                lock.try_acquire("first")
            else:
                client.get("first")
        if who == "the user":  # the answer that nobody read has come
            idle = pool.pool.queue if kind is redis.BlockingConnectionPool else None
            (left,) = [c for c in idle or pool._available_connections if c is not None]
            assert left.can_read(5)
        for number in range(3):
            assert lock.try_acquire("held") is None
            free = lock.try_acquire(f"free:{number}")
            assert free is not None
            assert free.resource == f"free:{number}"
            lock.release(free)
            for job in (1, 2):
                assert guard.once(f"job:{job}", lambda: "ran again", wait=5) == f"memo of {job}"
        others.release(held)
    pool.disconnect()


@pytest.mark.asyncio
async def test_a_greeting_that_took_too_long_answers_no_later_call(server: RedisServer) -> None:
    with Proxy.before(server) as proxy:
        client = redis.asyncio.Redis(port=proxy.port, protocol=3)
        lock = AsyncLock(client, timeout=0.5)
        proxy.delay(0.6)
        with pytest.raises(redis.exceptions.RedisError):
            await lock.acquire("a", ttl=30)
        proxy.reset()
        lock = AsyncLock(client)
        for number in range(3):
            handle = await lock.acquire(f"a:{number}", ttl=30)
            assert handle.resource == f"a:{number}"
            await lock.release(handle)
        await aio.close(client)


def test_whoever_gives_up_does_not_wait_for_its_undo(server: RedisServer) -> None:
    client = redis.Redis(connection_pool=pool_of(server))
    lock = DistributedLock(client, timeout=0.5)
    lock.release(lock.acquire("a"))
    server.freeze()
    try:
        with pytest.raises(redis.exceptions.TimeoutError):
            lock.acquire("a")
        undoing = [one for one in threading.enumerate() if one.name == "fencekit-undo"]
        assert undoing  # it waits for the server, and we do not
    finally:
        server.resume()
    for one in undoing:
        one.join(20)
    client.connection_pool.disconnect()
