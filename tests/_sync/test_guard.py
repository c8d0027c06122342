"""The guard's verbs: starting, completing, reading and forgetting a named job."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from redis.exceptions import RedisError

from fencekit import (
    FenceGate,
    IdempotencyGuard,
    DistributedLock,
    BeginOutcome,
    CanonicalizeError,
    Claim,
    ForeignValue,
    IdempotencyNotOwned,
    IdempotencyResultMissing,
    ResultTooLarge,
)
from fencekit.events import Begun, Duplicate, Event, FencedOut, Finished, Reclaimed, Replayed
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads

DAY = 86400.0


def life(site: Site, key: bytes) -> float:
    """Seconds until the key expires; negative when it never does."""
    return site.admin.pttl(key) / 1000


# Starting


def test_of_many_callers_one_starts(client: Any, site: Site) -> None:
    guards = [IdempotencyGuard(client) for _ in range(20)]
    answers = both.together(partial(one.try_begin, "a", ttl=60) for one in guards)
    assert sorted(answers) == [False] * 19 + [True]
    assert site.job("a")["n"] == b"1"


def test_a_plain_start_is_never_repeated_within_its_ttl(client: Any, site: Site) -> None:
    assert IdempotencyGuard(client).try_begin("a", ttl=60)
    # Its worker is gone, and nothing says so: a plain start has no lease.
    assert "l" not in site.job("a")
    assert 59 < life(site, site.keys.job("a")) <= 60
    assert not IdempotencyGuard(client).try_begin("a", ttl=60)
    assert not IdempotencyGuard(client).try_begin("a", ttl=0.001)
    assert 50 < life(site, site.keys.job("a")) <= 60
    site.expire(site.keys.job("a"))
    assert IdempotencyGuard(client).try_begin("a", ttl=60)


def test_a_start_lives_a_day_unless_told_otherwise(guard: IdempotencyGuard, site: Site) -> None:
    guard.try_begin("a")
    guard.try_begin("b", ttl=timedelta(minutes=5))
    guard.try_begin("c", ttl=0.5)
    assert DAY - 1 < life(site, site.keys.job("a")) <= DAY
    assert 299 < life(site, site.keys.job("b")) <= 300
    assert 0 < life(site, site.keys.job("c")) <= 0.5


def test_a_done_job_is_not_started_again(guard: IdempotencyGuard, client: Any) -> None:
    assert guard.try_begin("a", ttl=60)
    guard.mark_done("a")
    assert not guard.try_begin("a", ttl=60)
    assert not IdempotencyGuard(client).try_begin("a", ttl=60)


def test_a_plain_start_that_takes_over_a_dead_claim_says_so(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    claim = IdempotencyGuard(client).begin("a", lease=30)
    assert not guard.try_begin("a")
    site.lapse("a")
    assert guard.try_begin("a")
    guard.mark_done("a", result="new")
    with pytest.raises(IdempotencyNotOwned):
        IdempotencyGuard(client).finish(claim, "old")
    assert guard.get_result("a") == "new"


def test_jobs_that_failed_for_good_or_ended_unknown_are_not_started_by_a_plain_start(
    guard: IdempotencyGuard, lock: DistributedLock, site: Site
) -> None:
    guard.fail(guard.begin("a"), ValueError("no"), retry=False)
    guard.begin("b", on_lapse="block")
    site.lapse("b")
    for key, outcome in (("a", BeginOutcome.FAILED), ("b", BeginOutcome.UNKNOWN)):
        assert not guard.try_begin(key)
        found = guard.try_begin_or_reclaim(key, lock=lock, lock_resource="r")
        assert found is outcome


# Who is who


def test_every_guard_has_an_owner_id_of_its_own_unless_one_is_chosen(client: Any) -> None:
    guards = [IdempotencyGuard(client) for _ in range(3)]
    assert len({one.owner_id for one in guards}) == 3
    assert guards[0].owner_id == guards[0].owner_id
    assert IdempotencyGuard(client, owner_id="worker-7").owner_id == "worker-7"


def test_a_start_is_labelled_with_host_process_and_label(client: Any, site: Site) -> None:
    IdempotencyGuard(client, label="billing").try_begin("a")
    IdempotencyGuard(client, owner_id="worker-7").try_begin("b")
    assert site.job("a")["b"].endswith(b"/billing")
    assert site.job("b")["b"].endswith(b"/worker-7")
    assert site.job("b")["o"] == b"worker-7"


# Completing


def test_only_the_guard_that_started_completes(guard: IdempotencyGuard, client: Any) -> None:
    guard.try_begin("a")
    with pytest.raises(IdempotencyNotOwned) as refused:
        IdempotencyGuard(client).mark_done("a", result="stolen")
    assert (refused.value.key, refused.value.state) == ("a", "pending")
    assert not refused.value.has_result
    assert guard.status("a") == "pending"
    guard.mark_done("a", result="mine")
    assert guard.get_result("a") == "mine"


def test_a_job_that_was_never_started_cannot_be_completed(
    guard: IdempotencyGuard, site: Site
) -> None:
    with pytest.raises(IdempotencyNotOwned) as refused:
        guard.mark_done("a", result=1)
    assert refused.value.state is None
    assert site.all_keys() == []


def test_an_expired_start_cannot_be_completed(guard: IdempotencyGuard, site: Site) -> None:
    guard.try_begin("a")
    site.expire(site.keys.job("a"))
    with pytest.raises(IdempotencyNotOwned):
        guard.mark_done("a", result=1)
    assert guard.status("a") is None


def test_the_stale_start_of_the_same_owner_cannot_complete(client: Any, site: Site) -> None:
    # I5: identity is the owner and the token, and an owner id may be shared.
    old, new = IdempotencyGuard(client, owner_id="w"), IdempotencyGuard(client, owner_id="w")
    assert old.try_begin("a", ttl=60)
    site.expire(site.keys.job("a"))
    assert new.try_begin("a", ttl=60)
    with pytest.raises(IdempotencyNotOwned) as refused:
        old.mark_done("a", result="old")
    assert refused.value.token > 0
    assert new.status("a") == "pending"
    new.mark_done("a", result="new")
    with pytest.raises(IdempotencyNotOwned) as refused:
        old.mark_done("a", result="old")
    assert refused.value.has_result
    assert refused.value.result == "new"
    assert old.get_result("a") == "new"


def test_another_guard_with_the_same_owner_id_completes_what_it_knows_nothing_about(
    client: Any,
) -> None:
    # A worker that was restarted under its old name: published behaviour since 0.6.
    assert IdempotencyGuard(client, owner_id="w").try_begin("a")
    again = IdempotencyGuard(client, owner_id="w")
    again.mark_done("a", result=1)
    assert again.get_result("a") == 1


def test_a_second_completion_is_refused_and_told_the_first_ones_result(
    guard: IdempotencyGuard,
) -> None:
    guard.try_begin("a")
    guard.mark_done("a", result=[1])
    with pytest.raises(IdempotencyNotOwned) as refused:
        guard.mark_done("a", result=[2])
    assert (refused.value.state, refused.value.result) == ("done", [1])
    assert guard.get_result("a") == [1]


def test_a_completion_says_how_long_it_is_remembered(guard: IdempotencyGuard, site: Site) -> None:
    for key in "abc":
        guard.try_begin(key, ttl=100)
    guard.mark_done("a")
    guard.mark_done("b", ttl=timedelta(hours=1))
    guard.mark_done("c", ttl=0.5)
    assert 90 < life(site, site.keys.job("a")) <= 100
    assert 3590 < life(site, site.keys.job("b")) <= 3600
    assert 0 < life(site, site.keys.job("c")) <= 0.5


# scenario 74
@pytest.mark.parametrize("result", [None, False, 0, "", [], b""], ids=repr)
def test_an_empty_result_is_a_result(guard: IdempotencyGuard, result: Any) -> None:
    guard.try_begin("a")
    guard.mark_done("a", result=result)
    found = guard.get_result("a")
    assert found == result
    assert type(found) is type(result)
    assert (guard.begin("a")).has_result


def test_a_result_that_cannot_be_remembered_leaves_the_job_to_its_owner(
    client: Any,
) -> None:
    guard = IdempotencyGuard(client, max_result=10)
    guard.try_begin("a")
    with pytest.raises(ResultTooLarge) as large:
        guard.mark_done("a", result="x" * 9)
    assert (large.value.key, large.value.size, large.value.limit) == ("a", 11, 10)
    with pytest.raises(CanonicalizeError):
        guard.mark_done("a", result=object())
    assert guard.status("a") == "pending"
    guard.mark_done("a", result="x" * 8)
    assert guard.get_result("a") == "x" * 8


def test_a_guard_remembers_its_starts_only_as_long_as_their_records_live(
    guard: IdempotencyGuard,
) -> None:
    for number in range(5000):
        guard._claiming.remember(f"old-{number}", 1, ttl=0.0001)
    assert guard.try_begin("new", ttl=60)
    assert len(guard._claiming._started._tokens) <= 1025
    guard.mark_done("new")


# Taking over


@pytest.mark.parametrize("resource", ["r", "a"], ids=["another name", "the job's name"])
def test_a_pending_job_is_taken_over_only_while_the_lock_is_free(
    guard: IdempotencyGuard, client: Any, site: Site, resource: str
) -> None:
    worker, lock = IdempotencyGuard(client), DistributedLock(client)
    first = worker.try_begin_or_reclaim("a", lock=lock, lock_resource=resource, ttl=60)
    assert first is BeginOutcome.BEGUN
    handle = lock.acquire(resource, ttl=30)
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource=resource, ttl=90)
    assert reclaim() is BeginOutcome.IN_PROGRESS
    token = int(site.job("a")["t"])
    lock.release(handle)
    assert not guard.try_begin("a")
    assert reclaim() is BeginOutcome.RECLAIMED
    assert int(site.job("a")["t"]) > token
    assert 80 < life(site, site.keys.job("a")) <= 90
    with pytest.raises(IdempotencyNotOwned):
        worker.mark_done("a", result="late")
    guard.mark_done("a", result="done")
    assert reclaim() is BeginOutcome.ALREADY_DONE
    assert reclaim() is BeginOutcome.ALREADY_DONE
    assert worker.get_result("a") == "done"


def test_a_lock_that_ran_out_or_was_broken_is_free(
    guard: IdempotencyGuard, lock: DistributedLock, client: Any, site: Site
) -> None:
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r")
    assert IdempotencyGuard(client).try_begin("a")
    lock.acquire("r", ttl=30)
    assert reclaim() is BeginOutcome.IN_PROGRESS
    site.expire_lock("r")
    assert reclaim() is BeginOutcome.RECLAIMED
    lock.acquire("r", ttl=30)
    assert reclaim() is BeginOutcome.IN_PROGRESS
    lock.break_lock("r", reason="test")
    assert reclaim() is BeginOutcome.RECLAIMED


def test_a_live_claim_is_not_taken_over_through_a_free_lock(
    guard: IdempotencyGuard, lock: DistributedLock, client: Any, site: Site
) -> None:
    claim = IdempotencyGuard(client).begin("a", lease=30)
    reclaim = partial(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r")
    assert reclaim() is BeginOutcome.IN_PROGRESS
    assert not claim.lost
    site.lapse("a")
    assert reclaim() is BeginOutcome.RECLAIMED


def test_reclaiming_needs_a_lock_of_the_same_kind_and_prefix(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    with pytest.raises(TypeError, match="lock is a"):
        guard.try_begin_or_reclaim("a", lock=object(), lock_resource="r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same prefix"):
        guard.try_begin_or_reclaim(
            "a", lock=DistributedLock(client, prefix="other"), lock_resource="r"
        )
    assert site.all_keys() == []


# Reading


def test_status_tells_where_a_job_stands(guard: IdempotencyGuard, site: Site) -> None:
    assert guard.status("a") is None
    guard.try_begin("a")
    assert guard.status("a") == "pending"
    guard.mark_done("a")
    assert guard.status("a") == "done"
    claim = guard.begin("b")
    assert guard.status("b") == "pending"
    site.lapse("b")
    assert guard.status("b") == "pending"
    guard.fail(claim)
    assert guard.status("b") is None
    guard.fail(guard.begin("b"), retry=False)
    assert guard.status("b") == "failed"


def test_a_missing_result_says_why_it_is_missing(guard: IdempotencyGuard) -> None:
    guard.try_begin("pending")
    guard.try_begin("bare")
    guard.mark_done("bare")
    guard.fail(guard.begin("failed"), ValueError("no"), retry=False)
    guard.fail(guard.begin("free"), ValueError("no"))
    reasons = {
        "absent": (None, "no record"),
        "pending": ("pending", "still pending"),
        "bare": ("done", "without a stored result"),
        "failed": ("failed", "failed, and its failure is remembered"),
        "free": (None, "may be started again"),
    }
    for key, (state, reason) in reasons.items():
        with pytest.raises(IdempotencyResultMissing, match=reason) as missing:
            guard.get_result(key)
        assert (missing.value.key, missing.value.state) == (key, state)
        assert repr(key) in str(missing.value)


def test_reading_changes_nothing(guard: IdempotencyGuard, site: Site) -> None:
    guard.status("a")
    with pytest.raises(IdempotencyResultMissing):
        guard.get_result("a")
    assert site.all_keys() == []
    guard.try_begin("a")
    before = site.job("a")
    guard.status("a")
    with pytest.raises(IdempotencyResultMissing):
        guard.get_result("a")
    assert site.job("a") == before


# Forgetting


def test_a_cleared_job_starts_again_and_its_old_start_cannot_complete(
    guard: IdempotencyGuard, client: Any, site: Site
) -> None:
    other = IdempotencyGuard(client)
    guard.clear("a")
    guard.try_begin("a")
    other.clear("a")
    assert site.all_keys() == []
    assert other.try_begin("a")
    with pytest.raises(IdempotencyNotOwned):
        guard.mark_done("a", result="old")
    other.mark_done("a", result="new")
    guard.clear("a")
    with pytest.raises(IdempotencyResultMissing):
        guard.get_result("a")


def test_a_claim_of_a_cleared_job_cannot_be_finished(guard: IdempotencyGuard, client: Any) -> None:
    claim = guard.begin("a")
    IdempotencyGuard(client).clear("a")
    with pytest.raises(IdempotencyNotOwned) as refused:
        guard.finish(claim, 1)
    assert refused.value.state is None
    assert guard.status("a") is None


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
def test_a_foreign_value_at_a_jobs_key_is_named_and_left_alone(
    client: Any, lock: DistributedLock, site: Site, kind: str
) -> None:
    # I12
    guard = IdempotencyGuard(client, owner_id="me")
    claim = guard.begin("a")
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
            verb()
        assert refused.value.key == key.decode()
        assert key.decode() in str(refused.value)
        assert site.admin.dump(key) == value
    assert site.admin.ttl(key) == -1
    assert site.all_keys() == [key]


def test_a_foreign_value_at_a_lock_or_fence_key_starts_no_job(
    guard: IdempotencyGuard, site: Site
) -> None:
    # I12
    for key in (site.keys.lock("r"), site.keys.fence("r")):
        value = put(site, key, ["x"])
        with pytest.raises(ForeignValue) as refused:
            guard.begin("a", lock="r")
        assert refused.value.key == key.decode()
        assert site.admin.dump(key) == value
        assert site.all_keys() == [key]
        site.admin.delete(key)
    fence = site.keys.job_fence("a")
    value = put(site, fence, "not a number")
    with pytest.raises(ForeignValue) as refused:
        guard.begin("a")
    assert refused.value.key == fence.decode()
    assert site.admin.dump(fence) == value
    assert site.all_keys() == [fence]


# What nobody may ask


def nowhere(**settings: Any) -> IdempotencyGuard:
    """A guard without a server: whatever reaches the network fails as a network does."""
    return IdempotencyGuard(both.client_without_server(), timeout=0.001, **settings)


NAMES = (None, 5, b"a", "", " \t", "x" * 1025, "\ud800")
DURATIONS = (0, -1, 0.0004, math.nan, math.inf, 10**400, timedelta(0), timedelta(days=5000))
NO_DURATIONS = ("5", True, [], 1j)


def refused(verb: Any, *args: Any, **kwargs: Any) -> None:
    """Fails unless the call is refused before anything is sent."""
    with pytest.raises((TypeError, ValueError)):
        verb(*args, **kwargs)


def entered(*args: Any, **kwargs: Any) -> None:
    with nowhere().run(*args, **kwargs):
        pass


def test_a_guard_without_a_server_cannot_ask() -> None:
    for verb in (nowhere().try_begin, nowhere().begin, nowhere().status, entered):
        with pytest.raises(RedisError):
            verb("a")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:12])
def test_a_bad_name_is_refused_before_anything_is_sent(name: Any) -> None:
    guard, lock = nowhere(), DistributedLock(both.client_without_server(), timeout=0.001)
    for verb in (guard.try_begin, guard.mark_done, guard.get_result, guard.status, guard.clear):
        refused(verb, name)
    refused(guard.try_begin_or_reclaim, name, lock=lock, lock_resource="r")
    refused(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource=name)
    for verb in (guard.begin, guard.resolve, entered):
        refused(verb, name)
    refused(guard.once, name, int)
    if name is not None:
        refused(guard.begin, "a", lock=name)
        refused(entered, "a", lock=name)
        refused(guard.once, "a", int, lock=name)
        with pytest.raises((TypeError, ValueError)):
            guard.idempotent(lock=name)


@pytest.mark.parametrize("given", [*DURATIONS, *NO_DURATIONS, None], ids=lambda x: repr(x)[:12])
def test_a_bad_duration_is_refused_before_anything_is_sent(given: Any) -> None:
    guard, lock = nowhere(), DistributedLock(both.client_without_server(), timeout=0.001)
    for name in ("ttl", "lease"):
        for verb in (guard.begin, entered):
            refused(verb, "a", **{name: given})
        refused(guard.once, "a", int, **{name: given})
        with pytest.raises((TypeError, ValueError)):
            guard.idempotent(**{name: given})
    refused(guard.try_begin, "a", ttl=given)
    refused(guard.try_begin_or_reclaim, "a", lock=lock, lock_resource="r", ttl=given)
    for name in ("timeout", "retention"):
        with pytest.raises((TypeError, ValueError)):
            IdempotencyGuard(both.client_without_server(), **{name: given})
    if given is None:
        return  # "as it is", "without end", "no limit"
    claim = Claim("a", BeginOutcome.BEGUN, "me", 1)
    refused(guard.mark_done, "a", ttl=given)
    refused(guard.resolve, "a", ttl=given)
    refused(guard.finish, claim, ttl=given)
    refused(guard.fail, claim, ttl=given)
    refused(entered, "a", max_hold=given)
    if given not in (0, timedelta(0), 0.0004):
        refused(guard.once, "a", int, wait=given)


def test_other_bad_input_is_refused_before_anything_is_sent() -> None:
    guard = nowhere()
    bad: list[dict[str, Any]] = [
        {"fingerprint": 5}, {"fingerprint": ""}, {"fingerprint": "x" * 1025},
        {"max_attempts": 0}, {"max_attempts": -1}, {"max_attempts": 1.5}, {"max_attempts": True},
        {"max_attempts": 10**7}, {"on_lapse": "ignore"}, {"on_lapse": None},
    ]  # fmt: skip
    for settings in bad:
        refused(guard.begin, "a", **settings)
        refused(entered, "a", **settings)
        refused(guard.once, "a", int, **settings)
    for remember in (5, [int], (KeyboardInterrupt,), int):
        refused(entered, "a", remember=remember)
        refused(guard.once, "a", int, remember=remember)
    for claim in (None, "a", object()):
        refused(guard.finish, claim)
        refused(guard.fail, claim)
    refused(guard.once, "a", None)
    refused(guard.once, "a", "int")
    with pytest.raises(ValueError, match="on_missing_key"):
        guard.idempotent(on_missing_key="skip")  # type: ignore[arg-type]


def test_a_result_that_cannot_be_remembered_is_refused_before_anything_is_sent() -> None:
    guard = nowhere(max_result=3)
    claim = Claim("a", BeginOutcome.BEGUN, "me", 1)
    for verb in (partial(guard.mark_done, "a"), partial(guard.resolve, "a")):
        with pytest.raises(CanonicalizeError):
            verb(result=math.nan)
        with pytest.raises(ResultTooLarge):
            verb(result=1234)
    with pytest.raises(CanonicalizeError):
        guard.finish(claim, {1: 2})
    with pytest.raises(ResultTooLarge):
        guard.finish(claim, 1234)


def test_a_claim_that_was_not_started_here_is_refused_before_anything_is_sent() -> None:
    for outcome in BeginOutcome:
        claim = Claim("a", outcome, "me", 1)
        for verb in (nowhere().finish, nowhere().fail):
            with pytest.raises(IdempotencyNotOwned, match="not started here"):
                verb(claim)


def test_a_guard_refuses_bad_settings() -> None:
    bad: list[dict[str, Any]] = [
        {"prefix": ""}, {"prefix": "a b"}, {"prefix": "{a}"}, {"prefix": 5}, {"owner_id": ""},
        {"owner_id": "x" * 257}, {"owner_id": 5}, {"owner_id": "\ud800"}, {"label": "a\nb"},
        {"label": "x" * 201}, {"label": None}, {"max_result": 0}, {"max_result": True},
        {"max_result": 1.5}, {"listeners": [5]}, {"heartbeat": object()},
    ]  # fmt: skip
    for settings in bad:
        with pytest.raises((TypeError, ValueError)):
            IdempotencyGuard(both.client_without_server(), **settings)
    for client in (None, object(), "redis://127.0.0.1"):
        with pytest.raises(TypeError, match="client"):
            IdempotencyGuard(client)


# scenario 65
def test_data_lock_guard_and_gate_of_one_name_never_meet(
    client: Any, guard: IdempotencyGuard, lock: DistributedLock, gate: FenceGate, site: Site
) -> None:
    # I11
    name = "order:1"
    site.admin.hset(name, mapping={"owner": "shop", "s": "paid"})
    handle = lock.acquire(name, ttl=30)
    claim = guard.begin(name)
    assert gate.current_max(name) == handle.token.value
    assert claim.token is not None
    assert claim.token.kind == "job"
    # Neither counts for the other: not the claim's token for the lock's gate, nor the reverse.
    gate.check_and_advance(claim.token)
    gate.check(handle.token)
    guard.finish(claim, "paid")
    assert (lock.inspect(name)) is not None
    lock.release(handle)
    assert guard.get_result(name) == "paid"
    again = lock.acquire(name, ttl=30)
    assert again.token > handle.token
    lock.release(again)
    assert site.admin.hgetall(name) == {b"owner": b"shop", b"s": b"paid"}
    ours = [key for key in site.all_keys() if key != name.encode()]
    assert ours
    assert all(key.startswith(b"fencekit:{order:1}:") for key in ours)


# scenario 65
def test_two_prefixes_on_one_server_are_two_worlds(client: Any, site: Site) -> None:
    name = "order:1"
    for prefix in ("shop", "shop:eu"):
        guard, lock = IdempotencyGuard(client, prefix=prefix), DistributedLock(client, prefix=prefix)
        gate = FenceGate(client, prefix=prefix)
        assert guard.try_begin(name)
        guard.mark_done(name, result=prefix)
        handle = lock.acquire(name, ttl=30)
        gate.check(handle.token)
    for prefix in ("shop", "shop:eu"):
        assert IdempotencyGuard(client, prefix=prefix).get_result(name) == prefix
        found = DistributedLock(client, prefix=prefix).inspect(name)
        assert found is not None
    kinds = ("fence", "job", "lock")
    expected = [f"{p}:{{{name}}}:{kind}".encode() for p in ("shop", "shop:eu") for kind in kinds]
    assert site.all_keys() == sorted(expected)


def test_every_key_expires(guard: IdempotencyGuard, lock: DistributedLock, site: Site) -> None:
    # I8
    guard.try_begin("a")
    guard.mark_done("a", result=1)
    guard.try_begin_or_reclaim("b", lock=lock, lock_resource="b")
    guard.begin("c", lock="c")
    guard.finish(guard.begin("d", lock="e"), 1)
    guard.fail(guard.begin("f", lock="g"))
    guard.fail(guard.begin("h"), retry=False)
    guard.begin("i", on_lapse="block")
    site.lapse("i")
    guard.resolve("i", 1)
    for key in site.all_keys():
        assert 0 < life(site, key) <= 7 * DAY, key


# Events


def test_listeners_hear_what_became_of_a_plain_start(
    guard: IdempotencyGuard, lock: DistributedLock, client: Any, events: list[Event], site: Site
) -> None:
    guard.try_begin("a", ttl=60)
    token = int(site.job("a")["t"])
    guard.try_begin("a")
    taker = IdempotencyGuard(client, listeners=[events.append])
    taker.try_begin_or_reclaim("a", lock=lock, lock_resource="r")
    newer = int(site.job("a")["t"])
    with pytest.raises(IdempotencyNotOwned):
        guard.mark_done("a")
    taker.mark_done("a")
    guard.try_begin("a")
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


def test_a_listener_that_fails_breaks_no_job(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("no")

    heard: list[Event] = []
    guard = IdempotencyGuard(client, listeners=[fail, heard.append])
    assert guard.try_begin("a")
    guard.mark_done("a", result=1)
    assert guard.get_result("a") == 1
    assert [type(event) for event in heard] == [Begun, Finished]
    assert "a fencekit listener failed" in caplog.text
