"""Fixtures for pytest: a server, its URL and client, a cluster, Sentinel, a proxy, PostgreSQL.

Rules of this module:

1. Importing it starts nothing: a server starts when the first test asks for it.
2. A private server is emptied before each test, and brought back if the last test killed it.
3. An external server (``FENCEKIT_REDIS_URL``) is never flushed: tests keep to their prefix, and
   only keys below that prefix are removed. Nor is anything in one of ``FENCEKIT_PG_URL``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .external import ExternalPostgres, ExternalRedis, open_postgres, open_server
from .postgres import PostgresServer
from .servers import RedisServer

if TYPE_CHECKING:
    from redis import Redis

    from .cluster import ClusterServers
    from .proxy import Proxy
    from .sentinel import SentinelServers


@pytest.fixture(scope="session")
def fencekit_server() -> Iterator[RedisServer | ExternalRedis]:
    """One server for the whole run: ``FENCEKIT_REDIS_URL``'s, or a private one in memory."""
    with open_server() as server:
        yield server


@pytest.fixture
def fencekit_url(fencekit_server: RedisServer | ExternalRedis) -> str:
    """The URL of `fencekit_server`, emptied before the test if it is a private one."""
    if isinstance(fencekit_server, RedisServer):
        if fencekit_server.frozen:
            fencekit_server.resume()
        fencekit_server.start()
        with fencekit_server.client() as client:
            client.flushall()
    return fencekit_server.url


@pytest.fixture
def fencekit_prefix(
    fencekit_server: RedisServer | ExternalRedis, fencekit_url: str
) -> Iterator[str]:
    """A key prefix that no other test has; on an external server its keys are removed after."""
    prefix = f"fencekit-test:{uuid.uuid4().hex}:"
    yield prefix
    if fencekit_server.external:
        with fencekit_server.client() as client:
            for key in client.scan_iter(match=f"{prefix}*", count=1000):
                client.delete(key)


@pytest.fixture
def fencekit_client(
    fencekit_server: RedisServer | ExternalRedis, fencekit_url: str
) -> Iterator[Redis]:
    """A `redis.Redis` for `fencekit_url`, closed after the test."""
    with fencekit_server.client() as client:
        yield client


@pytest.fixture
def fencekit_proxy(
    fencekit_server: RedisServer | ExternalRedis, fencekit_url: str
) -> Iterator[Proxy]:
    """A `Proxy` in front of `fencekit_server`, recording; connect to its `url`."""
    from .proxy import Proxy

    with Proxy.before(fencekit_server, record=True) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def fencekit_cluster() -> Iterator[ClusterServers]:
    """A private cluster of three masters for the whole run; it takes two seconds to form."""
    from .cluster import ClusterServers

    with ClusterServers() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def fencekit_sentinel() -> Iterator[SentinelServers]:
    """A private master with one replica and three Sentinels for the whole run."""
    from .sentinel import SentinelServers

    with SentinelServers() as sentinel:
        yield sentinel


@pytest.fixture(scope="session")
def fencekit_postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    """One PostgreSQL for the whole run: ``FENCEKIT_PG_URL``'s, or a private one."""
    with open_postgres() as server:
        yield server
