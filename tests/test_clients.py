"""A client of the wrong kind is refused when the object is made, with the class to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import redis.asyncio

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    DistributedLock,
    FenceGate,
    IdempotencyGuard,
)
from fencekit.testing import ClusterServers

ASYNC = (AsyncLock, AsyncGuard, AsyncFenceGate)
SYNC = (DistributedLock, IdempotencyGuard, FenceGate)

NO_CLIENTS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a URL": lambda: "redis://localhost:6379/0",
    "a number": lambda: 6379,
    "a pool": redis.ConnectionPool,
    "an asynchronous pool": redis.asyncio.ConnectionPool,
    "a connection": redis.Connection,
    "a class": lambda: redis.Redis,
    "an asynchronous class": lambda: redis.asyncio.Redis,
    "a mock": Mock,
    "something that looks like one": type("Redis", (), {"connection_pool": None}),
}


@pytest.mark.parametrize("what", NO_CLIENTS)
@pytest.mark.parametrize("cls", [*ASYNC, *SYNC], ids=lambda cls: cls.__name__)
def test_what_is_no_client_is_refused_by_name(cls: Any, what: str) -> None:
    wrong = NO_CLIENTS[what]()
    wanted = "redis.asyncio.Redis" if cls in ASYNC else "redis.Redis"
    with pytest.raises(TypeError) as refused:
        cls(wrong)
    message = str(refused.value)
    assert re.match(rf"{cls.__name__} needs a {re.escape(wanted)} client, not ", message)
    assert type(wrong).__name__ in message


@pytest.mark.parametrize("cls", ASYNC, ids=lambda cls: cls.__name__)
def test_a_blocking_client_is_refused_by_the_asynchronous_half(
    cls: Any, fencekit_cluster: ClusterServers
) -> None:
    with redis.Redis() as single, fencekit_cluster.client() as cluster:
        for client in (single, cluster, single.pipeline()):
            with pytest.raises(TypeError, match=cls.__name__) as refused:
                cls(client)
            assert "redis.asyncio" in str(refused.value)
            assert "the class without 'Async'" in str(refused.value)


@pytest.mark.parametrize("cls", SYNC, ids=lambda cls: cls.__name__)
def test_an_asynchronous_client_is_refused_by_the_blocking_half(
    cls: Any, fencekit_cluster: ClusterServers
) -> None:
    for client in (redis.asyncio.Redis(), fencekit_cluster.async_client()):
        with pytest.raises(TypeError, match=cls.__name__) as refused:
            cls(client)
        assert "use redis.Redis, or the class with 'Async' in its name" in str(refused.value)


@pytest.mark.parametrize("cls", [AsyncLock, AsyncGuard], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("wrong", [redis.asyncio.Redis(), "redis://localhost", Mock()])
def test_a_heartbeat_that_is_no_blocking_client_is_refused(cls: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"heartbeat= needs a redis\.Redis client"):
        cls(redis.asyncio.Redis(), heartbeat=wrong)


@pytest.mark.parametrize("cls", [*ASYNC, *SYNC], ids=lambda cls: cls.__name__)
def test_making_an_object_connects_to_nothing(cls: Any) -> None:
    client = (redis.asyncio.Redis if cls in ASYNC else redis.Redis)(port=1)
    made = cls(client)
    assert repr(made) == f"{cls.__name__}(prefix='fencekit')"


@pytest.mark.parametrize("cls", [*ASYNC, *SYNC], ids=lambda cls: cls.__name__)
def test_a_client_of_a_derived_class_is_welcome(cls: Any) -> None:
    base = redis.asyncio.Redis if cls in ASYNC else redis.Redis
    cls(type("Traced", (base,), {})(port=1))
