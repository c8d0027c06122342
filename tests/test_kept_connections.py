"""A blocking client's pool while fencekit keeps one of its connections between calls."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from fencekit import DistributedLock
from fencekit._seam.shared import GET_CONNECTION_ARGS
from fencekit.testing import RedisServer


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
