"""Claims: starts with a lease and a token, who may take them over, and whose end counts."""

from __future__ import annotations

import gc
import pickle
import time
from functools import partial
from typing import Any

import pytest

from fencekit import (
    FenceGate,
    IdempotencyGuard,
    DistributedLock,
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
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads

DAY = 86400.0
# On a Cluster a job and a lock of the same name change in one step, others in two.
LOCKS = pytest.mark.parametrize("name", ["job", "r"], ids=["the job's name", "another name"])


def life(site: Site, key: bytes) -> float:
    """Seconds until the key expires; negative when it never does."""
    return site.admin.pttl(key) / 1000


def take_over(guard: IdempotencyGuard, site: Site, key: str, **terms: Any) -> Claim:
    """Take over a claim whose holder still renews it."""
    while True:
        site.lapse(key)
        claim = guard.begin(key, **terms)
        if claim.started:
            return claim


# Beginning


def test_a_claim_says_that_it_was_begun_and_holds_a_lease(
    guard: IdempotencyGuard, site: Site
) -> None:
    claim = guard.begin("job", ttl=60, lease=20)
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


def test_a_running_job_is_told_with_its_holder_and_time(
    guard: IdempotencyGuard, client: Any
) -> None:
    claim = IdempotencyGuard(client, label="first").begin("job", lease=20)
    other = guard.begin("job")
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


def test_of_many_callers_one_begins(client: Any) -> None:
    guards = [IdempotencyGuard(client) for _ in range(20)]
    claims = both.together(partial(one.begin, "job") for one in guards)
    assert sum(claim.started for claim in claims) == 1
    assert sum(claim.outcome is BeginOutcome.IN_PROGRESS for claim in claims) == 19


def test_a_finished_job_gives_its_result_instead_of_a_start(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    claim = guard.begin("job", ttl=60)
    guard.finish(claim, {"paid": 990})
    assert claim.state is LeaseState.RELEASED
    again = IdempotencyGuard(client).begin("job")
    assert again.outcome is BeginOutcome.ALREADY_DONE
    assert again.has_result
    assert again.result == {"paid": 990}
    assert 50 < life(site, site.keys.job("job")) <= 60
    bare = guard.begin("bare")
    guard.finish(bare, ttl=0.5)
    assert not (guard.begin("bare")).has_result
    assert 0 < life(site, site.keys.job("bare")) <= 0.5


def test_a_record_lives_at_least_as_long_as_its_lease(guard: IdempotencyGuard, site: Site) -> None:
    guard.begin("job", ttl=1, lease=20)
    assert 19 < life(site, site.keys.job("job")) <= 20


# scenario 68
def test_every_claim_has_a_lease_by_default(guard: IdempotencyGuard, client: Any) -> None:
    claim = guard.begin("job")
    other = IdempotencyGuard(client).begin("job")
    assert other.outcome is BeginOutcome.IN_PROGRESS
    assert other.retry_after is not None
    assert 29 < other.retry_after <= 30
    guard.finish(claim)


# scenario 68
def test_a_start_without_a_lease_counts_as_alive(guard: IdempotencyGuard, client: Any) -> None:
    assert guard.try_begin("job", ttl=50)
    other = IdempotencyGuard(client).begin("job")
    assert other.outcome is BeginOutcome.IN_PROGRESS
    assert other.retry_after is not None
    assert 49 < other.retry_after <= 50


def test_a_finished_job_with_a_memo_is_one_small_key(guard: IdempotencyGuard, site: Site) -> None:
    key = idempotency_key({"game_ids": ["abc", "def"]}, namespace="analysis")
    claim = guard.begin(key, on_lapse="block", max_attempts=3)
    guard.finish(claim, "x" * 18)
    assert len(site.job(key)["r"]) == 20
    assert site.all_keys() == [site.keys.job(key)]
    assert site.job(key).keys() == {"s", "t", "n", "a", "r"}
    # An allocator may hand out some bytes more than it is asked for: the least of five is ours.
    keys = [idempotency_key({"job": number}, namespace="analysis") for number in range(4)]
    for other in keys:
        guard.finish(guard.begin(other, on_lapse="block", max_attempts=3), "x" * 18)
    sizes = [site.admin.memory_usage(site.keys.job(name)) for name in (key, *keys)]
    assert min(sizes) <= 220


# Taking over


def test_a_lapsed_claim_is_taken_over_with_a_larger_token(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    old = guard.begin("job", lease=30)
    assert old.token is not None
    for attempts in (2, 3):
        site.lapse("job")
        new = IdempotencyGuard(client).begin("job", lease=30)
        assert new.outcome is BeginOutcome.RECLAIMED
        assert new.started
        assert new.attempts == attempts
        assert new.token is not None
        assert new.token > old.token
        old = new


def test_the_old_holder_learns_of_the_takeover_at_its_next_renewal(
    guard: IdempotencyGuard, client: Any, site: Site, events: list[Event]
) -> None:
    old = guard.begin("job", lease=0.9)
    new = take_over(IdempotencyGuard(client, label="taker"), site, "job", lease=30)
    both.until(lambda: old.lost)
    with pytest.raises(LeaseLost, match=r"taken over by .*/taker"):
        old.check()
    assert not new.lost
    assert old.token is not None
    both.until(lambda: any(isinstance(event, Lost) for event in events))
    lost = next(event for event in events if isinstance(event, Lost))
    assert (lost.subject, lost.token) == ("job", old.token.value)


# scenario 73
def test_a_superseded_completion_is_told_the_newer_result(
    guard: IdempotencyGuard, client: Any, site: Site, events: list[Event]
) -> None:
    other = IdempotencyGuard(client)
    old = guard.begin("job", lease=30)
    site.lapse("job")
    new = other.begin("job", lease=30)
    assert new.started
    other.finish(new, "R2")
    before = site.job("job")
    with pytest.raises(IdempotencyNotOwned) as refused:
        guard.finish(old, "R1")
    assert refused.value.key == "job"
    assert refused.value.state == "done"
    assert refused.value.has_result
    assert refused.value.result == "R2"
    assert site.job("job") == before
    assert old.token is not None
    assert new.token is not None
    assert FencedOut("job", old.token.value, new.token.value) in events
    # The process goes on with other work, and nobody runs this job again.
    guard.finish(guard.begin("next"), 1)
    assert (guard.begin("job")).result == "R2"


def test_a_superseded_end_changes_nothing_while_the_newer_attempt_runs(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    other = IdempotencyGuard(client, label="taker")
    old = guard.begin("job", lease=30)
    site.lapse("job")
    new = other.begin("job", lease=30)
    for end in (partial(guard.finish, old, 1), partial(guard.fail, old)):
        with pytest.raises(IdempotencyNotOwned, match="/taker runs it now") as refused:
            end()
        assert refused.value.state == "pending"
        assert not refused.value.has_result
    assert old.lost
    other.finish(new, "R2")


def test_the_same_owner_id_does_not_make_two_claims_one(client: Any, site: Site) -> None:
    # I5: by owner and token
    guard = IdempotencyGuard(client, owner_id="w")
    old = guard.begin("job", lease=30)
    site.lapse("job")
    new = guard.begin("job", lease=30)
    with pytest.raises(IdempotencyNotOwned):
        guard.finish(old, "old")
    with pytest.raises(IdempotencyNotOwned):
        guard.fail(old)
    guard.finish(new, "new")
    assert guard.get_result("job") == "new"


def test_a_late_completion_that_nobody_overtook_counts(guard: IdempotencyGuard, site: Site) -> None:
    # I5: by owner and token, never by time
    claim = guard.begin("job", lease=30)
    site.lapse("job")
    guard.finish(claim, "late")
    assert guard.get_result("job") == "late"


def test_a_claim_that_its_own_clock_gave_up_may_still_be_finished(
    private_server: Any,
) -> None:
    # I5, I9
    client = both.plain_client_before(private_server, socket_timeout=0.2)
    guard = IdempotencyGuard(client)
    claim = guard.begin("job", lease=0.5)
    private_server.freeze()
    both.until(lambda: claim.lost)
    with pytest.raises(LeaseLost, match="deadline passed"):
        claim.check()
    private_server.resume()
    guard.finish(claim, "late")
    assert guard.get_result("job") == "late"
    both.close(client)


def test_a_claim_is_finished_once(guard: IdempotencyGuard, site: Site) -> None:
    claim = guard.begin("job")
    guard.finish(claim, 1)
    before = site.job("job")
    guard.finish(claim, 1)  # a repeat of the same end is the same end (I7)
    for end in (partial(guard.finish, claim, 2), partial(guard.finish, claim)):
        with pytest.raises(IdempotencyNotOwned) as refused:
            end()
        assert refused.value.result == 1
    with pytest.raises(IdempotencyNotOwned):
        guard.fail(claim)
    assert site.job("job") == before


def test_a_claim_that_was_carried_away_cannot_be_finished(guard: IdempotencyGuard) -> None:
    claim = guard.begin("job")
    copy = pickle.loads(pickle.dumps(claim))
    assert copy == claim
    assert copy.lost
    with pytest.raises(IdempotencyNotOwned, match="not started here"):
        guard.finish(copy, 1)
    guard.finish(claim, 1)


# Failing


def test_a_failed_attempt_frees_the_job_and_stays_counted(
    guard: IdempotencyGuard, client: Any, events: list[Event]
) -> None:
    claim = guard.begin("job")
    guard.fail(claim, ValueError("no input"))
    assert claim.state is LeaseState.RELEASED
    again = IdempotencyGuard(client).begin("job")
    assert (again.outcome, again.attempts) == (BeginOutcome.BEGUN, 2)
    assert claim.token is not None
    assert again.token is not None
    assert again.token > claim.token
    assert Failed("job", claim.token.value, False, "ValueError('no input')") in events


def test_a_failure_for_good_is_remembered(
    guard: IdempotencyGuard, client: Any, site: Site, events: list[Event]
) -> None:
    claim = guard.begin("job", ttl=60)
    guard.fail(claim, KeyError("who"), retry=False, ttl=1000)
    again = IdempotencyGuard(client).begin("job")
    assert again.outcome is BeginOutcome.FAILED
    assert again.error_type == "builtins.KeyError"
    assert again.error_message == "'who'"
    assert not again.started
    assert 990 < life(site, site.keys.job("job")) <= 1000
    assert claim.token is not None
    assert Failed("job", claim.token.value, True, "KeyError('who')") in events
    guard.clear("job")
    assert (guard.begin("job")).attempts == 1


def test_a_job_that_never_ends_is_abandoned_after_its_last_attempt(
    guard: IdempotencyGuard, site: Site, events: list[Event]
) -> None:
    for attempt in (1, 2, 3):
        claim = guard.begin("job", max_attempts=3)
        assert claim.started
        assert claim.attempts == attempt
        site.lapse("job")
    for _ in range(2):
        last = guard.begin("job", max_attempts=3)
        assert last.outcome is BeginOutcome.FAILED
        assert (last.error_type, last.attempts) == ("abandoned", 3)
        assert last.holder is not None
        assert last.holder.endswith(guard.owner_id)
    assert guard.status("job") == "failed"
    assert events.count(Abandoned("job", 3)) == 2
    assert not guard.try_begin("job")
    # The last attempt was not dead, only late: what it did stays undone on the record.
    with pytest.raises(IdempotencyNotOwned) as refused:
        guard.finish(claim, 1)
    assert refused.value.state == "failed"


def test_failed_attempts_count_for_the_limit_too(guard: IdempotencyGuard) -> None:
    for _ in range(2):
        guard.fail(guard.begin("job", max_attempts=2))
    last = guard.begin("job", max_attempts=2)
    assert (last.outcome, last.error_type) == (BeginOutcome.FAILED, "abandoned")


def test_without_a_limit_a_job_is_begun_as_often_as_it_takes(guard: IdempotencyGuard) -> None:
    for attempt in range(1, 8):
        claim = guard.begin("job")
        assert claim.attempts == attempt
        guard.fail(claim)


# An outcome that nobody knows


# scenario 70
def test_a_dead_claim_that_blocks_waits_for_an_answer(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    IdempotencyGuard(client, label="dead").begin("job", on_lapse="block")
    assert (guard.begin("job")).outcome is BeginOutcome.IN_PROGRESS
    site.lapse("job")
    for _ in range(2):
        claim = guard.begin("job")
        assert claim.outcome is BeginOutcome.UNKNOWN
        assert not claim.started
        assert claim.holder is not None
        assert claim.holder.endswith("/dead")
    guard.resolve("job", "it happened", ttl=1000)
    assert (guard.begin("job")).result == "it happened"
    assert 990 < life(site, site.keys.job("job")) <= 1000


# scenario 70
def test_a_job_that_did_not_happen_is_cleared_and_starts_again(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    IdempotencyGuard(client).begin("job", on_lapse="block")
    site.lapse("job")
    assert (guard.begin("job")).outcome is BeginOutcome.UNKNOWN
    guard.clear("job")
    assert (guard.begin("job")).outcome is BeginOutcome.BEGUN


def test_only_an_unknown_outcome_can_be_resolved(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    blocking = guard.begin("alive", on_lapse="block")
    guard.begin("lapsed")
    site.lapse("lapsed")
    guard.try_begin("plain")
    guard.finish(guard.begin("done", on_lapse="block"), 1)
    for key in ("alive", "lapsed", "plain", "done", "absent"):
        with pytest.raises(IdempotencyNotOwned, match="not unknown"):
            guard.resolve(key, "made up")
    guard.finish(blocking, "its own")
    assert guard.get_result("alive") == "its own"
    assert guard.get_result("done") == 1


def test_an_unknown_job_may_still_be_finished_by_its_worker_until_it_is_resolved(
    guard: IdempotencyGuard, site: Site
) -> None:
    for key in ("first", "second"):
        claim = guard.begin(key, on_lapse="block")
        site.lapse(key)
        if key == "first":
            guard.finish(claim, "late")
            assert guard.get_result(key) == "late"
        else:
            guard.resolve(key)
            assert guard.status(key) == "done"
            with pytest.raises(IdempotencyNotOwned):
                guard.finish(claim, "late")


# Fingerprints


def test_another_fingerprint_under_the_same_key_is_a_conflict(guard: IdempotencyGuard) -> None:
    begin = partial(guard.begin, "job")
    claim = begin(fingerprint="one")
    for state in ("pending", "done"):
        with pytest.raises(IdempotencyConflict) as conflict:
            begin(fingerprint="two")
        assert conflict.value.key == "job"
        assert (conflict.value.fingerprint, conflict.value.known) == ("two", "one")
        assert not (begin(fingerprint="one")).started
        assert not (begin()).started
        if state == "pending":
            guard.finish(claim, 1)
    guard.clear("job")
    claim = begin(fingerprint="two")
    guard.fail(claim, ValueError("no"), retry=False)
    with pytest.raises(IdempotencyConflict):
        begin(fingerprint="one")


def test_a_job_begun_without_a_fingerprint_conflicts_with_none(guard: IdempotencyGuard) -> None:
    guard.begin("job")
    assert (guard.begin("job", fingerprint="one")).outcome is BeginOutcome.IN_PROGRESS


# With a lock


@LOCKS
def test_a_claim_takes_its_lock_and_finishing_frees_it(
    guard: IdempotencyGuard, lock: DistributedLock, site: Site, name: str
) -> None:
    claim = guard.begin("job", lock=name, lease=20)
    assert claim.started
    assert claim.lock_resource == name
    assert claim.token is not None
    assert (claim.token.kind, claim.token.resource) == ("lock", name)
    assert claim.token.value == site.fence(name) == int(site.lock(name)["token"])
    assert 19 < life(site, site.keys.lock(name)) <= 20
    holder = lock.inspect(name)
    assert holder is not None
    assert holder.owner_id == guard.owner_id
    guard.finish(claim, 1)
    assert lock.inspect(name) is None
    assert site.lock(name) == {}
    assert guard.get_result("job") == 1
    handle = lock.acquire(name)
    assert handle.token > claim.token
    again = guard.begin("job", lock=name)  # who is done needs no lock
    assert again.outcome is BeginOutcome.ALREADY_DONE
    assert again.result == 1


@LOCKS
def test_every_end_of_an_attempt_frees_its_lock(
    guard: IdempotencyGuard, lock: DistributedLock, name: str
) -> None:
    guard.fail(guard.begin("job", lock=name))
    assert lock.inspect(name) is None
    claim = guard.begin("job", lock=name)
    assert claim.attempts == 2
    guard.fail(claim, retry=False)
    assert lock.inspect(name) is None
    assert (guard.begin("job", lock=name)).outcome is BeginOutcome.FAILED
    assert lock.inspect(name) is None


@LOCKS
def test_a_busy_lock_is_named_and_leaves_no_claim(
    guard: IdempotencyGuard, lock: DistributedLock, site: Site, name: str
) -> None:
    handle = lock.acquire(name, ttl=30, owner_id="other")
    with pytest.raises(LockNotAcquired) as busy:
        guard.begin("job", lock=name)
    assert busy.value.resource == name
    assert busy.value.holder is not None
    assert busy.value.holder.endswith("/other")
    assert busy.value.retry_after is not None
    assert 0 < busy.value.retry_after <= 30
    assert site.job("job") == {}
    assert guard.status("job") is None
    lock.release(handle)
    claim = guard.begin("job", lock=name)
    assert claim.attempts == 1
    assert claim.token is not None
    assert claim.token > handle.token


@LOCKS
def test_a_job_that_runs_under_its_lock_is_in_progress(
    guard: IdempotencyGuard, client: Any, name: str
) -> None:
    IdempotencyGuard(client, label="first").begin("job", lock=name)
    claim = guard.begin("job", lock=name)
    assert claim.outcome is BeginOutcome.IN_PROGRESS
    assert claim.holder is not None
    assert claim.holder.endswith("/first")
    assert claim.retry_after is not None
    assert 0 < claim.retry_after <= 30


@LOCKS
def test_a_job_that_is_not_started_leaves_its_lock_free(
    guard: IdempotencyGuard, client: Any, lock: DistributedLock, site: Site, name: str
) -> None:
    IdempotencyGuard(client).begin("job", on_lapse="block", fingerprint="one")
    assert (guard.begin("job", lock=name)).outcome is BeginOutcome.IN_PROGRESS
    assert lock.inspect(name) is None
    with pytest.raises(IdempotencyConflict):
        guard.begin("job", lock=name, fingerprint="two")
    assert lock.inspect(name) is None
    site.lapse("job")
    assert (guard.begin("job", lock=name)).outcome is BeginOutcome.UNKNOWN
    assert lock.inspect(name) is None


@LOCKS
def test_a_dead_claims_lock_goes_with_it(
    guard: IdempotencyGuard, client: Any, lock: DistributedLock, gate: FenceGate, site: Site, name: str
) -> None:
    dead = IdempotencyGuard(client).begin("job", lock=name)
    site.lapse("job")
    if site.clustered and name != "job":
        site.expire_lock(name)  # the lease of both runs out together, on two servers
    claim = guard.begin("job", lock=name)
    assert claim.outcome is BeginOutcome.RECLAIMED
    assert dead.token is not None
    assert claim.token is not None
    assert claim.token > dead.token
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(dead.token, gate.key(name, "status"), "old")
    gate.set_if_fresh(claim.token, gate.key(name, "status"), "new")
    with pytest.raises(IdempotencyNotOwned):
        IdempotencyGuard(client).finish(dead, "old")
    assert lock.inspect(name) is not None
    guard.finish(claim, "new")
    assert lock.inspect(name) is None


def test_a_claims_token_fences_its_predecessor_without_a_lock_too(
    guard: IdempotencyGuard, client: Any, gate: FenceGate, site: Site
) -> None:
    # I3
    old = guard.begin("job")
    assert old.token is not None
    gate.set_if_fresh(old.token, gate.key("job", "status"), "old")
    site.lapse("job")
    new = IdempotencyGuard(client).begin("job")
    assert new.token is not None
    with pytest.raises(FencedOutError):
        gate.check(old.token)
    with pytest.raises(FencedOutError):
        gate.set_if_fresh(old.token, gate.key("job", "status"), "older")
    gate.set_if_fresh(new.token, gate.key("job", "status"), "new")


@LOCKS
def test_a_finished_claim_wakes_who_waits_for_its_lock(
    guard: IdempotencyGuard, lock: DistributedLock, name: str
) -> None:
    claim = guard.begin("job", lock=name, lease=60)
    waiting = both.Running(partial(lock.acquire, name, wait=20))
    room = lock._locking.backends.get().room
    both.until(lambda: room.occupied(lock._locking.backends.keys.free_channel(name)))
    assert not waiting.done
    guard.finish(claim, 1)
    handle = waiting.result(15.0)
    assert claim.token is not None
    assert handle.token > claim.token


@LOCKS
def test_a_claim_whose_lock_was_broken_is_lost_but_its_result_counts(
    guard: IdempotencyGuard, lock: DistributedLock, name: str
) -> None:
    claim = guard.begin("job", lock=name, lease=0.9)
    lock.break_lock(name, reason="stuck")
    both.until(lambda: claim.lost)
    with pytest.raises(LeaseLost, match="broken: stuck"):
        claim.check()
    guard.finish(claim, "its job was not taken from it")
    assert guard.status("job") == "done"


# Heartbeat


# scenario 77
@LOCKS
def test_the_heartbeat_keeps_a_claim_and_its_lock_beyond_the_lease(
    guard: IdempotencyGuard, client: Any, site: Site, events: list[Event], name: str
) -> None:
    claim = guard.begin("job", lock=name, lease=1)
    first = int(site.job("job")["l"])
    both.until(lambda: int(site.job("job")["l"]) >= first + 1000)
    assert claim.state is LeaseState.HELD
    other = IdempotencyGuard(client)
    assert (other.begin("job")).outcome is BeginOutcome.IN_PROGRESS
    assert (other.begin("job", lock=name)).outcome is BeginOutcome.IN_PROGRESS
    with pytest.raises(LockNotAcquired):
        other.begin("another job", lock=name)
    assert claim.token is not None
    assert Renewed("job", claim.token.value) in events
    guard.finish(claim, 1)
    assert guard.get_result("job") == 1


def test_a_record_is_kept_while_its_claim_is_renewed(guard: IdempotencyGuard, site: Site) -> None:
    claim = guard.begin("job", ttl=0.2, lease=1)
    first = int(site.job("job")["l"])
    both.until(lambda: int(site.job("job")["l"]) >= first + 1000)
    assert life(site, site.keys.job("job")) > 0.2
    guard.finish(claim, 1, ttl=5)
    assert guard.get_result("job") == 1


def test_a_dropped_claim_is_not_renewed(guard: IdempotencyGuard, client: Any, site: Site) -> None:
    guard.begin("job", lease=0.6)
    gc.collect()
    both.until(lambda: int(site.job("job")["l"]) <= site.milliseconds())
    assert (IdempotencyGuard(client).begin("job")).outcome is BeginOutcome.RECLAIMED


def test_a_thread_may_keep_the_claims_of_a_loop_that_is_blocked(
    client: Any, site: Site
) -> None:
    beats = site.threads_client()
    guard = IdempotencyGuard(client, heartbeat=beats)
    claim = guard.begin("job", lease=1)
    first = int(site.job("job")["l"])
    while int(site.job("job")["l"]) < first + 1000:
        time.sleep(0.01)  # nothing else runs in this loop
    assert claim.state is LeaseState.HELD
    guard.finish(claim, 1)
    beats.close()


def test_a_claim_that_the_server_forgot_is_lost(
    guard: IdempotencyGuard, site: Site, events: list[Event]
) -> None:
    claim = guard.begin("job", lease=0.9)
    site.flush()
    both.until(lambda: claim.lost)
    assert claim.token is not None
    number = claim.token.value
    both.until(lambda: any(isinstance(e, Lost) and e.token == number for e in events))
    with pytest.raises(IdempotencyNotOwned):
        guard.finish(claim, 1)
    assert site.all_keys() == []


# Events


def test_listeners_hear_the_life_of_a_job(
    guard: IdempotencyGuard, site: Site, events: list[Event]
) -> None:
    first = guard.begin("job")
    guard.begin("job")
    site.lapse("job")
    second = guard.begin("job")
    guard.fail(second, ValueError("no"))
    third = guard.begin("job")
    guard.finish(third, 1)
    guard.begin("job")
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
