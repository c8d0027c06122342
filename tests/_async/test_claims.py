"""Claims: starts with a lease and a token, who may take them over, and whose end counts."""

from __future__ import annotations

import gc
import pickle
import time
from functools import partial
from typing import Any

import pytest

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    BeginOutcome,
    Claim,
    FencedOutError,
    IdempotencyConflict,
    IdempotencyNotOwned,
    LeaseLost,
    LeaseState,
    LockNotAcquired,
    idempotency_key,
)
from fencekit.events import (
    Abandoned,
    Begun,
    Duplicate,
    Event,
    Failed,
    FencedOut,
    Finished,
    Lost,
    Reclaimed,
    Renewed,
    Replayed,
)
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio

DAY = 86400.0
# On a Cluster a job and a lock of the same name change in one step, others in two.
LOCKS = pytest.mark.parametrize("name", ["job", "r"], ids=["the job's name", "another name"])


def life(site: Site, key: bytes) -> float:
    """Seconds until the key expires; negative when it never does."""
    return site.admin.pttl(key) / 1000


async def take_over(guard: AsyncGuard, site: Site, key: str, **terms: Any) -> Claim:
    """Take over a claim whose holder still renews it."""
    while True:
        site.lapse(key)
        claim = await guard.begin(key, **terms)
        if claim.started:
            return claim


# Beginning


async def test_a_claim_says_that_it_was_begun_and_holds_a_lease(
    guard: AsyncGuard, site: Site
) -> None:
    claim = await guard.begin("job", ttl=60, lease=20)
    assert claim.started
    assert (claim.outcome, claim.attempts, claim.key) == (BeginOutcome.BEGUN, 1, "job")
    assert claim.state is LeaseState.HELD
    assert not claim.lost
    claim.check()
    assert claim.token is not None
    assert (claim.token.kind, claim.token.resource) == ("job", "job")
    record = site.job("job")
    assert int(record["t"]) == claim.token.value
    assert 19_000 < int(record["l"]) - site.milliseconds() <= 20_000
    assert 59 < life(site, site.keys.job("job")) <= 60


async def test_a_running_job_is_told_with_its_holder_and_time(
    guard: AsyncGuard, client: Any
) -> None:
    claim = await AsyncGuard(client, label="first").begin("job", lease=20)
    other = await guard.begin("job")
    assert other.outcome is BeginOutcome.IN_PROGRESS
    assert not other.started
    assert other.token is None
    assert other.attempts == 1
    assert other.holder is not None
    assert other.holder.endswith("/first")
    assert other.retry_after is not None
    assert 0 < other.retry_after <= 20
    assert other.lost
    with pytest.raises(LeaseLost, match="carries no lease"):
        other.check()
    assert not claim.lost


async def test_of_many_callers_one_begins(client: Any) -> None:
    guards = [AsyncGuard(client) for _ in range(20)]
    claims = await both.together(partial(one.begin, "job") for one in guards)
    assert sum(claim.started for claim in claims) == 1
    assert sum(claim.outcome is BeginOutcome.IN_PROGRESS for claim in claims) == 19


async def test_a_finished_job_gives_its_result_instead_of_a_start(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    claim = await guard.begin("job", ttl=60)
    await guard.finish(claim, {"paid": 990})
    assert claim.state is LeaseState.RELEASED
    again = await AsyncGuard(client).begin("job")
    assert again.outcome is BeginOutcome.ALREADY_DONE
    assert again.has_result
    assert again.result == {"paid": 990}
    assert 50 < life(site, site.keys.job("job")) <= 60
    bare = await guard.begin("bare")
    await guard.finish(bare, ttl=0.5)
    assert not (await guard.begin("bare")).has_result
    assert 0 < life(site, site.keys.job("bare")) <= 0.5


async def test_a_record_lives_at_least_as_long_as_its_lease(guard: AsyncGuard, site: Site) -> None:
    await guard.begin("job", ttl=1, lease=20)
    assert 19 < life(site, site.keys.job("job")) <= 20


# scenario 68
async def test_every_claim_has_a_lease_by_default(guard: AsyncGuard, client: Any) -> None:
    claim = await guard.begin("job")
    other = await AsyncGuard(client).begin("job")
    assert other.outcome is BeginOutcome.IN_PROGRESS
    assert other.retry_after is not None
    assert 29 < other.retry_after <= 30
    await guard.finish(claim)


# scenario 68
async def test_a_start_without_a_lease_counts_as_alive(guard: AsyncGuard, client: Any) -> None:
    assert await guard.try_begin("job", ttl=50)
    other = await AsyncGuard(client).begin("job")
    assert other.outcome is BeginOutcome.IN_PROGRESS
    assert other.retry_after is not None
    assert 49 < other.retry_after <= 50


async def test_a_finished_job_with_a_memo_is_one_small_key(guard: AsyncGuard, site: Site) -> None:
    key = idempotency_key({"game_ids": ["abc", "def"]}, namespace="analysis")
    claim = await guard.begin(key, on_lapse="block", max_attempts=3)
    await guard.finish(claim, "x" * 18)
    assert len(site.job(key)["r"]) == 20
    assert site.all_keys() == [site.keys.job(key)]
    assert site.job(key).keys() == {"s", "t", "n", "a", "r"}
    # An allocator may hand out some bytes more than it is asked for: the least of five is ours.
    keys = [idempotency_key({"job": number}, namespace="analysis") for number in range(4)]
    for other in keys:
        await guard.finish(await guard.begin(other, on_lapse="block", max_attempts=3), "x" * 18)
    sizes = [site.admin.memory_usage(site.keys.job(name)) for name in (key, *keys)]
    assert min(sizes) <= 220


# Taking over


async def test_a_lapsed_claim_is_taken_over_with_a_larger_token(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    old = await guard.begin("job", lease=30)
    assert old.token is not None
    for attempts in (2, 3):
        site.lapse("job")
        new = await AsyncGuard(client).begin("job", lease=30)
        assert new.outcome is BeginOutcome.RECLAIMED
        assert new.started
        assert new.attempts == attempts
        assert new.token is not None
        assert new.token > old.token
        old = new


async def test_the_old_holder_learns_of_the_takeover_at_its_next_renewal(
    guard: AsyncGuard, client: Any, site: Site, events: list[Event]
) -> None:
    old = await guard.begin("job", lease=0.9)
    new = await take_over(AsyncGuard(client, label="taker"), site, "job", lease=30)
    await both.until(lambda: old.lost)
    with pytest.raises(LeaseLost, match=r"taken over by .*/taker"):
        old.check()
    assert not new.lost
    assert old.token is not None
    await both.until(lambda: any(isinstance(event, Lost) for event in events))
    lost = next(event for event in events if isinstance(event, Lost))
    assert (lost.subject, lost.token) == ("job", old.token.value)


# scenario 73
async def test_a_superseded_completion_is_told_the_newer_result(
    guard: AsyncGuard, client: Any, site: Site, events: list[Event]
) -> None:
    other = AsyncGuard(client)
    old = await guard.begin("job", lease=30)
    site.lapse("job")
    new = await other.begin("job", lease=30)
    assert new.started
    await other.finish(new, "R2")
    before = site.job("job")
    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.finish(old, "R1")
    assert refused.value.key == "job"
    assert refused.value.state == "done"
    assert refused.value.has_result
    assert refused.value.result == "R2"
    assert site.job("job") == before
    assert old.token is not None
    assert new.token is not None
    assert FencedOut("job", old.token.value, new.token.value) in events
    # The process goes on with other work, and nobody runs this job again.
    await guard.finish(await guard.begin("next"), 1)
    assert (await guard.begin("job")).result == "R2"


async def test_a_superseded_end_changes_nothing_while_the_newer_attempt_runs(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    other = AsyncGuard(client, label="taker")
    old = await guard.begin("job", lease=30)
    site.lapse("job")
    new = await other.begin("job", lease=30)
    for end in (partial(guard.finish, old, 1), partial(guard.fail, old)):
        with pytest.raises(IdempotencyNotOwned, match="/taker runs it now") as refused:
            await end()
        assert refused.value.state == "pending"
        assert not refused.value.has_result
    assert old.lost
    await other.finish(new, "R2")


async def test_the_same_owner_id_does_not_make_two_claims_one(client: Any, site: Site) -> None:
    # I5: by owner and token
    guard = AsyncGuard(client, owner_id="w")
    old = await guard.begin("job", lease=30)
    site.lapse("job")
    new = await guard.begin("job", lease=30)
    with pytest.raises(IdempotencyNotOwned):
        await guard.finish(old, "old")
    with pytest.raises(IdempotencyNotOwned):
        await guard.fail(old)
    await guard.finish(new, "new")
    assert await guard.get_result("job") == "new"


async def test_a_late_completion_that_nobody_overtook_counts(guard: AsyncGuard, site: Site) -> None:
    # I5: by owner and token, never by time
    claim = await guard.begin("job", lease=30)
    site.lapse("job")
    await guard.finish(claim, "late")
    assert await guard.get_result("job") == "late"


async def test_a_claim_that_its_own_clock_gave_up_may_still_be_finished(
    private_server: Any,
) -> None:
    # I5, I9
    client = both.plain_client_before(private_server, socket_timeout=0.2)
    guard = AsyncGuard(client)
    claim = await guard.begin("job", lease=0.5)
    private_server.freeze()
    await both.until(lambda: claim.lost)
    with pytest.raises(LeaseLost, match="deadline passed"):
        claim.check()
    private_server.resume()
    await guard.finish(claim, "late")
    assert await guard.get_result("job") == "late"
    await both.close(client)


async def test_a_claim_is_finished_once(guard: AsyncGuard, site: Site) -> None:
    claim = await guard.begin("job")
    await guard.finish(claim, 1)
    before = site.job("job")
    await guard.finish(claim, 1)  # a repeat of the same end is the same end (I7)
    for end in (partial(guard.finish, claim, 2), partial(guard.finish, claim)):
        with pytest.raises(IdempotencyNotOwned) as refused:
            await end()
        assert refused.value.result == 1
    with pytest.raises(IdempotencyNotOwned):
        await guard.fail(claim)
    assert site.job("job") == before


async def test_a_claim_that_was_carried_away_cannot_be_finished(guard: AsyncGuard) -> None:
    claim = await guard.begin("job")
    copy = pickle.loads(pickle.dumps(claim))
    assert copy == claim
    assert copy.lost
    with pytest.raises(IdempotencyNotOwned, match="not started here"):
        await guard.finish(copy, 1)
    await guard.finish(claim, 1)


# Failing


async def test_a_failed_attempt_frees_the_job_and_stays_counted(
    guard: AsyncGuard, client: Any, events: list[Event]
) -> None:
    claim = await guard.begin("job")
    await guard.fail(claim, ValueError("no input"))
    assert claim.state is LeaseState.RELEASED
    again = await AsyncGuard(client).begin("job")
    assert (again.outcome, again.attempts) == (BeginOutcome.BEGUN, 2)
    assert claim.token is not None
    assert again.token is not None
    assert again.token > claim.token
    assert Failed("job", claim.token.value, False, "ValueError('no input')") in events


async def test_a_failure_for_good_is_remembered(
    guard: AsyncGuard, client: Any, site: Site, events: list[Event]
) -> None:
    claim = await guard.begin("job", ttl=60)
    await guard.fail(claim, KeyError("who"), retry=False, ttl=1000)
    again = await AsyncGuard(client).begin("job")
    assert again.outcome is BeginOutcome.FAILED
    assert again.error_type == "builtins.KeyError"
    assert again.error_message == "'who'"
    assert not again.started
    assert 990 < life(site, site.keys.job("job")) <= 1000
    assert claim.token is not None
    assert Failed("job", claim.token.value, True, "KeyError('who')") in events
    await guard.clear("job")
    assert (await guard.begin("job")).attempts == 1


async def test_a_job_that_never_ends_is_abandoned_after_its_last_attempt(
    guard: AsyncGuard, site: Site, events: list[Event]
) -> None:
    for attempt in (1, 2, 3):
        claim = await guard.begin("job", max_attempts=3)
        assert claim.started
        assert claim.attempts == attempt
        site.lapse("job")
    for _ in range(2):
        last = await guard.begin("job", max_attempts=3)
        assert last.outcome is BeginOutcome.FAILED
        assert (last.error_type, last.attempts) == ("abandoned", 3)
        assert last.holder is not None
        assert last.holder.endswith(guard.owner_id)
    assert await guard.status("job") == "failed"
    assert events.count(Abandoned("job", 3)) == 2
    assert not await guard.try_begin("job")
    # The last attempt was not dead, only late: what it did stays undone on the record.
    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.finish(claim, 1)
    assert refused.value.state == "failed"


async def test_failed_attempts_count_for_the_limit_too(guard: AsyncGuard) -> None:
    for _ in range(2):
        await guard.fail(await guard.begin("job", max_attempts=2))
    last = await guard.begin("job", max_attempts=2)
    assert (last.outcome, last.error_type) == (BeginOutcome.FAILED, "abandoned")


async def test_without_a_limit_a_job_is_begun_as_often_as_it_takes(guard: AsyncGuard) -> None:
    for attempt in range(1, 8):
        claim = await guard.begin("job")
        assert claim.attempts == attempt
        await guard.fail(claim)


# An outcome that nobody knows


# scenario 70
async def test_a_dead_claim_that_blocks_waits_for_an_answer(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    await AsyncGuard(client, label="dead").begin("job", on_lapse="block")
    assert (await guard.begin("job")).outcome is BeginOutcome.IN_PROGRESS
    site.lapse("job")
    for _ in range(2):
        claim = await guard.begin("job")
        assert claim.outcome is BeginOutcome.UNKNOWN
        assert not claim.started
        assert claim.holder is not None
        assert claim.holder.endswith("/dead")
    await guard.resolve("job", "it happened", ttl=1000)
    assert (await guard.begin("job")).result == "it happened"
    assert 990 < life(site, site.keys.job("job")) <= 1000


# scenario 70
async def test_a_job_that_did_not_happen_is_cleared_and_starts_again(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    await AsyncGuard(client).begin("job", on_lapse="block")
    site.lapse("job")
    assert (await guard.begin("job")).outcome is BeginOutcome.UNKNOWN
    await guard.clear("job")
    assert (await guard.begin("job")).outcome is BeginOutcome.BEGUN


async def test_only_an_unknown_outcome_can_be_resolved(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    blocking = await guard.begin("alive", on_lapse="block")
    await guard.begin("lapsed")
    site.lapse("lapsed")
    await guard.try_begin("plain")
    await guard.finish(await guard.begin("done", on_lapse="block"), 1)
    for key in ("alive", "lapsed", "plain", "done", "absent"):
        with pytest.raises(IdempotencyNotOwned, match="not unknown"):
            await guard.resolve(key, "made up")
    await guard.finish(blocking, "its own")
    assert await guard.get_result("alive") == "its own"
    assert await guard.get_result("done") == 1


async def test_an_unknown_job_may_still_be_finished_by_its_worker_until_it_is_resolved(
    guard: AsyncGuard, site: Site
) -> None:
    for key in ("first", "second"):
        claim = await guard.begin(key, on_lapse="block")
        site.lapse(key)
        if key == "first":
            await guard.finish(claim, "late")
            assert await guard.get_result(key) == "late"
        else:
            await guard.resolve(key)
            assert await guard.status(key) == "done"
            with pytest.raises(IdempotencyNotOwned):
                await guard.finish(claim, "late")


# Fingerprints


async def test_another_fingerprint_under_the_same_key_is_a_conflict(guard: AsyncGuard) -> None:
    begin = partial(guard.begin, "job")
    claim = await begin(fingerprint="one")
    for state in ("pending", "done"):
        with pytest.raises(IdempotencyConflict) as conflict:
            await begin(fingerprint="two")
        assert conflict.value.key == "job"
        assert (conflict.value.fingerprint, conflict.value.known) == ("two", "one")
        assert not (await begin(fingerprint="one")).started
        assert not (await begin()).started
        if state == "pending":
            await guard.finish(claim, 1)
    await guard.clear("job")
    claim = await begin(fingerprint="two")
    await guard.fail(claim, ValueError("no"), retry=False)
    with pytest.raises(IdempotencyConflict):
        await begin(fingerprint="one")


async def test_a_job_begun_without_a_fingerprint_conflicts_with_none(guard: AsyncGuard) -> None:
    await guard.begin("job")
    assert (await guard.begin("job", fingerprint="one")).outcome is BeginOutcome.IN_PROGRESS


# With a lock


@LOCKS
async def test_a_claim_takes_its_lock_and_finishing_frees_it(
    guard: AsyncGuard, lock: AsyncLock, site: Site, name: str
) -> None:
    claim = await guard.begin("job", lock=name, lease=20)
    assert claim.started
    assert claim.lock_resource == name
    assert claim.token is not None
    assert (claim.token.kind, claim.token.resource) == ("lock", name)
    assert claim.token.value == site.fence(name) == int(site.lock(name)["token"])
    assert 19 < life(site, site.keys.lock(name)) <= 20
    holder = await lock.inspect(name)
    assert holder is not None
    assert holder.owner_id == guard.owner_id
    await guard.finish(claim, 1)
    assert await lock.inspect(name) is None
    assert site.lock(name) == {}
    assert await guard.get_result("job") == 1
    handle = await lock.acquire(name)
    assert handle.token > claim.token
    again = await guard.begin("job", lock=name)  # who is done needs no lock
    assert again.outcome is BeginOutcome.ALREADY_DONE
    assert again.result == 1


@LOCKS
async def test_every_end_of_an_attempt_frees_its_lock(
    guard: AsyncGuard, lock: AsyncLock, name: str
) -> None:
    await guard.fail(await guard.begin("job", lock=name))
    assert await lock.inspect(name) is None
    claim = await guard.begin("job", lock=name)
    assert claim.attempts == 2
    await guard.fail(claim, retry=False)
    assert await lock.inspect(name) is None
    assert (await guard.begin("job", lock=name)).outcome is BeginOutcome.FAILED
    assert await lock.inspect(name) is None


@LOCKS
async def test_a_busy_lock_is_named_and_leaves_no_claim(
    guard: AsyncGuard, lock: AsyncLock, site: Site, name: str
) -> None:
    handle = await lock.acquire(name, ttl=30, owner_id="other")
    with pytest.raises(LockNotAcquired) as busy:
        await guard.begin("job", lock=name)
    assert busy.value.resource == name
    assert busy.value.holder is not None
    assert busy.value.holder.endswith("/other")
    assert busy.value.retry_after is not None
    assert 0 < busy.value.retry_after <= 30
    assert site.job("job") == {}
    assert await guard.status("job") is None
    await lock.release(handle)
    claim = await guard.begin("job", lock=name)
    assert claim.attempts == 1
    assert claim.token is not None
    assert claim.token > handle.token


@LOCKS
async def test_a_job_that_runs_under_its_lock_is_in_progress(
    guard: AsyncGuard, client: Any, name: str
) -> None:
    await AsyncGuard(client, label="first").begin("job", lock=name)
    claim = await guard.begin("job", lock=name)
    assert claim.outcome is BeginOutcome.IN_PROGRESS
    assert claim.holder is not None
    assert claim.holder.endswith("/first")
    assert claim.retry_after is not None
    assert 0 < claim.retry_after <= 30


@LOCKS
async def test_a_job_that_is_not_started_leaves_its_lock_free(
    guard: AsyncGuard, client: Any, lock: AsyncLock, site: Site, name: str
) -> None:
    await AsyncGuard(client).begin("job", on_lapse="block", fingerprint="one")
    assert (await guard.begin("job", lock=name)).outcome is BeginOutcome.IN_PROGRESS
    assert await lock.inspect(name) is None
    with pytest.raises(IdempotencyConflict):
        await guard.begin("job", lock=name, fingerprint="two")
    assert await lock.inspect(name) is None
    site.lapse("job")
    assert (await guard.begin("job", lock=name)).outcome is BeginOutcome.UNKNOWN
    assert await lock.inspect(name) is None


@LOCKS
async def test_a_dead_claims_lock_goes_with_it(
    guard: AsyncGuard, client: Any, lock: AsyncLock, gate: AsyncFenceGate, site: Site, name: str
) -> None:
    dead = await AsyncGuard(client).begin("job", lock=name)
    site.lapse("job")
    if site.clustered and name != "job":
        site.expire_lock(name)  # the lease of both runs out together, on two servers
    claim = await guard.begin("job", lock=name)
    assert claim.outcome is BeginOutcome.RECLAIMED
    assert dead.token is not None
    assert claim.token is not None
    assert claim.token > dead.token
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(dead.token, gate.key(name, "status"), "old")
    await gate.set_if_fresh(claim.token, gate.key(name, "status"), "new")
    with pytest.raises(IdempotencyNotOwned):
        await AsyncGuard(client).finish(dead, "old")
    assert await lock.inspect(name) is not None
    await guard.finish(claim, "new")
    assert await lock.inspect(name) is None


async def test_a_claims_token_fences_its_predecessor_without_a_lock_too(
    guard: AsyncGuard, client: Any, gate: AsyncFenceGate, site: Site
) -> None:
    # I3
    old = await guard.begin("job")
    assert old.token is not None
    await gate.set_if_fresh(old.token, gate.key("job", "status"), "old")
    site.lapse("job")
    new = await AsyncGuard(client).begin("job")
    assert new.token is not None
    with pytest.raises(FencedOutError):
        await gate.check(old.token)
    with pytest.raises(FencedOutError):
        await gate.set_if_fresh(old.token, gate.key("job", "status"), "older")
    await gate.set_if_fresh(new.token, gate.key("job", "status"), "new")


@LOCKS
async def test_a_finished_claim_wakes_who_waits_for_its_lock(
    guard: AsyncGuard, lock: AsyncLock, name: str
) -> None:
    claim = await guard.begin("job", lock=name, lease=60)
    waiting = both.Running(partial(lock.acquire, name, wait=20))
    room = lock._locking.backends.get().room
    await both.until(lambda: room.occupied(lock._locking.backends.keys.free_channel(name)))
    assert not waiting.done
    await guard.finish(claim, 1)
    handle = await waiting.result(15.0)
    assert claim.token is not None
    assert handle.token > claim.token


@LOCKS
async def test_a_claim_whose_lock_was_broken_is_lost_but_its_result_counts(
    guard: AsyncGuard, lock: AsyncLock, name: str
) -> None:
    claim = await guard.begin("job", lock=name, lease=0.9)
    await lock.break_lock(name, reason="stuck")
    await both.until(lambda: claim.lost)
    with pytest.raises(LeaseLost, match="broken: stuck"):
        claim.check()
    await guard.finish(claim, "its job was not taken from it")
    assert await guard.status("job") == "done"


# Heartbeat


# scenario 77
@LOCKS
async def test_the_heartbeat_keeps_a_claim_and_its_lock_beyond_the_lease(
    guard: AsyncGuard, client: Any, site: Site, events: list[Event], name: str
) -> None:
    claim = await guard.begin("job", lock=name, lease=1)
    first = int(site.job("job")["l"])
    await both.until(lambda: int(site.job("job")["l"]) >= first + 1000)
    assert claim.state is LeaseState.HELD
    other = AsyncGuard(client)
    assert (await other.begin("job")).outcome is BeginOutcome.IN_PROGRESS
    assert (await other.begin("job", lock=name)).outcome is BeginOutcome.IN_PROGRESS
    with pytest.raises(LockNotAcquired):
        await other.begin("another job", lock=name)
    assert claim.token is not None
    assert Renewed("job", claim.token.value) in events
    await guard.finish(claim, 1)
    assert await guard.get_result("job") == 1


async def test_a_record_is_kept_while_its_claim_is_renewed(guard: AsyncGuard, site: Site) -> None:
    claim = await guard.begin("job", ttl=0.2, lease=1)
    first = int(site.job("job")["l"])
    await both.until(lambda: int(site.job("job")["l"]) >= first + 1000)
    assert life(site, site.keys.job("job")) > 0.2
    await guard.finish(claim, 1, ttl=5)
    assert await guard.get_result("job") == 1


async def test_a_dropped_claim_is_not_renewed(guard: AsyncGuard, client: Any, site: Site) -> None:
    await guard.begin("job", lease=0.6)
    gc.collect()
    await both.until(lambda: int(site.job("job")["l"]) <= site.milliseconds())
    assert (await AsyncGuard(client).begin("job")).outcome is BeginOutcome.RECLAIMED


async def test_a_thread_may_keep_the_claims_of_a_loop_that_is_blocked(
    client: Any, site: Site
) -> None:
    beats = site.threads_client()
    guard = AsyncGuard(client, heartbeat=beats)
    claim = await guard.begin("job", lease=1)
    first = int(site.job("job")["l"])
    while int(site.job("job")["l"]) < first + 1000:
        time.sleep(0.01)  # nothing else runs in this loop
    assert claim.state is LeaseState.HELD
    await guard.finish(claim, 1)
    beats.close()


async def test_a_claim_that_the_server_forgot_is_lost(
    guard: AsyncGuard, site: Site, events: list[Event]
) -> None:
    claim = await guard.begin("job", lease=0.9)
    site.flush()
    await both.until(lambda: claim.lost)
    assert claim.token is not None
    number = claim.token.value
    await both.until(lambda: any(isinstance(e, Lost) and e.token == number for e in events))
    with pytest.raises(IdempotencyNotOwned):
        await guard.finish(claim, 1)
    assert site.all_keys() == []


# Events


async def test_listeners_hear_the_life_of_a_job(
    guard: AsyncGuard, site: Site, events: list[Event]
) -> None:
    first = await guard.begin("job")
    await guard.begin("job")
    site.lapse("job")
    second = await guard.begin("job")
    await guard.fail(second, ValueError("no"))
    third = await guard.begin("job")
    await guard.finish(third, 1)
    await guard.begin("job")
    assert first.token is not None
    assert second.token is not None
    assert third.token is not None
    assert events == [
        Begun("job", first.token.value, 1),
        events[1],
        Reclaimed("job", second.token.value, 2),
        Failed("job", second.token.value, False, "ValueError('no')"),
        Begun("job", third.token.value, 3),
        Finished("job", third.token.value),
        Replayed("job"),
    ]
    assert isinstance(events[1], Duplicate)
