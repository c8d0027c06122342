"""Cancellation at every moment of every verb: it arrives, and leaves nothing behind (I10)."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import pytest_asyncio
import redis.asyncio

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    LeaseLost,
    LeaseState,
    LockHandle,
)
from fencekit._policy import now
from fencekit.testing import Proxy, RedisServer
from tests import aio
from tests.site import Site, standing

pytestmark = pytest.mark.asyncio


class Tools:
    """One client and what works with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.lock = AsyncLock(client)
        self.guard = AsyncGuard(client)
        self.gate = AsyncFenceGate(client)


@pytest_asyncio.fixture
async def tools(site: Site) -> AsyncIterator[Tools]:
    client = site.aio_client()
    yield Tools(client)
    await aio.close(client)


@pytest.fixture
def proxy(private_server: RedisServer) -> Iterator[Proxy]:
    with Proxy.before(private_server) as proxy:
        yield proxy


@pytest.fixture
def own(private_server: RedisServer) -> Iterator[Site]:
    site = Site.at(private_server)
    yield site
    site.close()


# -- at every step --------------------------------------------------------------------------------


async def nothing(tools: Tools, name: str) -> None:
    """Prepares nothing, or leaves nothing to clear away."""


async def held(tools: Tools, name: str) -> LockHandle:
    return await tools.lock.acquire(name, ttl=600)


async def begun(tools: Tools, name: str) -> Any:
    # By a task of its own: whoever runs a job cannot wait for it.
    return await asyncio.ensure_future(tools.guard.begin(name, lease=0.9, lock=name))


async def acquire(tools: Tools, name: str, _: Any) -> LockHandle:
    return await tools.lock.acquire(name, ttl=600)


async def wait_in_line(tools: Tools, name: str, handle: LockHandle) -> LockHandle:
    releasing = asyncio.ensure_future(tools.lock.release(handle))
    try:
        return await tools.lock.acquire(name, ttl=600, wait=20)
    finally:
        await asyncio.shield(releasing)


async def extend(tools: Tools, name: str, handle: LockHandle) -> LockHandle:
    await tools.lock.extend(handle)
    return handle


async def release(tools: Tools, name: str, handle: LockHandle) -> None:
    await tools.lock.release(handle)


async def hold(tools: Tools, name: str, _: Any) -> None:
    async with tools.lock.hold(name, ttl=600) as handle:
        await asyncio.sleep(0)
        await tools.lock.extend(handle)


async def read(tools: Tools, name: str, _: Any) -> None:
    await tools.lock.inspect(name)
    await tools.lock.break_lock(name, reason="a test")
    await tools.guard.status(name)
    await tools.gate.current_max(name)


async def begin(tools: Tools, name: str, _: Any) -> None:
    claim = await tools.guard.begin(name, lease=600)
    await asyncio.shield(tools.guard.fail(claim))


async def begin_with_lock(tools: Tools, name: str, _: Any) -> None:
    claim = await tools.guard.begin(name, lease=600, lock=name)
    await asyncio.shield(tools.guard.fail(claim))


async def try_begin(tools: Tools, name: str, _: Any) -> None:
    assert await tools.guard.try_begin(name, ttl=600)
    await asyncio.shield(tools.guard.clear(name))


async def finish(tools: Tools, name: str, claim: Any) -> None:
    await tools.guard.finish(claim, "done")


async def fail(tools: Tools, name: str, claim: Any) -> None:
    await tools.guard.fail(claim)


async def once(tools: Tools, name: str, _: Any) -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    await tools.guard.once(name, work, lease=600, lock=name)


async def wait_for_result(tools: Tools, name: str, claim: Any) -> None:
    finishing = asyncio.ensure_future(tools.guard.finish(claim, "done"))
    try:
        assert await tools.guard.once(name, str, lease=600, lock=name) == "done"
    finally:
        await asyncio.shield(finishing)


async def gated_write(tools: Tools, name: str, handle: LockHandle) -> LockHandle:
    await tools.gate.set_if_fresh(handle.token, tools.gate.key(name, "row"), "v", ttl=60)
    async with tools.gate.pipeline(handle.token) as pipe:
        pipe.incr(tools.gate.key(name, "count"))
    await tools.gate.check(handle.token)
    return handle


def free(site: Site, name: str) -> bool:
    """No lock is held and no claim lives."""
    job = site.job(name)
    if job.get("s") == b"p":
        seconds, _ = site.admin.time()
        if "l" not in job or int(job["l"]) > seconds * 1000:
            return False
    return "owner" not in site.lock(name)


@pytest.mark.parametrize(
    ("prepare", "verb"),
    [
        (nothing, acquire),
        (held, wait_in_line),
        (held, extend),
        (held, release),
        (nothing, hold),
        (nothing, read),
        (nothing, begin),
        (nothing, begin_with_lock),
        (nothing, try_begin),
        (begun, finish),
        (begun, fail),
        (nothing, once),
        (begun, wait_for_result),
        (held, gated_write),
    ],
    ids=lambda function: function.__name__,
)
async def test_a_verb_cancelled_at_any_step_leaves_nothing_behind(
    tools: Tools,
    site: Site,
    prepare: Callable[..., Awaitable[Any]],
    verb: Callable[..., Awaitable[Any]],
) -> None:
    # scenario 31, I10
    names, cancelled, through = ["warm"], 0, 0
    steps = 0
    while through < 3 and steps < 300:
        name = names[-1]
        prepared = await prepare(tools, name)
        task = asyncio.ensure_future(verb(tools, name, prepared))
        for _ in range(steps or 100_000):  # the first one comes through
            await asyncio.sleep(0)
            if task.done():
                break
        asked = task.cancel()
        await asyncio.wait({task}, timeout=20)
        if asked:
            assert task.cancelled()  # it arrives as what it is
            cancelled, through = cancelled + 1, 0
        else:
            through += steps > 0
        # What the verb leaves on purpose, the caller gives back.
        given = prepared if asked and verb in (extend, gated_write) else None
        given = given if asked else task.result()
        if isinstance(given, LockHandle):
            await tools.lock.release(given)
        del prepared, given, task
        # Later answers are those to later questions.
        await tools.client.set("answer", name)
        assert await tools.client.get("answer") in (name, name.encode())
        steps += 1
        names.append(f"n{steps}")
    assert cancelled >= 3
    gc.collect()
    left = set(names)

    def all_free() -> bool:
        left.difference_update([name for name in left if free(site, name)])
        return not left

    await aio.until(all_free)
    if not site.clustered:
        assert len(tools.client.connection_pool._in_use_connections) <= 1


# -- a block --------------------------------------------------------------------------------------


async def test_a_cancelled_block_gives_back_though_it_is_cancelled_again(
    own: Site, proxy: Proxy
) -> None:
    # scenario 31
    client = proxy.async_client()
    lock = AsyncLock(client)
    await lock.release(await lock.acquire("warm"))
    entered = asyncio.Event()

    async def work() -> None:
        async with lock.hold("a", ttl=30):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await entered.wait()
    proxy.delay(0.1)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0.02)
        assert not task.done()
        task.cancel()
    await asyncio.wait({task}, timeout=20)
    assert task.cancelled()
    assert own.lock("a") == {}
    await aio.close(client)


async def test_leaving_a_cancelled_block_is_bounded_in_time(
    own: Site, private_server: RedisServer
) -> None:
    # scenario 31
    client = private_server.async_client()
    lock = AsyncLock(client, timeout=600)
    entered = asyncio.Event()

    async def work() -> None:
        async with lock.hold("a", ttl=0.6):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await entered.wait()
    private_server.freeze()
    try:
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled()
    finally:
        private_server.resume()
    await aio.until(lambda: own.lock("a") == {})
    await aio.close(client)


async def test_a_release_that_was_cut_short_follows_when_the_server_is_back(
    own: Site, private_server: RedisServer
) -> None:
    # I10
    client = private_server.async_client()
    lock = AsyncLock(client)
    handle = await lock.acquire("a", ttl=600)
    private_server.freeze()
    try:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lock.release(handle), 0.1)
    finally:
        private_server.resume()
    assert handle.state is LeaseState.RELEASED  # whoever gave it back does not count on it (I9)
    await aio.until(lambda: own.lock("a") == {})
    await aio.close(client)


async def test_a_cancel_scope_around_a_block_gives_back(tools: Tools, site: Site) -> None:
    # scenario 31
    with anyio.move_on_after(0.05) as scope:
        async with tools.lock.hold("a", ttl=30):
            await anyio.sleep(60)
    assert scope.cancel_called
    await aio.until(lambda: site.lock("a") == {})  # the scope may have ended while it was asking
    with anyio.move_on_after(0.05) as scope:
        async with tools.guard.run("a", lease=30):
            await anyio.sleep(60)
    assert scope.cancel_called
    await aio.until(lambda: free(site, "a"))


@pytest.mark.parametrize("first", ["cancelled", "lost"])
async def test_cancellation_and_loss_at_once_are_a_cancellation(tools: Tools, first: str) -> None:
    handles: list[LockHandle] = []

    async def work() -> None:
        async with tools.lock.hold("a", ttl=30) as handle:
            handles.append(handle)
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await aio.until(lambda: handles)
    steps = [lambda: handles[0]._lease.lose("a test"), task.cancel]  # type: ignore[union-attr]
    for step in steps if first == "lost" else reversed(steps):
        step()
    await asyncio.wait({task}, timeout=20)
    if first == "lost" and sys.version_info < (3, 11):
        # There a task does not count who cancelled it, and the two look like one.
        assert isinstance(task.exception(), LeaseLost)
    else:
        assert task.cancelled()


async def test_a_loss_cancels_the_body_once_and_nothing_after_it(tools: Tools, site: Site) -> None:
    cancelled = 0

    async def work() -> None:
        nonlocal cancelled
        async with tools.lock.hold("a", ttl=0.9):
            site.expire_lock("a")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise

    with pytest.raises(LeaseLost):
        await work()
    assert cancelled == 1
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    if sys.version_info >= (3, 11):
        assert task.cancelling() == 0


async def lose(block: Any, site: Site, name: str) -> None:
    """The block's body goes on until a lease is lost."""
    async with block:
        site.expire_lock(name)
        await asyncio.sleep(60)


async def test_the_loss_of_an_inner_block_is_raised_inside_the_outer_one(
    tools: Tools, site: Site
) -> None:
    async with tools.lock.hold("outer", ttl=30) as outer:
        with pytest.raises(LeaseLost) as lost:
            await lose(tools.lock.hold("inner", ttl=0.9), site, "inner")
        assert lost.value.resource == "inner"
        await asyncio.sleep(0)
        outer.check()
    assert site.lock("outer") == {}


async def test_the_loss_of_an_outer_block_ends_the_inner_one_which_gives_back(
    tools: Tools, site: Site
) -> None:
    async def nest() -> None:
        async with tools.lock.hold("outer", ttl=0.9):
            await lose(tools.lock.hold("inner", ttl=600), site, "outer")

    with pytest.raises(LeaseLost) as lost:
        await nest()
    assert lost.value.resource == "outer"
    assert site.lock("inner") == {}


# -- an answer that nobody waits for any more -----------------------------------------------------


async def test_a_timed_out_call_on_a_slow_line_spoils_no_later_answer(
    own: Site, proxy: Proxy
) -> None:
    # scenario 32
    pool: Any = redis.asyncio.BlockingConnectionPool.from_url(
        proxy.url, max_connections=1, timeout=20
    )
    client: Any = redis.asyncio.Redis(connection_pool=pool)
    lock = AsyncLock(client)
    await lock.release(await lock.acquire("warm"))
    own.admin.set(own.keys.fence("b"), 2**52)
    proxy.delay(0.1)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lock.acquire("a", ttl=600), 0.05)
        other = await lock.acquire("b", ttl=600)
        assert other.resource == "b"
        assert own.lock("b")["token"] == str(other.token.value)
        assert other.token.value == int(await client.get(own.keys.fence("b")))
        assert await client.echo("x") in ("x", b"x")
        await lock.release(other)
    await aio.until(lambda: "owner" not in own.lock("a"))
    await aio.close(client)
    await pool.disconnect()


async def test_a_cancelled_waiter_makes_room_for_the_next(tools: Tools) -> None:
    held = await tools.lock.acquire("a", ttl=600)
    tasks = [
        asyncio.ensure_future(tools.lock.acquire("a", ttl=600, wait=20 if i else None))
        for i in range(3)
    ]
    await aio.until(lambda: standing(tools.lock, "a") == 3)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert standing(tools.lock, "a") == 1
    await tools.lock.release(held)
    assert (await tasks[2]).token > held.token


async def test_a_grant_that_meets_its_cancellation_goes_to_the_next_in_line(
    tools: Tools, site: Site
) -> None:
    # I10
    for steps in range(0, 60, 3):
        held = await tools.lock.acquire("a", ttl=600)
        first = asyncio.ensure_future(tools.lock.acquire("a", ttl=600, wait=20))
        await aio.until(lambda: standing(tools.lock, "a") == 1)
        second = asyncio.ensure_future(tools.lock.acquire("a", ttl=600, wait=20))
        await aio.until(lambda: standing(tools.lock, "a") == 2)
        await tools.lock.release(held)
        for _ in range(steps):
            await asyncio.sleep(0)
        if first.cancel():
            await asyncio.wait({first})
            assert first.cancelled()
        else:
            await tools.lock.release(first.result())
        handle = await asyncio.wait_for(second, 10)
        assert site.lock("a")["token"] == str(handle.token.value)
        await tools.lock.release(handle)


async def test_waiting_with_a_limit_around_it_ends_at_the_limit(tools: Tools) -> None:
    await tools.lock.acquire("a", ttl=600)
    started = now()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(tools.lock.acquire("a", wait=None), 0.1)
    assert now() - started < 15
    assert standing(tools.lock, "a") == 0


# -- before anything was sent ---------------------------------------------------------------------


async def test_a_call_given_up_while_its_connection_is_made_is_never_sent(
    own: Site, proxy: Proxy
) -> None:
    client = aio.client_before(proxy)
    proxy.delay(0.1, "reply")  # the handshake takes some tenths
    asking = asyncio.ensure_future(AsyncLock(client).acquire("a", ttl=600))
    await aio.until(lambda: proxy.open_connections)
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await AsyncLock(client).inspect("other")  # on the same path, so it comes after
    assert own.lock("a") == {}
    await aio.close(client)


async def test_a_call_given_up_while_its_script_is_loaded_is_not_sent_again(
    own: Site, proxy: Proxy
) -> None:
    client = aio.client_before(proxy)
    lock = AsyncLock(client)
    await lock.inspect("other")
    own.admin.script_flush()
    proxy.delay(0.2, "reply")
    before = own.calls("script|load")
    asking = asyncio.ensure_future(lock.acquire("a", ttl=600))
    await aio.until(lambda: own.calls("script|load") > before)  # its answer is on the way
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await lock.inspect("other")
    assert own.lock("a") == {}
    await aio.close(client)
