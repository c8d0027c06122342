"""The lock's promises on a healthy server: grants, refusals, giving back, extending, breaking."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from fencekit import (
    AsyncFenceGate,
    AsyncLock,
    Durability,
    FencedOutError,
    FenceToken,
    ForeignValue,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotAcquired,
    LockNotOwned,
)
from fencekit.events import Broken, Event, Granted, Refused, Released, Waited
from fencekit.keys import key_slot
from fencekit.testing import ClusterServers
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio

Step = Callable[[AsyncLock], Any]


# -- grants ---------------------------------------------------------------------------------------


async def test_a_second_caller_is_refused_and_told_who_holds(lock: AsyncLock) -> None:
    handle = await lock.acquire("a", ttl=5, owner_id="me")
    with pytest.raises(LockNotAcquired) as refused:
        await lock.acquire("a", ttl=5)
    assert refused.value.holder is not None
    assert refused.value.holder.endswith("/me")
    assert refused.value.retry_after is not None
    assert 0 < refused.value.retry_after <= 5
    assert await lock.try_acquire("a") is None
    await lock.release(handle)
    assert handle.state is LeaseState.RELEASED


async def test_of_many_who_ask_at_once_one_gets_it(lock: AsyncLock, site: Site) -> None:
    # I2
    outcomes = await both.together([lambda: lock.try_acquire("a", ttl=5)] * 20)
    granted = [handle for handle in outcomes if handle is not None]
    assert len(granted) == 1
    assert site.lock("a")["token"] == str(granted[0].token.value)


async def test_every_grant_has_a_larger_token(lock: AsyncLock, site: Site) -> None:
    # I1
    last = 0
    for _ in range(5):
        handle = await lock.acquire("a", ttl=5)
        assert handle.token.value > last
        assert site.fence("a") == handle.token.value
        last = handle.token.value
        await lock.release(handle)


async def test_a_token_is_larger_than_one_before_the_keys_were_lost(
    lock: AsyncLock, site: Site
) -> None:
    # I1
    before = await lock.acquire("a", ttl=5)
    site.flush()
    after = await lock.acquire("a", ttl=5)
    assert after.token > before.token


async def test_a_token_is_larger_than_a_fence_that_is_ahead_of_the_clock(
    lock: AsyncLock, site: Site
) -> None:
    # I1
    site.move_fence("a", ahead=3600)
    fence = site.fence("a")
    assert (await lock.acquire("a", ttl=5)).token.value == fence + 1


async def test_tokens_are_exact_up_to_the_largest(lock: AsyncLock, site: Site) -> None:
    largest = 2**53 - 2
    site.admin.set(site.keys.fence("a"), largest - 1)
    handle = await lock.acquire("a", ttl=5)
    assert handle.token.value == largest
    assert site.lock("a")["token"] == str(largest)
    await lock.extend(handle)
    await lock.release(handle)


async def test_a_grant_is_one_command_and_every_key_expires(lock: AsyncLock, site: Site) -> None:
    # scenario 52, I8
    await lock.release(await lock.acquire("a"))
    before = site.calls()
    await lock.acquire("a")
    assert site.calls() == before + 1
    assert 29_000 < site.admin.pttl(site.keys.lock("a")) <= 30_000
    assert all(site.admin.pttl(key) > 0 for key in site.all_keys())


async def test_a_fence_outlives_the_lease_for_the_retention_and_never_less_than_the_lease(
    client: Any, site: Site
) -> None:
    await AsyncLock(client, retention=100).acquire("short", ttl=5)
    await AsyncLock(client, retention=1).acquire("long", ttl=60)
    assert 90_000 < site.admin.pttl(site.keys.fence("short")) <= 100_000
    assert 50_000 < site.admin.pttl(site.keys.fence("long")) <= 60_000


async def test_try_acquire_returns_a_handle_or_none(lock: AsyncLock) -> None:
    handle = await lock.try_acquire("a", ttl=5, owner_id="me")
    assert handle is not None
    assert handle.owner_id == "me"
    assert handle.ttl == timedelta(seconds=5)
    assert handle.state is LeaseState.HELD
    assert 4 < handle.remaining <= 5
    handle.check()
    assert await lock.try_acquire("a", ttl=5) is None


async def test_locks_with_two_prefixes_do_not_see_each_other(client: Any) -> None:
    one, other = AsyncLock(client, prefix="one"), AsyncLock(client, prefix="other:x")
    assert await one.try_acquire("a") is not None
    assert await other.try_acquire("a") is not None
    assert one.lock_key("a b") == "one:{a%20b}:lock"
    assert repr(other) == f"{AsyncLock.__name__}(prefix='other:x')"


@pytest.mark.parametrize("name", ["a", "order:{7}", "{x}y", "a}b{", "{}", "ключ ☃", "%7B", "a\n"])
async def test_every_verb_works_for_every_name_and_its_keys_share_a_slot(
    lock: AsyncLock, site: Site, name: str
) -> None:
    # scenario 49
    await _all_verbs(lock, name)
    keys = site.all_keys()
    assert keys
    assert len({key_slot(key) for key in keys}) == 1
    assert {site.keys.name_of(key) for key in keys} == {name}


async def test_every_verb_works_on_a_cluster(fencekit_cluster: ClusterServers) -> None:
    # scenario 49
    fencekit_cluster.flush()
    client = both.client_before(fencekit_cluster)
    for name in ("a", "order:{7}", "{x}y", "a}b{", "{}", "ключ", "b", "c", "d"):
        await _all_verbs(AsyncLock(client), name)
    await both.close(client)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
async def test_every_verb_works_however_the_client_decodes(
    site: Site, decode: bool, protocol: int
) -> None:
    # scenario 50
    client = both.client_of(site, decode_responses=decode, protocol=protocol)
    await _all_verbs(AsyncLock(client), "a")
    await both.close(client)


async def _all_verbs(lock: AsyncLock, name: str) -> None:
    """Each verb once, with both of its outcomes."""
    async with lock.hold(name, ttl=5, owner_id="ü/1") as handle:
        with pytest.raises(LockNotAcquired):
            await lock.acquire(name)
        info = await lock.inspect(name)
        assert info is not None
        assert (info.owner_id, info.token) == ("ü/1", handle.token.value)
    assert await lock.inspect(name) is None
    handle = await lock.acquire(name, ttl=5, wait=1)
    await lock.extend(handle, ttl=9)
    await lock.release(handle)
    with pytest.raises(LockNotOwned):
        await lock.release(handle)
    broken = await lock.acquire(name, ttl=5)
    assert await lock.break_lock(name, reason="a test") is not None
    with pytest.raises(LockNotOwned, match="broken: a test"):
        await lock.extend(broken)
    assert await lock.try_acquire(name, ttl=5) is not None


# -- giving back and extending --------------------------------------------------------------------


async def test_release_by_an_older_handle_of_the_same_owner_does_nothing(
    lock: AsyncLock, site: Site
) -> None:
    old = await lock.acquire("a", ttl=5, owner_id="me")
    site.expire_lock("a")
    new = await lock.acquire("a", ttl=5, owner_id="me")
    with pytest.raises(LockNotOwned):
        await lock.release(old)
    with pytest.raises(LockNotOwned):
        await lock.extend(old, ttl=5)
    assert site.lock("a")["token"] == str(new.token.value)


async def test_a_script_that_the_server_has_forgotten_is_no_earlier_attempt(
    lock: AsyncLock, site: Site
) -> None:
    old = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    await lock.acquire("a", ttl=5)
    site.admin.script_flush()
    with pytest.raises(LockNotOwned, match="taken over by"):
        await lock.release(old)


async def test_a_lock_is_given_back_once(lock: AsyncLock, site: Site) -> None:
    handle = await lock.acquire("a", ttl=5)
    await lock.release(handle)
    assert site.lock("a") == {}
    before = site.calls()
    with pytest.raises(LockNotOwned, match="given back before") as refused:
        await lock.release(handle)
    assert site.calls() == before
    assert (refused.value.resource, refused.value.token) == ("a", handle.token.value)
    with pytest.raises(LeaseLost, match="it was released"):
        handle.check()


async def test_release_tells_who_took_over(lock: AsyncLock, site: Site) -> None:
    old = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    await lock.acquire("a", ttl=5, owner_id="heir")
    with pytest.raises(LockNotOwned) as refused:
        await lock.release(old)
    assert refused.value.reason is not None
    assert refused.value.reason.startswith("taken over by ")
    assert refused.value.reason.endswith("/heir")
    assert old.state is LeaseState.LOST


async def test_release_of_a_lapsed_lease_says_so(lock: AsyncLock, site: Site) -> None:
    handle = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    with pytest.raises(LockNotOwned, match="it lapsed"):
        await lock.release(handle)


async def test_a_lease_that_ended_by_the_own_clock_alone_is_still_given_back(
    lock: AsyncLock, site: Site
) -> None:
    handle = await lock.acquire("a", ttl=5)
    assert handle._lease is not None
    handle._lease.deadline = 0.0
    assert handle.state is LeaseState.LOST
    await lock.release(handle)
    assert site.lock("a") == {}


async def test_an_extended_lease_runs_from_now_and_never_gets_a_new_token(
    lock: AsyncLock, site: Site
) -> None:
    handle = await lock.acquire("a", ttl=2)
    await lock.extend(handle, ttl=timedelta(seconds=60))
    assert 55_000 < site.admin.pttl(site.keys.lock("a")) <= 60_000
    assert 50 < handle.remaining <= 60
    await lock.extend(handle)
    assert site.admin.pttl(site.keys.lock("a")) <= 2_000  # as acquired
    assert site.lock("a")["token"] == str(handle.token.value)


async def test_a_lapsed_lease_is_never_taken_anew(lock: AsyncLock, site: Site) -> None:
    # scenario 46
    lapsed = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    between = await lock.acquire("a", ttl=5)
    await lock.release(between)
    with pytest.raises(LockNotOwned):
        await lock.extend(lapsed)
    assert site.lock("a") == {}
    assert lapsed.lost
    alone = await lock.acquire("b", ttl=5)
    site.expire_lock("b")
    with pytest.raises(LockNotOwned, match="no such lease"):
        await lock.extend(alone)
    assert site.lock("b") == {}


async def test_a_lease_is_not_extended_against_a_newer_fence(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    handle = await lock.acquire("a", ttl=5)
    newer = FenceToken(handle.token.value + 1, "a")
    await gate.check_and_advance(newer)
    with pytest.raises(LockNotOwned, match=f"fenced out by token {newer.value}"):
        await lock.extend(handle)


async def test_extending_brings_back_a_lost_fence(lock: AsyncLock, site: Site) -> None:
    # I3
    handle = await lock.acquire("a", ttl=5)
    site.admin.delete(site.keys.fence("a"))
    await lock.extend(handle)
    assert site.fence("a") == handle.token.value


# -- handles elsewhere ----------------------------------------------------------------------------


async def test_a_handle_travels_as_a_header_or_a_pickle_and_is_detached_there(
    lock: AsyncLock, gate: AsyncFenceGate
) -> None:
    handle = await lock.acquire("order 7;%/ü", ttl=5, owner_id="w;1 %")
    for copy in (
        LockHandle.from_header(handle.to_header()),
        pickle.loads(pickle.dumps(handle)),
    ):
        assert copy == handle
        assert hash(copy) == hash(handle)
        assert copy.state is LeaseState.LOST
        assert copy.remaining == 0.0
        with pytest.raises(LeaseLost, match="detached") as lost:
            copy.check()
        assert lost.value.reason == "detached"
        await gate.check(copy.token)
        await lock.extend(copy, ttl=9)
    await lock.release(LockHandle.from_header(handle.to_header()))
    with pytest.raises(LockNotOwned):
        await lock.release(pickle.loads(pickle.dumps(handle)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v1",
        "v2;lock;42;a;me;30000",
        "v1;lock;42;a;me",
        "v1;lock;42;a;me;30000;",
        "v1;job;42;a;me;30000",
        "v1;lock;0;a;me;30000",
        "v1;lock;-1;a;me;30000",
        "v1;lock;+1;a;me;30000",
        "v1;lock;1e3;a;me;30000",
        "v1;lock;٤٢;a;me;30000",
        f"v1;lock;{2**53};a;me;30000",
        "v1;lock;42;;me;30000",
        "v1;lock;42;a;;30000",
        "v1;lock;42;%ff;me;30000",
        "v1;lock;42;a;%ff;30000",
        "v1;lock;42;a;me;0",
        "v1;lock;42;a;me;",
        "v1;lock;42;" + "a" * 9000 + ";me;30000",
    ],
)
async def test_a_header_that_no_handle_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        LockHandle.from_header(text)


async def test_a_header_is_text(lock: AsyncLock) -> None:
    with pytest.raises(TypeError):
        LockHandle.from_header(b"v1;lock;42;a;me;30000")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "a", FenceToken(1, "a"), 7])
async def test_extend_and_release_want_a_handle(lock: AsyncLock, wrong: Any) -> None:
    for verb in (lock.extend, lock.release):
        with pytest.raises(TypeError, match="needs a LockHandle"):
            await verb(wrong)


# -- looking and breaking -------------------------------------------------------------------------


async def test_inspect_shows_the_holder(client: Any, site: Site) -> None:
    lock = AsyncLock(client, label="worker 3")
    assert await lock.inspect("a") is None
    handle = await lock.acquire("a", ttl=5, owner_id="me")
    before = site.admin.hgetall(site.keys.lock("a"))
    info = await lock.inspect("a")
    assert info is not None
    assert info.resource == "a"
    assert info.holder == f"{info.host}/{info.pid}/worker 3"
    assert info.pid > 0
    assert info.owner_id == "me"
    assert info.token == info.fence == handle.token.value
    assert 0 <= info.age < 5
    assert 0 < info.remaining <= 5
    assert info.waiters == 0
    assert site.admin.hgetall(site.keys.lock("a")) == before
    site.expire_lock("a")
    assert await lock.inspect("a") is None


async def test_a_broken_lock_is_free_and_its_holder_fenced_out_and_told(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site, events: list[Event]
) -> None:
    # I3
    handle = await lock.acquire("a", ttl=5, owner_id="hung")
    held = await lock.break_lock("a", reason="its host is gone")
    assert held is not None
    assert (held.owner_id, held.token) == ("hung", handle.token.value)
    assert site.fence("a") > handle.token.value
    assert Broken("a", handle.token.value, "its host is gone") in events
    assert await lock.inspect("a") is None
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(handle.token, gate.key("a", "row"), "late")
    assert not site.admin.exists(gate.key("a", "row"))
    for verb in (lock.extend, lock.release):
        with pytest.raises(LockNotOwned, match="broken: its host is gone"):
            await verb(handle)
    heir = await lock.acquire("a", ttl=5)
    assert heir.token > handle.token
    await gate.set_if_fresh(heir.token, gate.key("a", "row"), "new")


async def test_breaking_a_lapsed_lock_fences_its_last_holder_out(
    lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    handle = await lock.acquire("a", ttl=5)
    site.expire_lock("a")
    await gate.check(handle.token)
    assert await lock.break_lock("a", reason="late") is None
    with pytest.raises(FencedOutError):
        await gate.check(handle.token)


async def test_breaking_wants_a_reason(lock: AsyncLock) -> None:
    for reason in ("", "  ", "x" * 1001):
        with pytest.raises(ValueError, match="reason"):
            await lock.break_lock("a", reason=reason)
    with pytest.raises(TypeError, match="reason"):
        await lock.break_lock("a", reason=None)  # type: ignore[arg-type]


# -- lock_delay -----------------------------------------------------------------------------------


async def test_a_delay_keeps_a_name_back_after_a_lapse_but_not_after_a_release(
    client: Any, site: Site
) -> None:
    lock = AsyncLock(client, lock_delay=30)
    first = await lock.acquire("a", ttl=5)
    assert 30_000 < site.admin.pttl(site.keys.lock("a")) <= 35_000
    info = await lock.inspect("a")
    assert info is not None
    assert info.remaining <= 5
    await lock.release(first)
    lapsed = await lock.acquire("a", ttl=5)
    site.admin.hset(site.keys.lock("a"), "until", "1")  # the lease has ended, the delay not
    with pytest.raises(LockNotAcquired) as refused:
        await lock.acquire("a", ttl=5)
    assert refused.value.retry_after is not None
    assert refused.value.retry_after > 5
    with pytest.raises(LockNotOwned, match="ran out"):
        await lock.extend(lapsed)


async def test_extending_moves_the_delay_along(client: Any, site: Site) -> None:
    lock = AsyncLock(client, lock_delay=30)
    handle = await lock.acquire("a", ttl=5)
    until = int(site.lock("a")["until"])
    await lock.extend(handle, ttl=20)
    assert int(site.lock("a")["until"]) > until + 10_000
    assert 45_000 < site.admin.pttl(site.keys.lock("a")) <= 50_000


# -- foreign values -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "list", "hash", "hash with owner"])
async def test_what_is_not_a_lock_is_left_alone(lock: AsyncLock, site: Site, kind: str) -> None:
    # I12
    key = site.keys.lock("a")
    {
        "text": lambda: site.admin.set(key, "precious"),
        "list": lambda: site.admin.rpush(key, "precious"),
        "hash": lambda: site.admin.hset(key, "field", "precious"),
        "hash with owner": lambda: site.admin.hset(key, "owner", "precious"),
    }[kind]()
    before = site.admin.dump(key)
    handle = LockHandle("a", "me", FenceToken(7, "a"), timedelta(seconds=5))
    steps: list[Step] = [
        lambda lock: lock.acquire("a"),
        lambda lock: lock.acquire("a", wait=5),
        lambda lock: lock.inspect("a"),
        lambda lock: lock.break_lock("a", reason="a test"),
        lambda lock: lock.release(handle),
    ]
    for step in steps:
        with pytest.raises(ForeignValue) as foreign:
            await step(lock)
        assert foreign.value.key == "fencekit:{a}:lock"
    with pytest.raises(LockNotOwned, match="something else"):
        await lock.extend(handle)
    assert site.admin.dump(key) == before
    assert site.all_keys() == [key]


@pytest.mark.parametrize("value", [b"seven", b"-7", b"07", b"1.5", b"9007199254740992", None])
async def test_what_is_not_a_fence_is_left_alone(
    lock: AsyncLock, site: Site, value: bytes | None
) -> None:
    # I12
    key = site.keys.fence("a")
    if value is None:
        site.admin.rpush(key, "precious")
    else:
        site.admin.set(key, value)
    before = site.admin.dump(key)
    steps: list[Step] = [
        lambda lock: lock.acquire("a"),
        lambda lock: lock.break_lock("a", reason="a test"),
    ]
    for step in steps:
        with pytest.raises(ForeignValue) as foreign:
            await step(lock)
        assert foreign.value.key == "fencekit:{a}:fence"
    assert site.admin.dump(key) == before
    assert site.all_keys() == [key]


# -- bad input ------------------------------------------------------------------------------------

NUMBERS = [0, -1, 0.0004, math.nan, math.inf, -math.inf, 1e12, 10**400]
NO_NUMBERS = [True, False, "5", b"5", [5], 5j]
BAD_DURATIONS = [*NUMBERS, *NO_NUMBERS, timedelta(0), timedelta(seconds=-1), timedelta.max]
BAD_WAITS = [value for value in BAD_DURATIONS if value not in (0, 0.0004, timedelta(0))] + [False]
BAD_NAMES = ["", "  ", None, 5, b"a", "x" * 1025, "\ud800", ["a"]]


async def _enter(lock: AsyncLock, name: Any, **options: Any) -> None:
    async with lock.hold(name, **options):
        raise AssertionError("the body ran")


@pytest.mark.parametrize("ttl", [*BAD_DURATIONS, None], ids=repr)
async def test_a_bad_ttl_is_refused_before_any_command(
    lock: AsyncLock, site: Site, ttl: Any
) -> None:
    # scenario 44
    handle = await lock.acquire("b", ttl=5)
    before, expiry = site.calls(), site.admin.pttl(site.keys.lock("b"))
    for step in (
        lambda: lock.acquire("a", ttl=ttl),
        lambda: lock.try_acquire("a", ttl=ttl),
        lambda: _enter(lock, "a", ttl=ttl),
    ):
        with pytest.raises((ValueError, TypeError), match="ttl"):
            await step()
    if ttl is not None:
        with pytest.raises((ValueError, TypeError), match="ttl"):
            await lock.extend(handle, ttl=ttl)
        with pytest.raises((ValueError, TypeError), match="max_hold"):
            await _enter(lock, "a", max_hold=ttl)
    assert site.calls() == before
    assert 0 < site.admin.pttl(site.keys.lock("b")) <= expiry
    assert site.lock("a") == {}


@pytest.mark.parametrize("wait", BAD_WAITS, ids=repr)
async def test_a_bad_wait_is_refused_before_any_command(
    lock: AsyncLock, site: Site, wait: Any
) -> None:
    # scenario 44
    before = site.calls()
    for step in (lambda: lock.acquire("a", wait=wait), lambda: _enter(lock, "a", wait=wait)):
        with pytest.raises((ValueError, TypeError), match="wait"):
            await step()
    assert site.calls() == before


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:12])
async def test_a_bad_name_is_refused_before_any_command(
    lock: AsyncLock, site: Site, name: Any
) -> None:
    before = site.calls()
    for step in (
        lambda: lock.acquire(name),
        lambda: lock.try_acquire(name),
        lambda: _enter(lock, name),
        lambda: lock.inspect(name),
        lambda: lock.break_lock(name, reason="a test"),
    ):
        with pytest.raises((ValueError, TypeError), match="resource"):
            await step()
    with pytest.raises((ValueError, TypeError), match="resource"):
        lock.lock_key(name)
    assert site.calls() == before


@pytest.mark.parametrize("owner", ["", "x" * 257, "\ud800", 5, b"me", True], ids=repr)
async def test_a_bad_owner_is_refused_before_any_command(
    lock: AsyncLock, site: Site, owner: Any
) -> None:
    before = site.calls()
    for step in (
        lambda: lock.acquire("a", owner_id=owner),
        lambda: lock.try_acquire("a", owner_id=owner),
        lambda: _enter(lock, "a", owner_id=owner),
    ):
        with pytest.raises((ValueError, TypeError), match="owner_id"):
            await step()
    assert site.calls() == before


async def test_durability_is_a_durability(lock: AsyncLock, site: Site) -> None:
    before = site.calls()
    with pytest.raises(TypeError, match="durability"):
        await lock.acquire("a", durability=1)  # type: ignore[arg-type]
    for options in ({"replicas": -1}, {"replicas": 101}, {"timeout": 0}, {"timeout": math.nan}):
        with pytest.raises(ValueError):
            Durability(**options)
    for wrong in (True, 1.5, "1"):
        with pytest.raises(TypeError):
            Durability(replicas=wrong)  # type: ignore[arg-type]
    assert site.calls() == before


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix": ""},
        {"prefix": "a{b"},
        {"prefix": None},
        {"label": 5},
        {"label": "x" * 201},
        {"label": "a\nb"},
        {"timeout": 0},
        {"timeout": math.nan},
        {"retention": -1},
        {"retention": None},
        {"lock_delay": -1},
        {"lock_delay": True},
        {"listeners": [5]},
    ],
    ids=repr,
)
async def test_bad_settings_are_refused(client: Any, settings: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        AsyncLock(client, **settings)


@pytest.mark.parametrize("wrong", [None, "redis://localhost", 5, object], ids=repr)
async def test_the_client_is_one_of_this_half(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{AsyncLock.__name__} needs a redis"):
        AsyncLock(wrong)


async def test_the_heartbeat_is_a_blocking_client(client: Any) -> None:
    with pytest.raises(TypeError, match=r"heartbeat= needs a redis\.Redis client"):
        AsyncLock(client, heartbeat="redis://localhost")


# -- events ---------------------------------------------------------------------------------------


async def test_listeners_hear_what_happens_in_order(lock: AsyncLock, events: list[Event]) -> None:
    handle = await lock.acquire("a", ttl=5, owner_id="me")
    token = handle.token.value
    assert await lock.try_acquire("a") is None
    with pytest.raises(LockNotAcquired):
        await lock.acquire("a", wait=0.01)
    await lock.release(handle)
    granted, refused, waited, again, released = events
    assert isinstance(granted, Granted)
    assert (granted.subject, granted.token) == ("a", token)
    assert isinstance(refused, Refused)
    assert refused.holder is not None
    assert refused.holder.endswith("/me")
    assert isinstance(waited, Waited)
    assert not waited.granted
    assert waited.waited >= 0.01
    assert isinstance(again, Refused)
    assert released == Released("a", token)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
async def test_a_listener_that_fails_breaks_nothing(
    client: Any, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    heard: list[Event] = []

    def bad(event: Event) -> None:
        raise error("a listener's own trouble")

    lock = AsyncLock(client, listeners=[bad, heard.append])
    with caplog.at_level(logging.ERROR, "fencekit"):
        await lock.release(await lock.acquire("a", ttl=5))
    assert [type(event) for event in heard] == [Granted, Released]
    assert caplog.text.count("a fencekit listener failed") == 2
