"""Holding a lock for a block: kept while it runs, given back at its end, told when it is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from fencekit import (
    FenceGate,
    DistributedLock,
    FencedOutError,
    FenceKitError,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotAcquired,
    LockNotOwned,
    LockReentered,
)
from fencekit._seam import threads as seam
from fencekit.events import Event, Granted, Lost, Released, Renewed
from fencekit.testing import RedisServer
from tests import threads as both
from tests.site import Site, standing

pytestmark = pytest.mark.threads


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


def work_until_lost(handle: LockHandle, then: Callable[[], Any] = lambda: None) -> None:
    """A body that looks after its lease, as one in a thread has to."""
    then()
    while True:
        handle.check()
        seam.sleep(0.01)


# -- keeping --------------------------------------------------------------------------------------


def test_a_held_lock_is_renewed_until_the_block_ends(
    lock: DistributedLock, site: Site, events: list[Event]
) -> None:
    with lock.hold("a", ttl=0.9) as handle:
        both.until(lambda: count(events, Renewed) >= 4)  # more than a ttl
        assert handle.state is LeaseState.HELD
        assert site.lock("a")["token"] == str(handle.token.value)
    assert handle.state is LeaseState.RELEASED
    assert site.lock("a") == {}
    assert {type(event) for event in events} == {Granted, Renewed, Released}


def test_an_acquired_lock_is_not_renewed(lock: DistributedLock, site: Site) -> None:
    handle = lock.acquire("a", ttl=0.3)
    both.until(lambda: site.lock("a") == {})
    assert handle.state is LeaseState.LOST
    with pytest.raises(LeaseLost, match="deadline passed"):
        handle.check()
    with pytest.raises(LockNotOwned):
        lock.extend(handle)


def test_a_holder_never_counts_on_more_time_than_the_server_gives(
    lock: DistributedLock, site: Site, events: list[Event]
) -> None:
    # I9
    with lock.hold("a", ttl=0.6) as handle:
        compared = 0
        while count(events, Renewed) < 4 or compared < 20:
            deadline = handle._lease and handle._lease.deadline
            left = site.admin.pttl(site.keys.lock("a")) / 1000
            remaining = handle.remaining
            if handle._lease and handle._lease.deadline == deadline:  # not renewed meanwhile
                assert remaining <= left
                compared += 1
            seam.sleep(0.02)


def test_a_lease_extended_in_its_block_is_kept_at_its_new_length(
    lock: DistributedLock, site: Site, events: list[Event]
) -> None:
    with lock.hold("a", ttl=0.6) as handle:
        lock.extend(handle, ttl=30)
        renewed = count(events, Renewed)
        both.until(lambda: count(events, Renewed) > renewed)
        assert site.admin.pttl(site.keys.lock("a")) > 20_000
        assert handle.remaining > 20


def test_renewals_of_many_leases_travel_together(private_server: RedisServer) -> None:
    site = Site.at(private_server)
    client = both.client_of(site)
    lock = DistributedLock(client)
    leave = seam.Event()

    def hold(name: str) -> LockHandle:
        with lock.hold(name, ttl=1.5) as handle:
            leave.wait(20)
            return handle

    holders = [both.Running(lambda name=f"n{i}": hold(name)) for i in range(30)]
    both.until(lambda: all(site.lock(f"n{i}") for i in range(30)))
    before = site.calls()
    seam.sleep(1.6)
    assert all(site.lock(f"n{i}") for i in range(30))
    assert 2 <= site.calls() - before <= 15  # 30 leases, 3 beats or so
    leave.set()
    assert all([(holder.result()).state is LeaseState.RELEASED for holder in holders])
    site.close()
    both.close(client)


def test_a_dropped_hold_is_not_renewed(lock: DistributedLock, site: Site) -> None:
    def forget() -> None:
        lock.hold("a", ttl=0.6).__enter__()

    both.Running(forget).result()
    gc.collect()
    both.until(lambda: site.lock("a") == {})


def test_the_heartbeat_and_its_connection_end_with_the_last_lease(
    private_server: RedisServer,
) -> None:
    site = Site.at(private_server)
    client = both.client_of(site)
    lock = DistributedLock(client)
    handle = lock.acquire("warm", ttl=5)
    lock.release(handle)
    idle = len(site.admin.client_list())
    for _ in range(2):
        with lock.hold("a", ttl=0.6):
            both.until(lambda: len(site.admin.client_list()) > idle)
        both.until(lambda: len(site.admin.client_list()) == idle)
    site.close()
    both.close(client)


def test_max_hold_ends_the_renewals_of_code_that_hangs(
    lock: DistributedLock, client: Any, events: list[Event]
) -> None:
    # scenario 41
    with pytest.raises(LeaseLost) as lost:
        with lock.hold("a", ttl=0.6, max_hold=0.9) as handle:
            second = both.Running(lambda: DistributedLock(client).acquire("a", ttl=5, wait=20))
            work_until_lost(handle)
    assert lost.value.reason == "its deadline passed without a renewal"
    both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert count(events, Renewed) >= 1
    assert (second.result()).token > handle.token


# -- the body runs under the lock or not at all ---------------------------------------------------


def test_the_body_does_not_run_when_the_wait_runs_out(lock: DistributedLock, site: Site) -> None:
    # scenario 34
    lock.acquire("a", ttl=30)
    for wait in (0, 0.2):
        with pytest.raises(LockNotAcquired):
            with lock.hold("a", wait=wait):
                raise AssertionError("the body ran")


def test_a_hold_is_entered_once(lock: DistributedLock) -> None:
    hold = lock.hold("a", ttl=5)
    with hold:
        pass
    with pytest.raises(RuntimeError, match="call hold"):
        with hold:
            raise AssertionError("the body ran")


def test_a_nested_hold_of_the_same_name_fails_at_once(lock: DistributedLock, site: Site) -> None:
    # scenario 55
    with lock.hold("a", ttl=30) as outer:
        for wait in (20, None):
            with pytest.raises(LockReentered, match="already held by this very task"):
                with lock.hold("a", ttl=30, wait=wait):
                    raise AssertionError("the body ran")
            with pytest.raises(LockReentered):
                lock.acquire("a", wait=wait)
        with pytest.raises(LockNotAcquired):
            with lock.hold("a", ttl=30):
                raise AssertionError("the body ran")
        assert site.lock("a")["token"] == str(outer.token.value)
        assert outer.state is LeaseState.HELD
    assert site.lock("a") == {}
    with lock.hold("a", ttl=30, wait=20):
        pass


def test_another_task_or_thread_may_wait_for_a_held_lock(lock: DistributedLock) -> None:
    # scenario 55
    with lock.hold("a", ttl=30) as outer:
        other = both.Running(lambda: lock.acquire("a", ttl=5, wait=20))
        seam.sleep(0.05)
        assert not other.done
    assert (other.result()).token > outer.token


# -- losing ---------------------------------------------------------------------------------------


def test_a_lease_taken_by_another_is_lost_with_the_next_renewal(
    lock: DistributedLock, site: Site, events: list[Event]
) -> None:
    # scenario 37, scenario 56
    def overwrite() -> None:
        taken = {"owner": "thief", "by": "there/1/thief", "token": "1"}
        site.admin.hset(site.keys.lock("a"), mapping=taken)

    with pytest.raises(LeaseLost) as lost:
        with lock.hold("a", ttl=1.2) as handle:
            lock.extend(handle)  # the server knows the script from now on
            before = site.calls()
            work_until_lost(handle, overwrite)
    assert handle.lost
    with pytest.raises(LeaseLost):
        handle.check()
    assert lost.value.reason == "taken over by there/1/thief"
    assert isinstance(lost.value, FenceKitError)
    assert not isinstance(lost.value, LockNotAcquired)
    both.until(lambda: count(events, Lost))
    assert events[-1] == Lost("a", handle.token.value, "taken over by there/1/thief")
    both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert site.calls() == before + 1  # the renewal; leaving asks for nothing
    assert site.lock("a")["owner"] == "thief"


def test_a_broken_holder_is_told_why_and_its_writes_bounce(
    lock: DistributedLock, gate: FenceGate, client: Any
) -> None:
    operator = DistributedLock(client)
    with pytest.raises(LeaseLost) as lost:
        with lock.hold("a", ttl=1.2) as handle:
            waiter = both.Running(lambda: operator.acquire("a", ttl=30, wait=20))
            both.until(lambda: standing(operator, "a"))
            held = operator.break_lock("a", reason="wrong batch")
            assert held is not None
            assert held.token == handle.token.value
            with pytest.raises(FencedOutError):
                gate.check_and_advance(handle.token)
            work_until_lost(handle)
    heir = waiter.result()
    assert heir.token > handle.token
    assert lost.value.reason is not None
    assert lost.value.reason.startswith(("broken: wrong batch", "taken over by "))


def test_a_broken_holder_without_an_heir_hears_the_reason(
    lock: DistributedLock, client: Any
) -> None:
    with pytest.raises(LeaseLost, match="broken: wrong batch"):
        with lock.hold("a", ttl=1.2) as handle:
            DistributedLock(client).break_lock("a", reason="wrong batch")
            work_until_lost(handle)


def test_a_flush_ends_the_lease(lock: DistributedLock, site: Site) -> None:
    with pytest.raises(LeaseLost, match="no such lease"):
        with lock.hold("a", ttl=0.9) as handle:
            work_until_lost(handle, site.flush)


def test_a_loss_that_nobody_noticed_is_raised_at_the_end(
    lock: DistributedLock, site: Site, events: list[Event]
) -> None:
    with pytest.raises(LeaseLost, match="ended before the block did: it lapsed") as lost:
        with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
    assert lost.value.reason == "it lapsed"
    assert handle.state is LeaseState.LOST
    both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later
    assert count(events, Released) == 0


def test_leaving_never_replaces_the_bodys_own_exception(lock: DistributedLock, site: Site) -> None:
    with pytest.raises(ZeroDivisionError):
        with lock.hold("a", ttl=30):
            raise ZeroDivisionError
    assert site.lock("a") == {}
    with pytest.raises(ZeroDivisionError):
        with lock.hold("a", ttl=30):
            site.expire_lock("a")
            raise ZeroDivisionError
    with pytest.raises(LockNotOwned):
        with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
            lock.extend(handle)
    with pytest.raises(ZeroDivisionError):
        with lock.hold("a", ttl=30) as handle:
            site.expire_lock("a")
            try:
                lock.extend(handle)
            except LockNotOwned:
                raise ZeroDivisionError from None
    seam.sleep(0.01)  # nothing of the loss is left to hit what comes next


def test_a_lost_lease_stays_lost(lock: DistributedLock, site: Site, events: list[Event]) -> None:
    # scenario 46
    with pytest.raises(LeaseLost):
        with lock.hold("a", ttl=0.9) as handle:
            site.expire_lock("a")
            work_until_lost(handle)
    calls = site.calls()
    for verb in (lock.extend, lock.release):
        with pytest.raises(LockNotOwned):
            verb(handle)
    assert site.calls() == calls
    assert handle.state is LeaseState.LOST
    assert handle.remaining == 0.0
    both.until(lambda: count(events, Lost) == 1)  # told by the heartbeat, a moment later


def test_a_lock_given_back_in_its_block_is_left_alone_at_the_end(
    lock: DistributedLock, site: Site
) -> None:
    with lock.hold("a", ttl=5) as handle:
        lock.release(handle)
        assert handle.state is LeaseState.RELEASED
        heir = lock.acquire("a", ttl=5)
    assert site.lock("a")["token"] == str(heir.token.value)


def test_a_delayed_lock_is_lost_to_its_holder_before_it_is_free(
    client: Any, site: Site
) -> None:
    lock = DistributedLock(client, lock_delay=30)
    with pytest.raises(LeaseLost):
        with lock.hold("a", ttl=0.5, max_hold=0.1) as handle:
            work_until_lost(handle)
    assert site.lock("a")["token"] == str(handle.token.value)
    with pytest.raises(LockNotAcquired):
        lock.acquire("a")


def test_a_lease_that_another_object_gave_back_does_not_keep_its_heartbeat_busy(
    lock: DistributedLock, client: Any, site: Site
) -> None:
    other = both.client_of(site)
    with pytest.raises(LeaseLost):
        with lock.hold("a", ttl=0.6) as handle:
            DistributedLock(other).release(handle)
            heartbeat = lock._locking.heartbeat()
            both.until(lambda: heartbeat._worker is None)  # nothing is left to renew
            handle.check()
    both.close(other)
