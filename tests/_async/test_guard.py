"""The guard's verbs: starting, completing, reading and forgetting a named job."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from redis.exceptions import RedisError

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    BeginOutcome,
    CanonicalizeError,
    Claim,
    ForeignValue,
    IdempotencyNotOwned,
    IdempotencyResultMissing,
    ResultTooLarge,
)
from fencekit.events import Begun, Duplicate, Event, FencedOut, Finished, Reclaimed, Replayed
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio

DAY = 86400.0


def life(site: Site, key: bytes) -> float:
    """Seconds until the key expires; negative when it never does."""
    return site.admin.pttl(key) / 1000


# Starting


async def test_of_many_callers_one_starts(client: Any, site: Site) -> None:
    guards = [AsyncGuard(client) for _ in range(20)]
    answers = await both.together(partial(one.try_begin, "a", ttl=60) for one in guards)
    assert sorted(answers) == [False] * 19 + [True]
    assert site.job("a")["n"] == b"1"


async def test_a_plain_start_is_never_repeated_within_its_ttl(client: Any, site: Site) -> None:
    assert await AsyncGuard(client).try_begin("a", ttl=60)
    # Its worker is gone, and nothing says so: a plain start has no lease.
    assert "l" not in site.job("a")
    assert 59 < life(site, site.keys.job("a")) <= 60
    assert not await AsyncGuard(client).try_begin("a", ttl=60)
    assert not await AsyncGuard(client).try_begin("a", ttl=0.001)
    assert 50 < life(site, site.keys.job("a")) <= 60
    site.expire(site.keys.job("a"))
    assert await AsyncGuard(client).try_begin("a", ttl=60)


async def test_a_start_lives_a_day_unless_told_otherwise(guard: AsyncGuard, site: Site) -> None:
    await guard.try_begin("a")
    await guard.try_begin("b", ttl=timedelta(minutes=5))
    await guard.try_begin("c", ttl=0.5)
    assert DAY - 1 < life(site, site.keys.job("a")) <= DAY
    assert 299 < life(site, site.keys.job("b")) <= 300
    assert 0 < life(site, site.keys.job("c")) <= 0.5


async def test_a_done_job_is_not_started_again(guard: AsyncGuard, client: Any) -> None:
    assert await guard.try_begin("a", ttl=60)
    await guard.mark_done("a")
    assert not await guard.try_begin("a", ttl=60)
    assert not await AsyncGuard(client).try_begin("a", ttl=60)


async def test_a_plain_start_that_takes_over_a_dead_claim_says_so(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    claim = await AsyncGuard(client).begin("a", lease=30)
    assert not await guard.try_begin("a")
    site.lapse("a")
    assert await guard.try_begin("a")
    await guard.mark_done("a", result="new")
    with pytest.raises(IdempotencyNotOwned):
        await AsyncGuard(client).finish(claim, "old")
    assert await guard.get_result("a") == "new"


async def test_jobs_that_failed_for_good_or_ended_unknown_are_not_started_by_a_plain_start(
    guard: AsyncGuard, lock: AsyncLock, site: Site
) -> None:
    await guard.fail(await guard.begin("a"), ValueError("no"), retry=False)
    await guard.begin("b", on_lapse="block")
    site.lapse("b")
    for key, outcome in (("a", BeginOutcome.FAILED), ("b", BeginOutcome.UNKNOWN)):
        assert not await guard.try_begin(key)
        found = await guard.try_begin_or_reclaim(key, lock=lock, lock_resource="r")
        assert found is outcome


# Who is who


async def test_every_guard_has_an_owner_id_of_its_own_unless_one_is_chosen(client: Any) -> None:
    guards = [AsyncGuard(client) for _ in range(3)]
    assert len({one.owner_id for one in guards}) == 3
    assert guards[0].owner_id == guards[0].owner_id
    assert AsyncGuard(client, owner_id="worker-7").owner_id == "worker-7"


async def test_a_start_is_labelled_with_host_process_and_label(client: Any, site: Site) -> None:
    await AsyncGuard(client, label="billing").try_begin("a")
    await AsyncGuard(client, owner_id="worker-7").try_begin("b")
    assert site.job("a")["b"].endswith(b"/billing")
    assert site.job("b")["b"].endswith(b"/worker-7")
    assert site.job("b")["o"] == b"worker-7"


# Completing


async def test_only_the_guard_that_started_completes(guard: AsyncGuard, client: Any) -> None:
    await guard.try_begin("a")
    with pytest.raises(IdempotencyNotOwned) as refused:
        await AsyncGuard(client).mark_done("a", result="stolen")
    assert (refused.value.key, refused.value.state) == ("a", "pending")
    assert not refused.value.has_result
    assert await guard.status("a") == "pending"
    await guard.mark_done("a", result="mine")
    assert await guard.get_result("a") == "mine"


async def test_a_job_that_was_never_started_cannot_be_completed(
    guard: AsyncGuard, site: Site
) -> None:
    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.mark_done("a", result=1)
    assert refused.value.state is None
    assert site.all_keys() == []


async def test_an_expired_start_cannot_be_completed(guard: AsyncGuard, site: Site) -> None:
    await guard.try_begin("a")
    site.expire(site.keys.job("a"))
    with pytest.raises(IdempotencyNotOwned):
        await guard.mark_done("a", result=1)
    assert await guard.status("a") is None


async def test_the_stale_start_of_the_same_owner_cannot_complete(client: Any, site: Site) -> None:
    # I5: identity is the owner and the token, and an owner id may be shared.
    old, new = AsyncGuard(client, owner_id="w"), AsyncGuard(client, owner_id="w")
    assert await old.try_begin("a", ttl=60)
    site.expire(site.keys.job("a"))
    assert await new.try_begin("a", ttl=60)
    with pytest.raises(IdempotencyNotOwned) as refused:
        await old.mark_done("a", result="old")
    assert refused.value.token > 0
    assert await new.status("a") == "pending"
    await new.mark_done("a", result="new")
    with pytest.raises(IdempotencyNotOwned) as refused:
        await old.mark_done("a", result="old")
    assert refused.value.has_result
    assert refused.value.result == "new"
    assert await old.get_result("a") == "new"


async def test_another_guard_with_the_same_owner_id_completes_what_it_knows_nothing_about(
    client: Any,
) -> None:
    # A worker that was restarted under its old name: published behaviour since 0.6.
    assert await AsyncGuard(client, owner_id="w").try_begin("a")
    again = AsyncGuard(client, owner_id="w")
    await again.mark_done("a", result=1)
    assert await again.get_result("a") == 1


async def test_a_second_completion_is_refused_and_told_the_first_ones_result(
    guard: AsyncGuard,
) -> None:
    await guard.try_begin("a")
    await guard.mark_done("a", result=[1])
    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.mark_done("a", result=[2])
    assert (refused.value.state, refused.value.result) == ("done", [1])
    assert await guard.get_result("a") == [1]


async def test_a_completion_says_how_long_it_is_remembered(guard: AsyncGuard, site: Site) -> None:
    for key in "abc":
        await guard.try_begin(key, ttl=100)
    await guard.mark_done("a")
    await guard.mark_done("b", ttl=timedelta(hours=1))
    await guard.mark_done("c", ttl=0.5)
    assert 90 < life(site, site.keys.job("a")) <= 100
    assert 3590 < life(site, site.keys.job("b")) <= 3600
    assert 0 < life(site, site.keys.job("c")) <= 0.5


# scenario 74
@pytest.mark.parametrize("result", [None, False, 0, "", [], b""], ids=repr)
async def test_an_empty_result_is_a_result(guard: AsyncGuard, result: Any) -> None:
    await guard.try_begin("a")
    await guard.mark_done("a", result=result)
    found = await guard.get_result("a")
    assert found == result
    assert type(found) is type(result)
    assert (await guard.begin("a")).has_result


async def test_a_result_that_cannot_be_remembered_leaves_the_job_to_its_owner(
    client: Any,
) -> None:
    guard = AsyncGuard(client, max_result=10)
    await guard.try_begin("a")
    with pytest.raises(ResultTooLarge) as large:
        await guard.mark_done("a", result="x" * 9)
    assert (large.value.key, large.value.size, large.value.limit) == ("a", 11, 10)
    with pytest.raises(CanonicalizeError):
        await guard.mark_done("a", result=object())
    assert await guard.status("a") == "pending"
    await guard.mark_done("a", result="x" * 8)
    assert await guard.get_result("a") == "x" * 8


async def test_a_guard_remembers_its_starts_only_as_long_as_their_records_live(
    guard: AsyncGuard,
) -> None:
    for number in range(5000):
        guard._claiming.remember(f"old-{number}", 1, ttl=0.0001)
    assert await guard.try_begin("new", ttl=60)
    assert len(guard._claiming._started._tokens) <= 1025
    await guard.mark_done("new")


# Taking over


@pytest.mark.parametrize("resource", ["r", "a"], ids=["another name", "the job's name"])
async def test_a_pending_job_is_taken_over_only_while_the_lock_is_free(
    guard: AsyncGuard, client: Any, site: Site, resource: str
) -> None:
    worker, lock = AsyncGuard(client), AsyncLock(client)
    first = await worker.try_begin_or_reclaim("a", lock=lock, lock_resource=resource, ttl=60)
    assert first is BeginOutcome.BEGUN
    handle = await lock.acquire(resource, ttl=30)
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource=resource, ttl=90)
    assert await reclaim() is BeginOutcome.IN_PROGRESS
    token = int(site.job("a")["t"])
    await lock.release(handle)
    assert not await guard.try_begin("a")
    assert await reclaim() is BeginOutcome.RECLAIMED
    assert int(site.job("a")["t"]) > token
    assert 80 < life(site, site.keys.job("a")) <= 90
    with pytest.raises(IdempotencyNotOwned):
        await worker.mark_done("a", result="late")
    await guard.mark_done("a", result="done")
    assert await reclaim() is BeginOutcome.ALREADY_DONE
    assert await reclaim() is BeginOutcome.ALREADY_DONE
    assert await worker.get_result("a") == "done"


async def test_a_lock_that_ran_out_or_was_broken_is_free(
    guard: AsyncGuard, lock: AsyncLock, client: Any, site: Site
) -> None:
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r")
    assert await AsyncGuard(client).try_begin("a")
    await lock.acquire("r", ttl=30)
    assert await reclaim() is BeginOutcome.IN_PROGRESS
    site.expire_lock("r")
    assert await reclaim() is BeginOutcome.RECLAIMED
    await lock.acquire("r", ttl=30)
    assert await reclaim() is BeginOutcome.IN_PROGRESS
    await lock.break_lock("r", reason="test")
    assert await reclaim() is BeginOutcome.RECLAIMED


async def test_a_live_claim_is_not_taken_over_through_a_free_lock(
    guard: AsyncGuard, lock: AsyncLock, client: Any, site: Site
) -> None:
    claim = await AsyncGuard(client).begin("a", lease=30)
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r")
    assert await reclaim() is BeginOutcome.IN_PROGRESS
    assert not claim.lost
    site.lapse("a")
    assert await reclaim() is BeginOutcome.RECLAIMED


async def test_reclaiming_needs_a_lock_of_the_same_kind_and_prefix(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    with pytest.raises(TypeError, match="lock is a"):
        await guard.try_begin_or_reclaim("a", lock=object(), lock_resource="r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same prefix"):
        await guard.try_begin_or_reclaim(
            "a", lock=AsyncLock(client, prefix="other"), lock_resource="r"
        )
    assert site.all_keys() == []


# Reading


async def test_status_tells_where_a_job_stands(guard: AsyncGuard, site: Site) -> None:
    assert await guard.status("a") is None
    await guard.try_begin("a")
    assert await guard.status("a") == "pending"
    await guard.mark_done("a")
    assert await guard.status("a") == "done"
    claim = await guard.begin("b")
    assert await guard.status("b") == "pending"
    site.lapse("b")
    assert await guard.status("b") == "pending"
    await guard.fail(claim)
    assert await guard.status("b") is None
    await guard.fail(await guard.begin("b"), retry=False)
    assert await guard.status("b") == "failed"


async def test_a_missing_result_says_why_it_is_missing(guard: AsyncGuard) -> None:
    await guard.try_begin("pending")
    await guard.try_begin("bare")
    await guard.mark_done("bare")
    await guard.fail(await guard.begin("failed"), ValueError("no"), retry=False)
    await guard.fail(await guard.begin("free"), ValueError("no"))
    reasons = {
        "absent": (None, "no record"),
        "pending": ("pending", "still pending"),
        "bare": ("done", "without a stored result"),
        "failed": ("failed", "failed, and its failure is remembered"),
        "free": (None, "may be started again"),
    }
    for key, (state, reason) in reasons.items():
        with pytest.raises(IdempotencyResultMissing, match=reason) as missing:
            await guard.get_result(key)
        assert (missing.value.key, missing.value.state) == (key, state)
        assert repr(key) in str(missing.value)


async def test_reading_changes_nothing(guard: AsyncGuard, site: Site) -> None:
    await guard.status("a")
    with pytest.raises(IdempotencyResultMissing):
        await guard.get_result("a")
    assert site.all_keys() == []
    await guard.try_begin("a")
    before = site.job("a")
    await guard.status("a")
    with pytest.raises(IdempotencyResultMissing):
        await guard.get_result("a")
    assert site.job("a") == before


# Forgetting


async def test_a_cleared_job_starts_again_and_its_old_start_cannot_complete(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    other = AsyncGuard(client)
    await guard.clear("a")
    await guard.try_begin("a")
    await other.clear("a")
    assert site.all_keys() == []
    assert await other.try_begin("a")
    with pytest.raises(IdempotencyNotOwned):
        await guard.mark_done("a", result="old")
    await other.mark_done("a", result="new")
    await guard.clear("a")
    with pytest.raises(IdempotencyResultMissing):
        await guard.get_result("a")


async def test_a_claim_of_a_cleared_job_cannot_be_finished(guard: AsyncGuard, client: Any) -> None:
    claim = await guard.begin("a")
    await AsyncGuard(client).clear("a")
    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.finish(claim, 1)
    assert refused.value.state is None
    assert await guard.status("a") is None


# What others wrote


FOREIGN: dict[str, Any] = {
    "text": "somebody else's",
    "list": ["x"],
    "other hash": {"price": "12"},
    "wrong state": {"s": "zz", "t": "12", "n": "1"},
    "no state": {"s": "", "t": "12", "n": "1"},
    "two states": {"s": "pd", "t": "12", "n": "1", "o": "me"},
    "wrong token": {"s": "p", "t": "twelve", "n": "1"},
    "no token": {"s": "d", "n": "1"},
    "wrong count": {"s": "d", "t": "12", "n": "many"},
    "wrong lease": {"s": "p", "t": "12", "n": "1", "l": "soon", "u": "1", "o": "me"},
}


def put(site: Site, key: bytes, value: Any) -> bytes:
    """Put a foreign value there; what it looks like to Redis."""
    site.admin.delete(key)
    if isinstance(value, dict):
        site.admin.hset(key, mapping=value)
    elif isinstance(value, list):
        site.admin.rpush(key, *value)
    else:
        site.admin.set(key, value)
    return bytes(site.admin.dump(key))


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_foreign_value_at_a_jobs_key_is_named_and_left_alone(
    client: Any, lock: AsyncLock, site: Site, kind: str
) -> None:
    # I12
    guard = AsyncGuard(client, owner_id="me")
    claim = await guard.begin("a")
    key = site.keys.job("a")
    value = put(site, key, FOREIGN[kind])
    verbs: list[Any] = [
        partial(guard.try_begin, "a"),
        partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="a"),
        partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r"),
        partial(guard.mark_done, "a", result=1),
        partial(guard.begin, "a"),
        partial(guard.begin, "a", lock="a"),
        partial(guard.finish, claim, 1),
        partial(guard.fail, claim),
        partial(guard.status, "a"),
        partial(guard.get_result, "a"),
        partial(guard.clear, "a"),
        partial(guard.resolve, "a", 1),
        partial(guard.once, "a", int),
    ]
    for verb in verbs:
        with pytest.raises(ForeignValue) as refused:
            await verb()
        assert refused.value.key == key.decode()
        assert key.decode() in str(refused.value)
        assert site.admin.dump(key) == value
    assert site.admin.ttl(key) == -1
    assert site.all_keys() == [key]


async def test_a_foreign_value_at_a_lock_or_fence_key_starts_no_job(
    guard: AsyncGuard, site: Site
) -> None:
    # I12
    for key in (site.keys.lock("r"), site.keys.fence("r")):
        value = put(site, key, ["x"])
        with pytest.raises(ForeignValue) as refused:
            await guard.begin("a", lock="r")
        assert refused.value.key == key.decode()
        assert site.admin.dump(key) == value
        assert site.all_keys() == [key]
        site.admin.delete(key)
    fence = site.keys.job_fence("a")
    value = put(site, fence, "not a number")
    with pytest.raises(ForeignValue) as refused:
        await guard.begin("a")
    assert refused.value.key == fence.decode()
    assert site.admin.dump(fence) == value
    assert site.all_keys() == [fence]


# What nobody may ask


def nowhere(**settings: Any) -> AsyncGuard:
    """A guard without a server: whatever reaches the network fails as a network does."""
    return AsyncGuard(both.client_without_server(), timeout=0.001, **settings)


NAMES = (None, 5, b"a", "", " \t", "x" * 1025, "\ud800")
DURATIONS = (0, -1, 0.0004, math.nan, math.inf, 10**400, timedelta(0), timedelta(days=5000))
NO_DURATIONS = ("5", True, [], 1j)


async def refused(verb: Any, *args: Any, **kwargs: Any) -> None:
    """Fails unless the call is refused before anything is sent."""
    with pytest.raises((TypeError, ValueError)):
        await verb(*args, **kwargs)


async def entered(*args: Any, **kwargs: Any) -> None:
    async with nowhere().run(*args, **kwargs):
        pass


async def test_a_guard_without_a_server_cannot_ask() -> None:
    for verb in (nowhere().try_begin, nowhere().begin, nowhere().status, entered):
        with pytest.raises(RedisError):
            await verb("a")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:12])
async def test_a_bad_name_is_refused_before_anything_is_sent(name: Any) -> None:
    guard, lock = nowhere(), AsyncLock(both.client_without_server(), timeout=0.001)
    for verb in (guard.try_begin, guard.mark_done, guard.get_result, guard.status, guard.clear):
        await refused(verb, name)
    await refused(guard.try_begin_or_reclaim, name, lock=lock, lock_resource="r")
    await refused(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource=name)
    for verb in (guard.begin, guard.resolve, entered):
        await refused(verb, name)
    await refused(guard.once, name, int)
    if name is not None:
        await refused(guard.begin, "a", lock=name)
        await refused(entered, "a", lock=name)
        await refused(guard.once, "a", int, lock=name)
        with pytest.raises((TypeError, ValueError)):
            guard.idempotent(lock=name)


@pytest.mark.parametrize("given", [*DURATIONS, *NO_DURATIONS, None], ids=lambda x: repr(x)[:12])
async def test_a_bad_duration_is_refused_before_anything_is_sent(given: Any) -> None:
    guard, lock = nowhere(), AsyncLock(both.client_without_server(), timeout=0.001)
    for name in ("ttl", "lease"):
        for verb in (guard.begin, entered):
            await refused(verb, "a", **{name: given})
        await refused(guard.once, "a", int, **{name: given})
        with pytest.raises((TypeError, ValueError)):
            guard.idempotent(**{name: given})
    await refused(guard.try_begin, "a", ttl=given)
    await refused(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r", ttl=given)
    for name in ("timeout", "retention"):
        with pytest.raises((TypeError, ValueError)):
            AsyncGuard(both.client_without_server(), **{name: given})
    if given is None:
        return  # "as it is", "without end", "no limit"
    claim = Claim("a", BeginOutcome.BEGUN, "me", 1)
    await refused(guard.mark_done, "a", ttl=given)
    await refused(guard.resolve, "a", ttl=given)
    await refused(guard.finish, claim, ttl=given)
    await refused(guard.fail, claim, ttl=given)
    await refused(entered, "a", max_hold=given)
    if given not in (0, timedelta(0), 0.0004):
        await refused(guard.once, "a", int, wait=given)


async def test_other_bad_input_is_refused_before_anything_is_sent() -> None:
    guard = nowhere()
    bad: list[dict[str, Any]] = [
        {"fingerprint": 5}, {"fingerprint": ""}, {"fingerprint": "x" * 1025},
        {"max_attempts": 0}, {"max_attempts": -1}, {"max_attempts": 1.5}, {"max_attempts": True},
        {"max_attempts": 10**7}, {"on_lapse": "ignore"}, {"on_lapse": None},
    ]  # fmt: skip
    for settings in bad:
        await refused(guard.begin, "a", **settings)
        await refused(entered, "a", **settings)
        await refused(guard.once, "a", int, **settings)
    for remember in (5, [int], (KeyboardInterrupt,), int):
        await refused(entered, "a", remember=remember)
        await refused(guard.once, "a", int, remember=remember)
    for claim in (None, "a", object()):
        await refused(guard.finish, claim)
        await refused(guard.fail, claim)
    await refused(guard.once, "a", None)
    await refused(guard.once, "a", "int")
    with pytest.raises(ValueError, match="on_missing_key"):
        guard.idempotent(on_missing_key="skip")  # type: ignore[arg-type]


async def test_a_result_that_cannot_be_remembered_is_refused_before_anything_is_sent() -> None:
    guard = nowhere(max_result=3)
    claim = Claim("a", BeginOutcome.BEGUN, "me", 1)
    for verb in (partial(guard.mark_done, "a"), partial(guard.resolve, "a")):
        with pytest.raises(CanonicalizeError):
            await verb(result=math.nan)
        with pytest.raises(ResultTooLarge):
            await verb(result=1234)
    with pytest.raises(CanonicalizeError):
        await guard.finish(claim, {1: 2})
    with pytest.raises(ResultTooLarge):
        await guard.finish(claim, 1234)


async def test_a_claim_that_was_not_started_here_is_refused_before_anything_is_sent() -> None:
    for outcome in BeginOutcome:
        claim = Claim("a", outcome, "me", 1)
        for verb in (nowhere().finish, nowhere().fail):
            with pytest.raises(IdempotencyNotOwned, match="not started here"):
                await verb(claim)


async def test_a_guard_refuses_bad_settings() -> None:
    bad: list[dict[str, Any]] = [
        {"prefix": ""}, {"prefix": "a b"}, {"prefix": "{a}"}, {"prefix": 5}, {"owner_id": ""},
        {"owner_id": "x" * 257}, {"owner_id": 5}, {"owner_id": "\ud800"}, {"label": "a\nb"},
        {"label": "x" * 201}, {"label": None}, {"max_result": 0}, {"max_result": True},
        {"max_result": 1.5}, {"listeners": [5]}, {"heartbeat": object()},
    ]  # fmt: skip
    for settings in bad:
        with pytest.raises((TypeError, ValueError)):
            AsyncGuard(both.client_without_server(), **settings)
    for client in (None, object(), "redis://127.0.0.1"):
        with pytest.raises(TypeError, match="client"):
            AsyncGuard(client)


# scenario 65
async def test_data_lock_guard_and_gate_of_one_name_never_meet(
    client: Any, guard: AsyncGuard, lock: AsyncLock, gate: AsyncFenceGate, site: Site
) -> None:
    # I11
    name = "order:1"
    site.admin.hset(name, mapping={"owner": "shop", "s": "paid"})
    handle = await lock.acquire(name, ttl=30)
    claim = await guard.begin(name)
    assert await gate.current_max(name) == handle.token.value
    assert claim.token is not None
    assert claim.token.kind == "job"
    # Neither counts for the other: not the claim's token for the lock's gate, nor the reverse.
    await gate.check_and_advance(claim.token)
    await gate.check(handle.token)
    await guard.finish(claim, "paid")
    assert (await lock.inspect(name)) is not None
    await lock.release(handle)
    assert await guard.get_result(name) == "paid"
    again = await lock.acquire(name, ttl=30)
    assert again.token > handle.token
    await lock.release(again)
    assert site.admin.hgetall(name) == {b"owner": b"shop", b"s": b"paid"}
    ours = [key for key in site.all_keys() if key != name.encode()]
    assert ours
    assert all(key.startswith(b"fencekit:{order:1}:") for key in ours)


# scenario 65
async def test_two_prefixes_on_one_server_are_two_worlds(client: Any, site: Site) -> None:
    name = "order:1"
    for prefix in ("shop", "shop:eu"):
        guard, lock = AsyncGuard(client, prefix=prefix), AsyncLock(client, prefix=prefix)
        gate = AsyncFenceGate(client, prefix=prefix)
        assert await guard.try_begin(name)
        await guard.mark_done(name, result=prefix)
        handle = await lock.acquire(name, ttl=30)
        await gate.check(handle.token)
    for prefix in ("shop", "shop:eu"):
        assert await AsyncGuard(client, prefix=prefix).get_result(name) == prefix
        found = await AsyncLock(client, prefix=prefix).inspect(name)
        assert found is not None
    kinds = ("fence", "job", "lock")
    expected = [f"{p}:{{{name}}}:{kind}".encode() for p in ("shop", "shop:eu") for kind in kinds]
    assert site.all_keys() == sorted(expected)


async def test_every_key_expires(guard: AsyncGuard, lock: AsyncLock, site: Site) -> None:
    # I8
    await guard.try_begin("a")
    await guard.mark_done("a", result=1)
    await guard.try_begin_or_reclaim("b", lock=lock, lock_resource="b")
    await guard.begin("c", lock="c")
    await guard.finish(await guard.begin("d", lock="e"), 1)
    await guard.fail(await guard.begin("f", lock="g"))
    await guard.fail(await guard.begin("h"), retry=False)
    await guard.begin("i", on_lapse="block")
    site.lapse("i")
    await guard.resolve("i", 1)
    for key in site.all_keys():
        assert 0 < life(site, key) <= 7 * DAY, key


# Events


async def test_listeners_hear_what_became_of_a_plain_start(
    guard: AsyncGuard, lock: AsyncLock, client: Any, events: list[Event], site: Site
) -> None:
    await guard.try_begin("a", ttl=60)
    token = int(site.job("a")["t"])
    await guard.try_begin("a")
    taker = AsyncGuard(client, listeners=[events.append])
    await taker.try_begin_or_reclaim("a", lock=lock, lock_resource="r")
    newer = int(site.job("a")["t"])
    with pytest.raises(IdempotencyNotOwned):
        await guard.mark_done("a")
    await taker.mark_done("a")
    await guard.try_begin("a")
    kinds = [type(event) for event in events]
    duplicates = [event for event in events if isinstance(event, Duplicate)]
    assert events[0] == Begun("a", token, 1)
    assert duplicates[0].subject == "a"
    assert duplicates[0].holder is not None
    assert duplicates[0].holder.endswith(guard.owner_id)
    assert duplicates[0].retry_after is not None
    assert 59 < duplicates[0].retry_after <= 60
    assert Reclaimed("a", newer, 2) in events
    assert events[-3:] == [FencedOut("a", token, newer), Finished("a", newer), Replayed("a")]
    assert kinds.count(Begun) == kinds.count(Reclaimed) == 1


async def test_a_listener_that_fails_breaks_no_job(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("no")

    heard: list[Event] = []
    guard = AsyncGuard(client, listeners=[fail, heard.append])
    assert await guard.try_begin("a")
    await guard.mark_done("a", result=1)
    assert await guard.get_result("a") == 1
    assert [type(event) for event in heard] == [Begun, Finished]
    assert "a fencekit listener failed" in caplog.text
