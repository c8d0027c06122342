"""Waiting for a lock: first come first served, woken instead of asking again, never left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencekit import AsyncLock, LockHandle, LockNotAcquired
from fencekit._async import waiting
from fencekit._seam import aio as seam
from fencekit.events import Event, Granted, Refused, Waited
from fencekit.testing import Proxy, RedisServer
from tests import aio as both
from tests.site import Site, standing

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own(private_server: RedisServer) -> Iterator[Site]:
    """A server of the test's own, so that its connections and commands can be counted."""
    site = Site.at(private_server)
    yield site
    site.close()


@pytest.fixture
def proxy(private_server: RedisServer) -> Iterator[Proxy]:
    with Proxy.before(private_server) as proxy:
        yield proxy


async def warmed(client: Any, **settings: Any) -> AsyncLock:
    """A lock whose scripts the server knows, so that commands can be counted."""
    lock = AsyncLock(client, **settings)
    await lock.release(await lock.acquire("warm", ttl=5))
    return lock


# -- being woken ----------------------------------------------------------------------------------


async def test_a_release_wakes_the_waiter_which_asks_three_times_at_most(own: Site) -> None:
    # scenario 53
    client = both.client_of(own)
    lock = await warmed(client)
    for _ in range(3):
        held = await lock.acquire("a", ttl=30)
        before = own.calls()
        waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
        await both.until(lambda: standing(lock, "a"))
        await seam.sleep(0.3)  # however long it waits
        await lock.release(held)
        handle = await waiter.result()
        assert handle.token > held.token
        # At once, when subscribed, when woken; and the release.
        assert own.calls() - before <= 4
        await lock.release(handle)
    await both.close(client)


async def test_waiters_are_served_first_come_first_served(lock: AsyncLock) -> None:
    order: list[int] = []

    async def visit(number: int) -> None:
        async with lock.hold("a", ttl=30, wait=None if number % 2 else 30):
            order.append(number)

    held = await lock.acquire("a", ttl=30)
    waiters = []
    for number in range(8):
        waiters.append(both.Running(lambda number=number: visit(number)))
        await both.until(lambda number=number: standing(lock, "a") == number + 1)
    await lock.release(held)
    for waiter in waiters:
        await waiter.result()
    assert order == list(range(8))
    assert standing(lock, "a") == 0


async def test_who_comes_later_stands_behind_though_the_lock_is_free(
    lock: AsyncLock, site: Site
) -> None:
    await lock.acquire("a", ttl=30)
    first = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: standing(lock, "a") == 1)
    second = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: standing(lock, "a") == 2)
    await lock.break_lock("a", reason="a test")
    handle = await first.result()
    assert not second.done
    await lock.release(handle)
    assert (await second.result()).token > handle.token


async def test_breaking_a_lock_wakes_its_waiter(lock: AsyncLock) -> None:
    held = await lock.acquire("a", ttl=600)
    waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=None))
    await both.until(lambda: standing(lock, "a"))
    await lock.break_lock("a", reason="a test")
    assert (await waiter.result()).token > held.token


async def test_a_waiter_takes_over_from_a_dead_holder_within_its_lease(own: Site) -> None:
    # scenario 53
    client = both.client_of(own)
    lock = await warmed(client)
    dead = await lock.acquire("a", ttl=0.6)
    before = own.calls()
    heir = await lock.acquire("a", ttl=30, wait=20)
    assert heir.token > dead.token
    assert own.calls() - before <= 4
    await both.close(client)


async def test_a_waiter_is_not_misled_by_a_lease_in_its_last_millisecond(
    lock: AsyncLock,
) -> None:
    for round in range(10):
        await lock.acquire("a", ttl=0.05 + round / 1000)
        heir = await lock.acquire("a", ttl=30, wait=20)
        await lock.release(heir)


async def test_no_wake_up_is_lost_between_two_who_take_turns(lock: AsyncLock) -> None:
    turns: list[str] = []

    async def take_turns(name: str) -> None:
        for _ in range(25):
            async with lock.hold("a", ttl=600, wait=20):
                turns.append(name)

    await both.together([lambda: take_turns("x"), lambda: take_turns("y")])
    assert sorted(turns) == ["x"] * 25 + ["y"] * 25


# -- giving up ------------------------------------------------------------------------------------


async def test_a_waiter_whose_time_is_up_is_refused_and_holds_nobody_back(
    lock: AsyncLock, events: list[Event]
) -> None:
    held = await lock.acquire("a", ttl=30, owner_id="me")
    impatient = both.Running(lambda: lock.acquire("a", ttl=30, wait=0.2))
    await both.until(lambda: standing(lock, "a") == 1)
    patient = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    with pytest.raises(LockNotAcquired, match="gave up after") as refused:
        await impatient.result()
    assert refused.value.holder is not None
    assert refused.value.holder.endswith("/me")
    assert refused.value.retry_after is not None
    await lock.release(held)
    assert (await patient.result()).token > held.token
    assert [event.granted for event in events if isinstance(event, Waited)] == [False, True]
    assert [type(event) for event in events if isinstance(event, (Granted, Refused))] == [
        Granted,
        Refused,
        Granted,
    ]


async def test_a_waiter_asks_once_more_when_its_time_is_up(lock: AsyncLock, site: Site) -> None:
    # scenario 53: a release that nobody told of, just before the end
    await lock.acquire("a", ttl=600)
    waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=0.8))
    await both.until(lambda: standing(lock, "a"))
    await seam.sleep(0.4)
    assert site.admin.delete(site.keys.lock("a"))
    assert isinstance(await waiter.result(), LockHandle)


async def test_not_waiting_means_asking_once(own: Site) -> None:
    client = both.client_of(own)
    lock = await warmed(client)
    await lock.acquire("a", ttl=30)
    before = own.calls()
    for wait in (0, 0.0):
        with pytest.raises(LockNotAcquired):
            await lock.acquire("a", wait=wait)
    assert own.calls() == before + 2
    assert own.admin.client_list(_type="pubsub") == []
    await both.close(client)


# -- many -----------------------------------------------------------------------------------------


async def test_a_hundred_waiters_all_get_it_with_few_commands(own: Site) -> None:
    # scenario 53
    client = both.client_of(own)
    lock = await warmed(client)
    inside: list[int] = []
    most: list[int] = []

    async def visit(number: int) -> None:
        async with lock.hold("a", ttl=30, wait=60):
            inside.append(number)
            most.append(len(inside))
            await seam.sleep(0.01)
            inside.remove(number)

    before = own.calls()
    outcomes = await both.together([lambda number=number: visit(number) for number in range(100)])
    assert outcomes == [None] * 100
    assert max(most) == 1
    assert own.calls() - before <= 100 * 4
    await both.close(client)


async def test_waiters_in_five_processes_all_get_it_with_few_commands(own: Site) -> None:
    # scenario 53
    worker, waiters = str(ROOT / "tests" / "waiting_worker.py"), 10
    processes = [
        subprocess.Popen(
            [sys.executable, worker, own.servers.url, both.NAME, str(waiters)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(5)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        before = own.calls()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            said, _ = process.communicate(timeout=60)
            assert said == f"{waiters} had it alone\n"
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    # Each release wakes one waiter in each of five processes, and four of them ask in vain.
    assert own.calls() - before <= 5 * waiters * 8


async def test_one_subscription_serves_all_waiters_of_a_client(own: Site) -> None:
    client = both.client_of(own)
    lock = await warmed(client)
    held = [await lock.acquire(f"n{i}", ttl=30) for i in range(10)]
    waiters = [
        both.Running(lambda name=f"n{i % 10}": lock.acquire(name, ttl=30, wait=20))
        for i in range(20)
    ]
    await both.until(lambda: sum(standing(lock, f"n{i}") for i in range(10)) == 20)
    await both.until(lambda: len(own.admin.client_list(_type="pubsub")) == 1)
    info = await lock.inspect("n3")
    assert info is not None
    assert info.waiters == 1  # processes, not waiters
    for handle in held:
        await lock.release(handle)
    for name in range(10):
        await lock.release(await _first_of(waiters[name::10]))
    assert len(own.admin.client_list(_type="pubsub")) == 1
    for waiter in waiters:
        await waiter.result()
    await both.close(client)


async def _first_of(waiters: list[both.Running]) -> LockHandle:
    await both.until(lambda: any(waiter.done for waiter in waiters))
    return await next(waiter for waiter in waiters if waiter.done).result()


async def test_an_idle_subscription_is_closed_and_made_again_when_needed(
    own: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINGER", 0.1)
    client = both.client_of(own)
    lock = await warmed(client)
    for _ in range(2):
        held = await lock.acquire("a", ttl=30)
        waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
        await both.until(lambda: own.admin.client_list(_type="pubsub"))
        await lock.release(held)
        await lock.release(await waiter.result())
        await both.until(lambda: not own.admin.client_list(_type="pubsub"))
    await both.close(client)


# -- without a subscription -----------------------------------------------------------------------


async def test_a_cut_subscription_is_made_again_and_the_waiter_still_served(
    own: Site, proxy: Proxy
) -> None:
    through, direct = both.client_before(proxy), both.client_of(own)
    lock, other = AsyncLock(through), AsyncLock(direct)
    for pause in (0.0, 0.4):
        held = await other.acquire("a", ttl=600)
        waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
        await both.until(lambda: own.admin.client_list(_type="pubsub"))
        proxy.cut()
        await seam.sleep(pause)
        await other.release(held)
        handle = await waiter.result()
        assert handle.token > held.token
        await lock.release(handle)
    await both.close(through)
    await both.close(direct)


async def test_without_a_subscription_the_waiter_asks_ever_less_often(
    own: Site, proxy: Proxy
) -> None:
    through, direct = both.client_before(proxy), both.client_of(own)
    lock, other = await warmed(through), await warmed(direct)
    held = await other.acquire("a", ttl=600)
    before = own.calls()
    proxy.stall_matching(b"SUBSCRIBE")
    waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: standing(lock, "a"))
    await seam.sleep(1.0)
    assert not own.admin.client_list(_type="pubsub")
    assert 1 < own.calls() - before <= 22  # not every 20 ms
    await other.release(held)
    assert (await waiter.result()).token > held.token
    await both.close(through)
    await both.close(direct)


async def test_a_subscription_that_went_silent_is_replaced(
    own: Site, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINGER", 0.1)
    monkeypatch.setattr(waiting, "PROBE", 0.2)
    through, direct = both.client_before(proxy), both.client_of(own)
    lock, other = await warmed(through), AsyncLock(direct)
    held = await other.acquire("a", ttl=600)
    proxy.stall_matching(b"PING", times=1)
    waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: own.admin.client_list(_type="pubsub"))
    first = own.admin.client_list(_type="pubsub")[0]["id"]
    await both.until(
        lambda: any(entry["id"] != first for entry in own.admin.client_list(_type="pubsub"))
    )
    await other.release(held)
    assert (await waiter.result()).token > held.token
    await both.close(through)
    await both.close(direct)


async def test_a_subscription_on_a_quiet_line_is_kept(
    own: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINGER", 0.1)
    monkeypatch.setattr(waiting, "PROBE", 0.2)
    client = both.client_of(own, socket_timeout=0.1)  # which would break a longer read
    lock = await warmed(client)
    held = await lock.acquire("a", ttl=30)
    waiter = both.Running(lambda: lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: own.admin.client_list(_type="pubsub"))
    (first,) = own.admin.client_list(_type="pubsub")
    pings = own.calls("ping")
    await both.until(lambda: own.calls("ping") >= pings + 2)
    assert [entry["id"] for entry in own.admin.client_list(_type="pubsub")] == [first["id"]]
    await lock.release(held)
    await waiter.result()
    await both.close(client)
