"""Holding a lock for a block: kept while it runs, given back at its end, told when it is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from fencekit import (
    AsyncFenceGate,
    AsyncLock,
    FencedOutError,
    FenceKitError,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotAcquired,
    LockNotOwned,
    LockReentered,
)
from fencekit._seam import aio as seam
from fencekit.events import Event, Granted, Lost, Released, Renewed
from fencekit.testing import RedisServer
from tests import aio as both
from tests.site import Site, standing

pytestmark = pytest.mark.asyncio


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


async def work_until_lost(handle: LockHandle, then: Callable[[], Any] = lambda: None) -> None:
    """A body that looks after its lease, as one in a thread has to."""
    then()
    while True:
        handle.check()
        await seam.sleep(0.01)


# -- keeping --------------------------------------------------------------------------------------


async def test_a_held_lock_is_renewed_until_the_block_ends(
    lock: AsyncLock, site: Site, events: list[Event]
) -> None:
    async with lock.hold("a", ttl=0.9) as handle:
        await both.until(lambda: count(events, Renewed) >= 4)  # more than a ttl
        assert handle.state is LeaseState.HELD
        assert site.lock("a")["token"] == str(handle.token.value)
    assert handle.state is LeaseState.RELEASED
    assert site.lock("a") == {}
    assert {type(event) for event in events} == {Granted, Renewed, Released}


async def test_an_acquired_lock_is_not_renewed(lock: AsyncLock, site: Site) -> None:
    handle = await lock.acquire("a", ttl=0.3)
    await both.until(lambda: site.lock("a") == {})
    assert handle.state is LeaseState.LOST
    with pytest.raises(LeaseLost, match="deadline passed"):
        handle.check()
    with pytest.raises(LockNotOwned):
        await lock.extend(handle)


async def test_a_holder_never_counts_on_more_time_than_the_server_gives(
    lock: AsyncLock, site: Site, events: list[Event]
) -> None:
    # I9
    async with lock.hold("a", ttl=0.6) as handle:
        compared = 0
        while count(events, Renewed) < 4 or compared < 20:
            deadline = handle._lease and handle._lease.deadline
            left = site.admin.pttl(site.keys.lock("a")) / 1000
            remaining = handle.remaining
            if handle._lease and handle._lease.deadline == deadline:  # not renewed meanwhile
                assert remaining <= left
                compared += 1
            await seam.sleep(0.02)


async def test_a_lease_extended_in_its_block_is_kept_at_its_new_length(
    lock: AsyncLock, site: Site, events: list[Event]
) -> None:
    async with lock.hold("a", ttl=0.6) as handle:
        await lock.extend(handle, ttl=30)
        renewed = count(events, Renewed)
        await both.until(lambda: count(events, Renewed) > renewed)
        assert site.admin.pttl(site.keys.lock("a")) > 20_000
        assert handle.remaining > 20


async def test_renewals_of_many_leases_travel_together(private_server: RedisServer) -> None:
    site = Site.at(private_server)
    client = both.client_of(site)
    lock = AsyncLock(client)
    leave = seam.Event()

    async def hold(name: str) -> LockHandle:
        async with lock.hold(name, ttl=1.5) as handle:
            await leave.wait(20)
            return handle

    holders = [both.Running(lambda name=f"n{i}": hold(name)) for i in range(30)]
    await both.until(lambda: all(site.lock(f"n{i}") for i in range(30)))
    before = site.calls()
    await seam.sleep(1.6)
    assert all(site.lock(f"n{i}") for i in range(30))
    assert 2 <= site.calls() - before <= 15  # 30 leases, 3 beats or so
    leave.set()
    assert all([(await holder.result()).state is LeaseState.RELEASED for holder in holders])
    site.close()
    await both.close(client)


async def test_a_dropped_hold_is_not_renewed(lock: AsyncLock, site: Site) -> None:
    async def forget() -> None:
        await lock.hold("a", ttl=0.6).__aenter__()

    await both.Running(forget).result()
    gc.collect()
    await both.until(lambda: site.lock("a") == {})


async def test_the_heartbeat_and_its_connection_end_with_the_last_lease(
    private_server: RedisServer,
) -> None:
    site = Site.at(private_server)
    client = both.client_of(site)
    lock = AsyncLock(client)
    handle = await lock.acquire("warm", ttl=5)
    await lock.release(handle)
    idle = len(site.admin.client_list())
    for _ in range(2):
        async with lock.hold("a", ttl=0.6):
            await both.until(lambda: len(site.admin.client_list()) > idle)
        await both.until(lambda: len(site.admin.client_list()) == idle)
    site.close()
    await both.close(client)


async def test_max_hold_ends_the_renewals_of_code_that_hangs(
    lock: AsyncLock, client: Any, events: list[Event]
) -> None:
    # scenario 41
    with pytest.raises(LeaseLost) as lost:
        async with lock.hold("a", ttl=0.6, max_hold=0.9) as handle:
            second = both.Running(lambda: AsyncLock(client).acquire("a", ttl=5, wait=20))
            await work_until_lost(handle)
    assert lost.value.reason == "its deadline passed without a renewal"
    await both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert count(events, Renewed) >= 1
    assert (await second.result()).token > handle.token


# -- the body runs under the lock or not at all ---------------------------------------------------


async def test_the_body_does_not_run_when_the_wait_runs_out(lock: AsyncLock, site: Site) -> None:
    # scenario 34
    await lock.acquire("a", ttl=30)
    for wait in (0, 0.2):
        with pytest.raises(LockNotAcquired):
            async with lock.hold("a", wait=wait):
                raise AssertionError("the body ran")


async def test_a_hold_is_entered_once(lock: AsyncLock) -> None:
    hold = lock.hold("a", ttl=5)
    async with hold:
        pass
    with pytest.raises(RuntimeError, match="call hold"):
        async with hold:
            raise AssertionError("the body ran")


async def test_a_nested_hold_of_the_same_name_fails_at_once(lock: AsyncLock, site: Site) -> None:
    # scenario 55
    async with lock.hold("a", ttl=30) as outer:
        for wait in (20, None):
            with pytest.raises(LockReentered, match="already held by this very task"):
                async with lock.hold("a", ttl=30, wait=wait):
                    raise AssertionError("the body ran")
            with pytest.raises(LockReentered):
                await lock.acquire("a", wait=wait)
        with pytest.raises(LockNotAcquired):
            async with lock.hold("a", ttl=30):
                raise AssertionError("the body ran")
        assert site.lock("a")["token"] == str(outer.token.value)
        assert outer.state is LeaseState.HELD
    assert site.lock("a") == {}
    async with lock.hold("a", ttl=30, wait=20):
        pass


async def test_another_task_or_thread_may_wait_for_a_held_lock(lock: AsyncLock) -> None:
    # scenario 55
    async with lock.hold("a", ttl=30) as outer:
        other = both.Running(lambda: lock.acquire("a", ttl=5, wait=20))
        await seam.sleep(0.05)
        assert not other.done
    assert (await other.result()).token > outer.token


# -- losing ---------------------------------------------------------------------------------------


async def test_a_lease_taken_by_another_is_lost_with_the_next_renewal(
    lock: AsyncLock, site: Site, events: list[Event]
) -> None:
    # scenario 37, scenario 56
    def overwrite() -> None:
        taken = {"owner": "thief", "by": "there/1/thief", "token": "1"}
        site.admin.hset(site.keys.lock("a"), mapping=taken)

    with pytest.raises(LeaseLost) as lost:
        async with lock.hold("a", ttl=1.2) as handle:
            await lock.extend(handle)  # the server knows the script from now on
            before = site.calls()
            await work_until_lost(handle, overwrite)
    assert handle.lost
    with pytest.raises(LeaseLost):
        handle.check()
    assert lost.value.reason == "taken over by there/1/thief"
    assert isinstance(lost.value, FenceKitError)
    assert not isinstance(lost.value, LockNotAcquired)
    await both.until(lambda: count(events, Lost))
    assert events[-1] == Lost("a", handle.token.value, "taken over by there/1/thief")
    await both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert site.calls() == before + 1  # the renewal; leaving asks for nothing
    assert site.lock("a")["owner"] == "thief"


async def test_a_broken_holder_is_told_why_and_its_writes_bounce(
    lock: AsyncLock, gate: AsyncFenceGate, client: Any
) -> None:
    operator = AsyncLock(client)
    with pytest.raises(LeaseLost) as lost:
        async with lock.hold("a", ttl=1.2) as handle:
            waiter = both.Running(lambda: operator.acquire("a", ttl=30, wait=20))
            await both.until(lambda: standing(operator, "a"))
            held = await operator.break_lock("a", reason="wrong batch")
            assert held is not None
            assert held.token == handle.token.value
            with pytest.raises(FencedOutError):
                await gate.check_and_advance(handle.token)
            await work_until_lost(handle)
    heir = await waiter.result()
    assert heir.token > handle.token
    assert lost.value.reason is not None
    assert lost.value.reason.startswith(("broken: wrong batch", "taken over by "))


async def test_a_broken_holder_without_an_heir_hears_the_reason(
    lock: AsyncLock, client: Any
) -> None:
    with pytest.raises(LeaseLost, match="broken: wrong batch"):
        async with lock.hold("a", ttl=1.2) as handle:
            await AsyncLock(client).break_lock("a", reason="wrong batch")
            await work_until_lost(handle)


async def test_a_flush_ends_the_lease(lock: AsyncLock, site: Site) -> None:
    with pytest.raises(LeaseLost, match="no such lease"):
        async with lock.hold("a", ttl=0.9) as handle:
            await work_until_lost(handle, site.flush)


async def test_a_loss_that_nobody_noticed_is_raised_at_the_end(
    lock: AsyncLock, site: Site, events: list[Event]
) -> None:
    with pytest.raises(LeaseLost, match="ended before the block did: it lapsed") as lost:
        async with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
    assert lost.value.reason == "it lapsed"
    assert handle.state is LeaseState.LOST
    await both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert count(events, Released) == 0


async def test_leaving_never_replaces_the_bodys_own_exception(lock: AsyncLock, site: Site) -> None:
    with pytest.raises(ZeroDivisionError):
        async with lock.hold("a", ttl=30):
            raise ZeroDivisionError
    assert site.lock("a") == {}
    with pytest.raises(ZeroDivisionError):
        async with lock.hold("a", ttl=30):
            site.expire_lock("a")
            raise ZeroDivisionError
    with pytest.raises(LockNotOwned):
        async with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
            await lock.extend(handle)
    with pytest.raises(ZeroDivisionError):
        async with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
            try:
                await lock.extend(handle)
            except LockNotOwned:
                raise ZeroDivisionError from None
    await seam.sleep(0.01)  # nothing of the loss is left to hit what comes next


async def test_a_lost_lease_stays_lost(lock: AsyncLock, site: Site, events: list[Event]) -> None:
    # scenario 46
    with pytest.raises(LeaseLost):
        async with lock.hold("a", ttl=0.9) as handle:
            site.expire_lock("a")
            await work_until_lost(handle)
    calls = site.calls()
    for verb in (lock.extend, lock.release):
        with pytest.raises(LockNotOwned):
            await verb(handle)
    assert site.calls() == calls
    assert handle.state is LeaseState.LOST
    assert handle.remaining == 0.0
    await both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later


async def test_a_lock_given_back_in_its_block_is_left_alone_at_the_end(
    lock: AsyncLock, site: Site
) -> None:
    async with lock.hold("a", ttl=5) as handle:
        await lock.release(handle)
        assert handle.state is LeaseState.RELEASED
        heir = await lock.acquire("a", ttl=5)
    assert site.lock("a")["token"] == str(heir.token.value)


async def test_a_delayed_lock_is_lost_to_its_holder_before_it_is_free(
    client: Any, site: Site
) -> None:
    lock = AsyncLock(client, lock_delay=30)
    with pytest.raises(LeaseLost):
        async with lock.hold("a", ttl=0.5, max_hold=0.1) as handle:
            await work_until_lost(handle)
    assert site.lock("a")["token"] == str(handle.token.value)
    with pytest.raises(LockNotAcquired):
        await lock.acquire("a")


async def test_a_lease_that_another_object_gave_back_does_not_keep_its_heartbeat_busy(
    lock: AsyncLock, client: Any, site: Site
) -> None:
    other = both.client_of(site)
    with pytest.raises(LeaseLost):
        async with lock.hold("a", ttl=0.6) as handle:
            await AsyncLock(other).release(handle)
            heartbeat = lock._locking.heartbeat()
            await both.until(lambda: heartbeat._worker is None)  # nothing is left to renew
            handle.check()
    await both.close(other)
