"""Event loops: code that blocks them, several after one another, and the wrong half inside one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    DistributedLock,
    FencedOutError,
    FenceGate,
    FenceToken,
    IdempotencyGuard,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotAcquired,
)
from fencekit._policy import now
from fencekit.testing import ClusterServers, RedisServer
from tests import threads
from tests.site import Site, standing

LAPSED = "its deadline passed without a renewal"


@pytest.fixture
def own(private_server: RedisServer) -> Iterator[Site]:
    """A server of the test's own, so that its connections can be counted."""
    site = Site.at(private_server)
    yield site
    site.close()


@pytest.fixture
def blocking(site: Site) -> Iterator[Any]:
    """A client that blocks."""
    client = site.threads_client()
    yield client
    client.close()


async def close(client: Any) -> None:
    await getattr(client, "aclose", client.close)()


async def put_away(client: Any) -> None:
    """Close a client whose connections may be those of a loop that has been closed."""
    await AsyncLock(client).inspect("a")  # puts them aside, which redis-py does not
    await close(client)


@asynccontextmanager
async def client_of(site: Site) -> AsyncIterator[Any]:
    client = site.aio_client()
    try:
        yield client
    finally:
        await close(client)


# -- code that blocks the loop --------------------------------------------------------------------


def test_a_heartbeat_in_a_thread_keeps_a_lock_through_code_that_blocks_the_loop(
    site: Site, blocking: Any
) -> None:
    # scenario 40
    async def main() -> None:
        async with client_of(site) as client:
            lock = AsyncLock(client, heartbeat=blocking)
            async with lock.hold("a", ttl=0.9) as handle:
                competitor = threads.Running(
                    lambda: DistributedLock(blocking).acquire("a", wait=1.5)
                )
                time.sleep(2.0)
                handle.check()
                assert site.lock("a")["token"] == str(handle.token.value)
            with pytest.raises(LockNotAcquired):
                competitor.result()
            assert site.lock("a") == {}

    asyncio.run(main())


def test_a_heartbeat_in_a_thread_keeps_a_claim_too(site: Site, blocking: Any) -> None:
    # scenario 40
    async def main() -> None:
        async with client_of(site) as client:
            guard = AsyncGuard(client, heartbeat=blocking)
            async with guard.run("a", lease=0.6, lock="a") as job:
                time.sleep(1.5)
                job.check()
                job.result = "done"
            assert await guard.get_result("a") == "done"

    asyncio.run(main())


def test_a_loss_that_a_thread_notices_ends_the_body_in_the_loop(site: Site, blocking: Any) -> None:
    async def main() -> None:
        async with client_of(site) as client:
            lock = AsyncLock(client, heartbeat=blocking)
            async with lock.hold("a", ttl=0.6):
                site.expire_lock("a")
                await asyncio.sleep(60)

    with pytest.raises(LeaseLost, match="no such lease"):
        asyncio.run(main())


def test_a_blocked_loop_notices_the_loss_at_the_first_wait_and_its_writes_are_refused(
    site: Site, blocking: Any
) -> None:
    # scenario 40
    after: list[str] = []
    handles: list[LockHandle] = []

    async def body(lock: AsyncLock) -> None:
        async with lock.hold("a", ttl=0.6) as handle:
            handles.append(handle)
            competitor = threads.Running(
                lambda: DistributedLock(blocking).acquire("a", ttl=30, wait=20)
            )
            time.sleep(1.0)
            handles.append(competitor.result())
            assert handle.state is LeaseState.LOST
            after.append("before the first wait")
            await asyncio.sleep(60)
            after.append("behind it")

    async def main() -> None:
        async with client_of(site) as client:
            with pytest.raises(LeaseLost) as lost:
                await body(AsyncLock(client))
            assert lost.value.reason == LAPSED
            old, new = (handle.token for handle in handles)
            gate = AsyncFenceGate(client)
            with pytest.raises(FencedOutError) as refused:
                await gate.set_if_fresh(old, gate.key("a", "row"), "late")
            assert (refused.value.token, refused.value.current) == (old.value, new.value)
            assert site.lock("a")["token"] == str(new.value)

    asyncio.run(main())
    assert after == ["before the first wait"]


# -- several loops --------------------------------------------------------------------------------


def test_one_client_serves_one_loop_after_another(own: Site) -> None:
    # scenario 28
    client = own.aio_client()
    lock, guard, gate = AsyncLock(client), AsyncGuard(client), AsyncFenceGate(client)
    ran: list[int] = []

    async def task(number: int) -> None:
        other = asyncio.ensure_future(lock.acquire("a", ttl=30, wait=20))
        async with lock.hold("a", ttl=0.6, wait=20) as handle:
            await gate.set_if_fresh(handle.token, gate.key("a", "row"), number)
            await asyncio.sleep(0.3)  # a beat
        await lock.release(await other)
        await guard.once("job", ran.append, number)
        await guard.once(f"job {number}", ran.append, number)

    for number in range(3):
        asyncio.run(task(number))
    assert ran == [0, 0, 1, 2]
    asyncio.run(put_away(client))


def test_a_loop_may_have_the_address_of_an_earlier_one(own: Site) -> None:
    # scenario 28
    client = own.aio_client()

    async def task() -> int:
        await AsyncLock(client).release(await AsyncLock(client).acquire("a"))
        return id(asyncio.get_running_loop())

    addresses = [asyncio.run(task()) for _ in range(10)]
    assert len(addresses) == 10
    asyncio.run(put_away(client))


def test_a_handle_of_an_earlier_loop_is_still_given_back(own: Site) -> None:
    client = own.aio_client()
    lock = AsyncLock(client)
    handle = asyncio.run(_acquire(lock))
    assert handle.state is LeaseState.HELD
    asyncio.run(_release(lock, handle))
    assert own.lock("a") == {}
    asyncio.run(put_away(client))


async def _acquire(lock: AsyncLock) -> LockHandle:
    return await lock.acquire("a", ttl=30)


async def _release(lock: AsyncLock, handle: LockHandle) -> None:
    await lock.extend(handle)
    await lock.release(handle)


def test_a_client_that_another_open_loop_uses_is_refused(own: Site) -> None:
    # scenario 28
    client = own.aio_client()
    lock = AsyncLock(client)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        handle = asyncio.run_coroutine_threadsafe(_acquire(lock), loop).result(20)
        for other in (lock, AsyncLock(client), AsyncLock(client, prefix="other")):
            with pytest.raises(TypeError, match="another event loop"):
                asyncio.run(_acquire(other))
        asyncio.run_coroutine_threadsafe(_release(lock, handle), loop).result(20)
        asyncio.run_coroutine_threadsafe(close(client), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_a_loop_that_ends_gives_back_what_its_tasks_hold(own: Site) -> None:
    # scenario 31
    client = own.aio_client()
    lock, guard = AsyncLock(client), AsyncGuard(client)

    async def hold() -> None:
        async with lock.hold("a", ttl=600):
            await asyncio.sleep(600)

    async def run() -> None:
        async with guard.run("job", lease=600):
            await asyncio.sleep(600)

    async def wait() -> None:
        await lock.acquire("a", ttl=600, wait=None)

    async def main() -> None:
        tasks = [asyncio.ensure_future(function()) for function in (hold, run, wait)]
        while not (own.lock("a") and own.job("job") and standing(lock, "a")):
            await asyncio.sleep(0.005)
        assert not any(task.done() for task in tasks)

    asyncio.run(main())
    asyncio.run(put_away(client))
    assert "owner" not in own.lock("a")
    assert own.job("job").get("s") != b"p"


def test_a_cluster_client_stays_with_its_first_loop(fencekit_cluster: ClusterServers) -> None:
    fencekit_cluster.flush()
    client: Any = fencekit_cluster.async_client()
    lock = AsyncLock(client)

    async def first() -> None:
        await lock.release(await lock.acquire("a"))
        await close(client)

    asyncio.run(first())
    for other in (lock, AsyncLock(client)):
        with pytest.raises(TypeError, match="this cluster client belongs to the event loop"):
            asyncio.run(_acquire(other))


# -- the wrong half -------------------------------------------------------------------------------


def test_a_blocking_verb_inside_a_running_loop_is_refused_before_any_command(
    site: Site, blocking: Any
) -> None:
    # scenario 28
    lock, guard, gate = DistributedLock(blocking), IdempotencyGuard(blocking), FenceGate(blocking)
    handle = lock.acquire("held", ttl=30)
    claim = guard.begin("begun")
    token = FenceToken(7, "a")

    def enter(block: Any) -> None:
        with block:
            raise AssertionError("the body ran")

    verbs: list[Callable[[], Any]] = [
        lambda: lock.acquire("a"),
        lambda: lock.acquire("a", wait=None),
        lambda: lock.try_acquire("a"),
        lambda: lock.extend(handle),
        lambda: lock.release(handle),
        lambda: lock.inspect("a"),
        lambda: lock.break_lock("a", reason="a test"),
        lambda: enter(lock.hold("a")),
        lambda: guard.try_begin("a"),
        lambda: guard.begin("a"),
        lambda: guard.finish(claim),
        lambda: guard.status("a"),
        lambda: guard.once("a", print),
        lambda: enter(guard.run("a")),
        lambda: gate.check(token),
        lambda: gate.set_if_fresh(token, gate.key("a", "row"), "v"),
    ]

    async def main() -> None:
        for verb in verbs:
            with pytest.raises(RuntimeError, match="inside a running event loop"):
                verb()

    before = site.calls()
    asyncio.run(main())
    assert site.calls() == before
    assert handle.state is LeaseState.HELD
    lock.release(handle)  # and outside all is well
    guard.finish(claim)
    worker = threads.Running(lambda: lock.acquire("a", ttl=5))
    assert isinstance(worker.result(), LockHandle)


def test_a_thread_of_a_running_loop_may_block(site: Site, blocking: Any) -> None:
    # scenario 28
    lock = DistributedLock(blocking)

    def work() -> str:
        with lock.hold("a", ttl=5, wait=20) as handle:
            return handle.state.value

    async def main() -> list[str]:
        return list(await asyncio.gather(*(asyncio.to_thread(work) for _ in range(2))))

    assert asyncio.run(main()) == ["held", "held"]


def test_each_half_wants_its_own_kind_of_client(site: Site, blocking: Any) -> None:
    client = site.aio_client()
    for blocks, awaits in (
        (DistributedLock, AsyncLock),
        (IdempotencyGuard, AsyncGuard),
        (FenceGate, AsyncFenceGate),
    ):
        with pytest.raises(TypeError, match=r"use redis\.asyncio\.Redis, or the class without"):
            awaits(blocking)
        with pytest.raises(TypeError, match=r"use redis\.Redis, or the class with 'Async'"):
            blocks(client)
    with pytest.raises(TypeError, match=r"heartbeat= needs a redis\.Redis client"):
        AsyncLock(client, heartbeat=client)
    asyncio.run(close(client))


# -- many at once ---------------------------------------------------------------------------------


def test_a_thousand_waits_and_holds_need_three_connections(own: Site) -> None:
    async def main() -> int:
        async with client_of(own) as client:
            lock = AsyncLock(client)
            most = 0

            async def visit(number: int) -> None:
                nonlocal most
                async with lock.hold(f"n{number % 300}", ttl=30, wait=60):
                    most = max(most, len(entered))
                    entered.discard(number)

            entered = set(range(1000))
            watching = asyncio.ensure_future(asyncio.to_thread(_watch, own, entered))
            await asyncio.gather(*(visit(number) for number in range(1000)))
            return await watching

    assert asyncio.run(main()) <= 3


def _watch(site: Site, entered: set[int]) -> int:
    """The most connections at once, besides the one that asks."""
    most = 0
    end = now() + 60
    while entered and now() < end:
        most = max(most, len(site.admin.client_list()) - 1)
        time.sleep(0.005)
    return most


FACTORIES = [None, *filter(None, [getattr(asyncio, "eager_task_factory", None)])]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: "eager" if factory else "plain")
def test_it_works_with_every_kind_of_task(site: Site, factory: Any) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        async with client_of(site) as client:
            lock, guard = AsyncLock(client), AsyncGuard(client)
            order: list[int] = []

            async def visit(number: int) -> None:
                async with lock.hold("a", ttl=30, wait=20):
                    order.append(number)

            await asyncio.gather(*(visit(number) for number in range(10)))
            assert sorted(order) == list(range(10))
            assert await guard.once("job", lambda: "done") == "done"
            task = asyncio.ensure_future(lock.acquire("b", ttl=600))
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() or await lock.release(task.result()) is None
            while "owner" in site.lock("b"):
                await asyncio.sleep(0.005)

    asyncio.run(main())
