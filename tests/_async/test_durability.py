"""Grants that have reached replicas or disks before they are handed out."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ResponseError

from fencekit import AsyncLock, Durability, DurabilityNotReached, LeaseState, LockHandle
from fencekit._seam import aio as seam
from fencekit.events import Event, Granted, Released
from fencekit.testing import ClusterServers, Proxy, RedisServer, find_server
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def primary() -> Iterator[RedisServer]:
    with RedisServer(persistence="aof-always") as server:
        yield server


@pytest.fixture(scope="module")
def replica(primary: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(persistence="aof-always", replica_of=primary) as server:
        yield server


@pytest.fixture
def own(primary: RedisServer, replica: RedisServer) -> Iterator[Site]:
    """A primary whose one replica is in step."""
    site = Site.at(primary)
    site.flush()
    step = str(time.monotonic())
    site.admin.set("step", step)
    with replica.client(decode_responses=True) as copy:
        while copy.get("step") != step:
            time.sleep(0.01)
    yield site
    site.close()


async def test_a_grant_tells_how_many_replicas_have_it(own: Site, replica: RedisServer) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client)
    handle = await lock.acquire("a", ttl=5, durability=Durability(replicas=1, timeout=5))
    assert handle.replicas == 1
    assert pickle.loads(pickle.dumps(handle)).replicas == 1
    with replica.client() as copy:
        assert copy.hget("fencekit:{a}:lock", "token") == str(handle.token.value).encode()
    await lock.release(handle)
    async with lock.hold("a", ttl=5, durability=Durability(timeout=5)) as handle:
        assert handle.replicas == 1
    assert (await lock.acquire("a", ttl=5)).replicas is None
    await both.close(client)


async def test_a_grant_that_falls_short_is_given_back(own: Site) -> None:
    client, events = both.client_of(own), list[Event]()
    lock = AsyncLock(client, listeners=[events.append])
    short = Durability(replicas=2, timeout=0.05)
    for step in (
        lambda: lock.acquire("a", ttl=30, durability=short),
        lambda: lock.try_acquire("a", ttl=30, durability=short),
        lambda: _enter(lock, short),
    ):
        with pytest.raises(DurabilityNotReached, match="only 1 of 2") as refused:
            await step()
        assert (refused.value.resource, refused.value.wanted, refused.value.reached) == ("a", 2, 1)
        assert own.lock("a") == {}
    assert not any(isinstance(event, Granted) for event in events)
    assert all(isinstance(event, Released) for event in events)
    await both.close(client)


async def _enter(lock: AsyncLock, durability: Durability) -> None:
    async with lock.hold("a", ttl=30, durability=durability):
        raise AssertionError("the body ran")


async def test_a_grant_that_may_fall_short_says_what_was_reached(
    own: Site, replica: RedisServer
) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client)
    wanted = Durability(replicas=2, timeout=0.05, required=False)
    handle = await lock.acquire("a", ttl=30, durability=wanted)
    assert handle.replicas == 1
    assert handle.state is LeaseState.HELD
    replica.freeze()
    try:
        handle = await lock.acquire("b", ttl=30, durability=wanted)
        assert handle.replicas == 0
    finally:
        replica.resume()
    await both.close(client)


async def test_a_grant_may_be_on_disks(own: Site) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client)
    disks = Durability(replicas=1, timeout=5, disk=True)
    if find_server().version < (7, 2):
        with pytest.raises(ResponseError, match="WAITAOF"):
            await lock.acquire("a", ttl=30, durability=disks)
        await both.until(lambda: "owner" not in own.lock("a"))
        await both.close(client)
        return
    handle = await lock.acquire("a", ttl=30, durability=disks)
    assert handle.replicas == 1
    too_many = Durability(replicas=2, timeout=0.1, disk=True)
    with pytest.raises(DurabilityNotReached) as refused:
        await lock.acquire("b", ttl=30, durability=too_many)
    assert refused.value.reached < 2
    assert own.lock("b") == {}
    await both.close(client)


async def test_a_server_without_a_log_cannot_promise_its_disk() -> None:
    with RedisServer() as server:
        site, client = Site.at(server), both.client_before(server)
        lock = AsyncLock(client)
        with pytest.raises(ResponseError, match="WAITAOF"):
            await lock.acquire("a", ttl=30, durability=Durability(replicas=0, disk=True))
        await both.until(lambda: "owner" not in site.lock("a"))
        handle = await lock.acquire("a", ttl=30)  # and its connection is good for more
        await lock.release(handle)
        await both.close(client)
        site.close()


async def test_waiting_for_replicas_may_take_longer_than_an_answer_of_the_server(
    own: Site,
) -> None:
    client = both.client_of(own, socket_timeout=0.2)
    lock = AsyncLock(client)
    await lock.release(await lock.acquire("a", durability=Durability(timeout=5)))
    wanted = Durability(replicas=2, timeout=0.6, required=False)
    before = own.calls("wait")
    handle = await lock.acquire("a", ttl=30, durability=wanted)
    assert handle.replicas == 1
    assert own.calls("wait") == before + 1
    await both.close(client)


async def test_waiting_for_replicas_holds_up_nobody_else(own: Site) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client)
    await lock.release(await lock.acquire("a", durability=Durability(timeout=5)))
    wanted = Durability(replicas=2, timeout=1.5, required=False)
    slow = both.Running(lambda: lock.acquire("slow", ttl=30, durability=wanted))
    await both.until(lambda: own.lock("slow"))
    for _ in range(3):
        await lock.release(await lock.acquire("quick", ttl=30))
    assert not slow.done
    assert isinstance(await slow.result(), LockHandle)
    await both.close(client)


async def test_a_lost_reply_is_asked_for_again_with_the_same_grant(own: Site) -> None:
    # I7
    with Proxy.before(own.servers) as proxy:
        client = both.client_before(proxy)
        lock = AsyncLock(client)
        await lock.release(await lock.acquire("warm", durability=Durability(timeout=5)))
        proxy.swallow_matching(b"{a}:lock", times=1)
        handle = await lock.acquire("a", ttl=30, durability=Durability(timeout=5))
        assert handle.replicas == 1
        assert own.lock("a")["token"] == str(handle.token.value)
        assert own.fence("a") == handle.token.value
        await both.close(client)


async def test_a_wait_that_runs_out_leaves_no_grant(own: Site, replica: RedisServer) -> None:
    # I10
    client = both.client_of(own)
    lock = AsyncLock(client)
    await lock.acquire("a", ttl=0.3)
    wanted = Durability(replicas=2, timeout=0.05)
    with pytest.raises(DurabilityNotReached):
        await lock.acquire("a", ttl=30, wait=20, durability=wanted)
    assert own.lock("a") == {}
    await both.close(client)


async def test_a_cluster_cannot_promise_it_and_says_so_at_once(
    fencekit_cluster: ClusterServers,
) -> None:
    client: Any = both.client_before(fencekit_cluster)
    with pytest.raises(ValueError, match="not offered on a Redis Cluster"):
        await AsyncLock(client).acquire("a", durability=Durability())
    await seam.sleep(0)
    await both.close(client)
