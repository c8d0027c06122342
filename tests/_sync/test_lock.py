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
    FenceGate,
    DistributedLock,
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
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads

Step = Callable[[DistributedLock], Any]


# -- grants ---------------------------------------------------------------------------------------


def test_a_second_caller_is_refused_and_told_who_holds(lock: DistributedLock) -> None:
    handle = lock.acquire("a", ttl=5, owner_id="me")
    with pytest.raises(LockNotAcquired) as refused:
        lock.acquire("a", ttl=5)
    assert refused.value.holder is not None
    assert refused.value.holder.endswith("/me")
    assert refused.value.retry_after is not None
    assert 0 < refused.value.retry_after <= 5
    assert lock.try_acquire("a") is None
    lock.release(handle)
    assert handle.state is LeaseState.RELEASED


def test_of_many_who_ask_at_once_one_gets_it(lock: DistributedLock, site: Site) -> None:
    # I2
    outcomes = both.together([lambda: lock.try_acquire("a", ttl=5)] * 20)
    granted = [handle for handle in outcomes if handle is not None]
    assert len(granted) == 1
    assert site.lock("a")["token"] == str(granted[0].token.value)


def test_every_grant_has_a_larger_token(lock: DistributedLock, site: Site) -> None:
    # I1
    last = 0
    for _ in range(5):
        handle = lock.acquire("a", ttl=5)
        assert handle.token.value > last
        assert site.fence("a") == handle.token.value
        last = handle.token.value
        lock.release(handle)


def test_a_token_is_larger_than_one_before_the_keys_were_lost(
    lock: DistributedLock, site: Site
) -> None:
    # I1
    before = lock.acquire("a", ttl=5)
    site.flush()
    after = lock.acquire("a", ttl=5)
    assert after.token > before.token


def test_a_token_is_larger_than_a_fence_that_is_ahead_of_the_clock(
    lock: DistributedLock, site: Site
) -> None:
    # I1
    site.move_fence("a", ahead=3600)
    fence = site.fence("a")
    assert (lock.acquire("a", ttl=5)).token.value == fence + 1


def test_tokens_are_exact_up_to_the_largest(lock: DistributedLock, site: Site) -> None:
    largest = 2**53 - 2
    site.admin.set(site.keys.fence("a"), largest - 1)
    handle = lock.acquire("a", ttl=5)
    assert handle.token.value == largest
    assert site.lock("a")["token"] == str(largest)
    lock.extend(handle)
    lock.release(handle)


def test_a_grant_is_one_command_and_every_key_expires(lock: DistributedLock, site: Site) -> None:
    # scenario 52, I8
    lock.release(lock.acquire("a"))
    before = site.calls()
    lock.acquire("a")
    assert site.calls() == before + 1
    assert 29_000 < site.admin.pttl(site.keys.lock("a")) <= 30_000
    assert all(site.admin.pttl(key) > 0 for key in site.all_keys())


def test_a_fence_outlives_the_lease_for_the_retention_and_never_less_than_the_lease(
    client: Any, site: Site
) -> None:
    DistributedLock(client, retention=100).acquire("short", ttl=5)
    DistributedLock(client, retention=1).acquire("long", ttl=60)
    assert 90_000 < site.admin.pttl(site.keys.fence("short")) <= 100_000
    assert 50_000 < site.admin.pttl(site.keys.fence("long")) <= 60_000


def test_try_acquire_returns_a_handle_or_none(lock: DistributedLock) -> None:
    handle = lock.try_acquire("a", ttl=5, owner_id="me")
    assert handle is not None
    assert handle.owner_id == "me"
    assert handle.ttl == timedelta(seconds=5)
    assert handle.state is LeaseState.HELD
    assert 4 < handle.remaining <= 5
    handle.check()
    assert lock.try_acquire("a", ttl=5) is None


def test_locks_with_two_prefixes_do_not_see_each_other(client: Any) -> None:
    one, other = DistributedLock(client, prefix="one"), DistributedLock(client, prefix="other:x")
    assert one.try_acquire("a") is not None
    assert other.try_acquire("a") is not None
    assert one.lock_key("a b") == "one:{a%20b}:lock"
    assert repr(other) == f"{DistributedLock.__name__}(prefix='other:x')"


@pytest.mark.parametrize("name", ["a", "order:{7}", "{x}y", "a}b{", "{}", "ключ ☃", "%7B", "a\n"])
def test_every_verb_works_for_every_name_and_its_keys_share_a_slot(
    lock: DistributedLock, site: Site, name: str
) -> None:
    # scenario 49
    _all_verbs(lock, name)
    keys = site.all_keys()
    assert keys
    assert len({key_slot(key) for key in keys}) == 1
    assert {site.keys.name_of(key) for key in keys} == {name}


def test_every_verb_works_on_a_cluster(fencekit_cluster: ClusterServers) -> None:
    # scenario 49
    fencekit_cluster.flush()
    client = both.client_before(fencekit_cluster)
    for name in ("a", "order:{7}", "{x}y", "a}b{", "{}", "ключ", "b", "c", "d"):
        _all_verbs(DistributedLock(client), name)
    both.close(client)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_every_verb_works_however_the_client_decodes(
    site: Site, decode: bool, protocol: int
) -> None:
    # scenario 50
    client = both.client_of(site, decode_responses=decode, protocol=protocol)
    _all_verbs(DistributedLock(client), "a")
    both.close(client)


def _all_verbs(lock: DistributedLock, name: str) -> None:
    """Each verb once, with both of its outcomes."""
    with lock.hold(name, ttl=5, owner_id="ü/1") as handle:
        with pytest.raises(LockNotAcquired):
            lock.acquire(name)
        info = lock.inspect(name)
        assert info is not None
        assert (info.owner_id, info.token) == ("ü/1", handle.token.value)
    assert lock.inspect(name) is None
    handle = lock.acquire(name, ttl=5, wait=1)
    lock.extend(handle, ttl=9)
    lock.release(handle)
    with pytest.raises(LockNotOwned):
        lock.release(handle)
    broken = lock.acquire(name, ttl=5)
    assert lock.break_lock(name, reason="a test") is not None
    with pytest.raises(LockNotOwned, match="broken: a test"):
        lock.extend(broken)
    assert lock.try_acquire(name, ttl=5) is not None


# -- giving back and extending --------------------------------------------------------------------


def test_release_by_an_older_handle_of_the_same_owner_does_nothing(
    lock: DistributedLock, site: Site
) -> None:
    old = lock.acquire("a", ttl=5, owner_id="me")
    site.expire_lock("a")
    new = lock.acquire("a", ttl=5, owner_id="me")
    with pytest.raises(LockNotOwned):
        lock.release(old)
    with pytest.raises(LockNotOwned):
        lock.extend(old, ttl=5)
    assert site.lock("a")["token"] == str(new.token.value)


def test_a_script_that_the_server_has_forgotten_is_no_earlier_attempt(
    lock: DistributedLock, site: Site
) -> None:
    old = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    lock.acquire("a", ttl=5)
    site.admin.script_flush()
    with pytest.raises(LockNotOwned, match="taken over by"):
        lock.release(old)


def test_a_lock_is_given_back_once(lock: DistributedLock, site: Site) -> None:
    handle = lock.acquire("a", ttl=5)
    lock.release(handle)
    assert site.lock("a") == {}
    before = site.calls()
    with pytest.raises(LockNotOwned, match="given back before") as refused:
        lock.release(handle)
    assert site.calls() == before
    assert (refused.value.resource, refused.value.token) == ("a", handle.token.value)
    with pytest.raises(LeaseLost, match="it was released"):
        handle.check()


def test_release_tells_who_took_over(lock: DistributedLock, site: Site) -> None:
    old = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    lock.acquire("a", ttl=5, owner_id="heir")
    with pytest.raises(LockNotOwned) as refused:
        lock.release(old)
    assert refused.value.reason is not None
    assert refused.value.reason.startswith("taken over by ")
    assert refused.value.reason.endswith("/heir")
    assert old.state is LeaseState.LOST


def test_release_of_a_lapsed_lease_says_so(lock: DistributedLock, site: Site) -> None:
    handle = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    with pytest.raises(LockNotOwned, match="it lapsed"):
        lock.release(handle)


def test_a_lease_that_ended_by_the_own_clock_alone_is_still_given_back(
    lock: DistributedLock, site: Site
) -> None:
    handle = lock.acquire("a", ttl=5)
    assert handle._lease is not None
    handle._lease.deadline = 0.0
    assert handle.state is LeaseState.LOST
    lock.release(handle)
    assert site.lock("a") == {}


def test_an_extended_lease_runs_from_now_and_never_gets_a_new_token(
    lock: DistributedLock, site: Site
) -> None:
    handle = lock.acquire("a", ttl=2)
    lock.extend(handle, ttl=timedelta(seconds=60))
    assert 55_000 < site.admin.pttl(site.keys.lock("a")) <= 60_000
    assert 50 < handle.remaining <= 60
    lock.extend(handle)
    assert site.admin.pttl(site.keys.lock("a")) <= 2_000  # as acquired
    assert site.lock("a")["token"] == str(handle.token.value)


def test_a_lapsed_lease_is_never_taken_anew(lock: DistributedLock, site: Site) -> None:
    # scenario 46
    lapsed = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    between = lock.acquire("a", ttl=5)
    lock.release(between)
    with pytest.raises(LockNotOwned):
        lock.extend(lapsed)
    assert site.lock("a") == {}
    assert lapsed.lost
    alone = lock.acquire("b", ttl=5)
    site.expire_lock("b")
    with pytest.raises(LockNotOwned, match="no such lease"):
        lock.extend(alone)
    assert site.lock("b") == {}


def test_a_lease_is_not_extended_against_a_newer_fence(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    handle = lock.acquire("a", ttl=5)
    newer = FenceToken(handle.token.value + 1, "a")
    gate.check_and_advance(newer)
    with pytest.raises(LockNotOwned, match=f"fenced out by token {newer.value}"):
        lock.extend(handle)


def test_extending_brings_back_a_lost_fence(lock: DistributedLock, site: Site) -> None:
    # I3
    handle = lock.acquire("a", ttl=5)
    site.admin.delete(site.keys.fence("a"))
    lock.extend(handle)
    assert site.fence("a") == handle.token.value


# -- handles elsewhere ----------------------------------------------------------------------------


def test_a_handle_travels_as_a_header_or_a_pickle_and_is_detached_there(
    lock: DistributedLock, gate: FenceGate
) -> None:
    handle = lock.acquire("order 7;%/ü", ttl=5, owner_id="w;1 %")
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
        gate.check(copy.token)
        lock.extend(copy, ttl=9)
    lock.release(LockHandle.from_header(handle.to_header()))
    with pytest.raises(LockNotOwned):
        lock.release(pickle.loads(pickle.dumps(handle)))


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
def test_a_header_that_no_handle_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        LockHandle.from_header(text)


def test_a_header_is_text(lock: DistributedLock) -> None:
    with pytest.raises(TypeError):
        LockHandle.from_header(b"v1;lock;42;a;me;30000")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "a", FenceToken(1, "a"), 7])
def test_extend_and_release_want_a_handle(lock: DistributedLock, wrong: Any) -> None:
    for verb in (lock.extend, lock.release):
        with pytest.raises(TypeError, match="needs a LockHandle"):
            verb(wrong)


# -- looking and breaking -------------------------------------------------------------------------


def test_inspect_shows_the_holder(client: Any, site: Site) -> None:
    lock = DistributedLock(client, label="worker 3")
    assert lock.inspect("a") is None
    handle = lock.acquire("a", ttl=5, owner_id="me")
    before = site.admin.hgetall(site.keys.lock("a"))
    info = lock.inspect("a")
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
    assert lock.inspect("a") is None


def test_a_broken_lock_is_free_and_its_holder_fenced_out_and_told(
    lock: DistributedLock, gate: FenceGate, site: Site, events: list[Event]
) -> None:
    # I3
    handle = lock.acquire("a", ttl=5, owner_id="hung")
    held = lock.break_lock("a", reason="its host is gone")
    assert held is not None
    assert (held.owner_id, held.token) == ("hung", handle.token.value)
    assert site.fence("a") > handle.token.value
    assert Broken("a", handle.token.value, "its host is gone") in events
    assert lock.inspect("a") is None
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(handle.token, gate.key("a", "row"), "late")
    assert not site.admin.exists(gate.key("a", "row"))
    for verb in (lock.extend, lock.release):
        with pytest.raises(LockNotOwned, match="broken: its host is gone"):
            verb(handle)
    heir = lock.acquire("a", ttl=5)
    assert heir.token > handle.token
    gate.set_if_fresh(heir.token, gate.key("a", "row"), "new")


def test_breaking_a_lapsed_lock_fences_its_last_holder_out(
    lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    handle = lock.acquire("a", ttl=5)
    site.expire_lock("a")
    gate.check(handle.token)
    assert lock.break_lock("a", reason="late") is None
    with pytest.raises(FencedOutError):
        gate.check(handle.token)


def test_breaking_wants_a_reason(lock: DistributedLock) -> None:
    for reason in ("", "  ", "x" * 1001):
        with pytest.raises(ValueError, match="reason"):
            lock.break_lock("a", reason=reason)
    with pytest.raises(TypeError, match="reason"):
        lock.break_lock("a", reason=None)  # type: ignore[arg-type]


# -- lock_delay -----------------------------------------------------------------------------------


def test_a_delay_keeps_a_name_back_after_a_lapse_but_not_after_a_release(
    client: Any, site: Site
) -> None:
    lock = DistributedLock(client, lock_delay=30)
    first = lock.acquire("a", ttl=5)
    assert 30_000 < site.admin.pttl(site.keys.lock("a")) <= 35_000
    info = lock.inspect("a")
    assert info is not None
    assert info.remaining <= 5
    lock.release(first)
    lapsed = lock.acquire("a", ttl=5)
    site.admin.hset(site.keys.lock("a"), "until", "1")  # the lease has ended, the delay not
    with pytest.raises(LockNotAcquired) as refused:
        lock.acquire("a", ttl=5)
    assert refused.value.retry_after is not None
    assert refused.value.retry_after > 5
    with pytest.raises(LockNotOwned, match="ran out"):
        lock.extend(lapsed)


def test_extending_moves_the_delay_along(client: Any, site: Site) -> None:
    lock = DistributedLock(client, lock_delay=30)
    handle = lock.acquire("a", ttl=5)
    until = int(site.lock("a")["until"])
    lock.extend(handle, ttl=20)
    assert int(site.lock("a")["until"]) > until + 10_000
    assert 45_000 < site.admin.pttl(site.keys.lock("a")) <= 50_000


# -- foreign values -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "list", "hash", "hash with owner"])
def test_what_is_not_a_lock_is_left_alone(lock: DistributedLock, site: Site, kind: str) -> None:
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
            step(lock)
        assert foreign.value.key == "fencekit:{a}:lock"
    with pytest.raises(LockNotOwned, match="something else"):
        lock.extend(handle)
    assert site.admin.dump(key) == before
    assert site.all_keys() == [key]


@pytest.mark.parametrize("value", [b"seven", b"-7", b"07", b"1.5", b"9007199254740992", None])
def test_what_is_not_a_fence_is_left_alone(
    lock: DistributedLock, site: Site, value: bytes | None
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
            step(lock)
        assert foreign.value.key == "fencekit:{a}:fence"
    assert site.admin.dump(key) == before
    assert site.all_keys() == [key]


# -- bad input ------------------------------------------------------------------------------------

NUMBERS = [0, -1, 0.0004, math.nan, math.inf, -math.inf, 1e12, 10**400]
NO_NUMBERS = [True, False, "5", b"5", [5], 5j]
BAD_DURATIONS = [*NUMBERS, *NO_NUMBERS, timedelta(0), timedelta(seconds=-1), timedelta.max]
BAD_WAITS = [value for value in BAD_DURATIONS if value not in (0, 0.0004, timedelta(0))] + [False]
BAD_NAMES = ["", "  ", None, 5, b"a", "x" * 1025, "\ud800", ["a"]]


def _enter(lock: DistributedLock, name: Any, **options: Any) -> None:
    with lock.hold(name, **options):
        raise AssertionError("the body ran")


@pytest.mark.parametrize("ttl", [*BAD_DURATIONS, None], ids=repr)
def test_a_bad_ttl_is_refused_before_any_command(
    lock: DistributedLock, site: Site, ttl: Any
) -> None:
    # scenario 44
    handle = lock.acquire("b", ttl=5)
    before, expiry = site.calls(), site.admin.pttl(site.keys.lock("b"))
    for step in (
        lambda: lock.acquire("a", ttl=ttl),
        lambda: lock.try_acquire("a", ttl=ttl),
        lambda: _enter(lock, "a", ttl=ttl),
    ):
        with pytest.raises((ValueError, TypeError), match="ttl"):
            step()
    if ttl is not None:
        with pytest.raises((ValueError, TypeError), match="ttl"):
            lock.extend(handle, ttl=ttl)
        with pytest.raises((ValueError, TypeError), match="max_hold"):
            _enter(lock, "a", max_hold=ttl)
    assert site.calls() == before
    assert 0 < site.admin.pttl(site.keys.lock("b")) <= expiry
    assert site.lock("a") == {}


@pytest.mark.parametrize("wait", BAD_WAITS, ids=repr)
def test_a_bad_wait_is_refused_before_any_command(
    lock: DistributedLock, site: Site, wait: Any
) -> None:
    # scenario 44
    before = site.calls()
    for step in (lambda: lock.acquire("a", wait=wait), lambda: _enter(lock, "a", wait=wait)):
        with pytest.raises((ValueError, TypeError), match="wait"):
            step()
    assert site.calls() == before


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:12])
def test_a_bad_name_is_refused_before_any_command(
    lock: DistributedLock, site: Site, name: Any
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
            step()
    with pytest.raises((ValueError, TypeError), match="resource"):
        lock.lock_key(name)
    assert site.calls() == before


@pytest.mark.parametrize("owner", ["", "x" * 257, "\ud800", 5, b"me", True], ids=repr)
def test_a_bad_owner_is_refused_before_any_command(
    lock: DistributedLock, site: Site, owner: Any
) -> None:
    before = site.calls()
    for step in (
        lambda: lock.acquire("a", owner_id=owner),
        lambda: lock.try_acquire("a", owner_id=owner),
        lambda: _enter(lock, "a", owner_id=owner),
    ):
        with pytest.raises((ValueError, TypeError), match="owner_id"):
            step()
    assert site.calls() == before


def test_durability_is_a_durability(lock: DistributedLock, site: Site) -> None:
    before = site.calls()
    with pytest.raises(TypeError, match="durability"):
        lock.acquire("a", durability=1)  # type: ignore[arg-type]
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
def test_bad_settings_are_refused(client: Any, settings: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        DistributedLock(client, **settings)


@pytest.mark.parametrize("wrong", [None, "redis://localhost", 5, object], ids=repr)
def test_the_client_is_one_of_this_half(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{DistributedLock.__name__} needs a redis"):
        DistributedLock(wrong)


def test_the_heartbeat_is_a_blocking_client(client: Any) -> None:
    with pytest.raises(TypeError, match=r"heartbeat= needs a redis\.Redis client"):
        DistributedLock(client, heartbeat="redis://localhost")


# -- events ---------------------------------------------------------------------------------------


def test_listeners_hear_what_happens_in_order(lock: DistributedLock, events: list[Event]) -> None:
    handle = lock.acquire("a", ttl=5, owner_id="me")
    token = handle.token.value
    assert lock.try_acquire("a") is None
    with pytest.raises(LockNotAcquired):
        lock.acquire("a", wait=0.01)
    lock.release(handle)
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
def test_a_listener_that_fails_breaks_nothing(
    client: Any, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    heard: list[Event] = []

    def bad(event: Event) -> None:
        raise error("a listener's own trouble")

    lock = DistributedLock(client, listeners=[bad, heard.append])
    with caplog.at_level(logging.ERROR, "fencekit"):
        lock.release(lock.acquire("a", ttl=5))
    assert [type(event) for event in heard] == [Granted, Released]
    assert caplog.text.count("a fencekit listener failed") == 2
