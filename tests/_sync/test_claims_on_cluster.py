"""A job and its lock on two servers of a Cluster: two steps, the same promises."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from fencekit import (
    IdempotencyGuard,
    DistributedLock,
    BeginOutcome,
    ForeignValue,
    IdempotencyConflict,
    IdempotencyNotOwned,
    LockNotAcquired,
)
from fencekit.keys import key_slot
from fencekit.testing import ClusterServers
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads


@pytest.fixture
def cluster(fencekit_cluster: ClusterServers) -> Iterator[Site]:
    site = Site.at(fencekit_cluster)
    site.clustered = True
    site.flush()
    assert key_slot(site.keys.job("job")) != key_slot(site.keys.lock("r"))
    yield site
    site.close()


class Kit:
    """Two guards and a lock on one client."""

    def __init__(self, cluster: Site) -> None:
        self._client = both.client_of(cluster)
        self.guard = IdempotencyGuard(self._client, label="first")
        self.other = IdempotencyGuard(self._client, label="second")
        self.lock = DistributedLock(self._client)

    def close(self) -> None:
        both.close(self._client)


def test_a_claim_with_a_lock_on_another_server_is_one_claim(cluster: Site) -> None:
    kit = Kit(cluster)
    claim = kit.guard.begin("job", lock="r", lease=20)
    assert claim.token is not None
    assert (claim.token.resource, claim.token.kind) == ("r", "lock")
    assert cluster.lock("r")["token"] == str(claim.token.value)
    assert cluster.job("job")["s"] == b"p"
    running = kit.other.begin("job", lock="r")
    assert running.outcome is BeginOutcome.IN_PROGRESS
    assert running.holder is not None
    assert running.holder.endswith("/first")
    with pytest.raises(LockNotAcquired, match="/first"):
        kit.other.begin("another job", lock="r")
    assert cluster.job("another job") == {}
    kit.guard.finish(claim, "done")
    assert cluster.lock("r") == {}
    handle = kit.lock.acquire("r")
    assert handle.token > claim.token
    done = kit.other.begin("job", lock="r")
    assert (done.outcome, done.result) == (BeginOutcome.ALREADY_DONE, "done")
    kit.close()


def test_whoever_does_not_start_the_job_gives_its_lock_back(cluster: Site) -> None:
    kit = Kit(cluster)
    kit.guard.begin("job", fingerprint="one")
    assert (kit.other.begin("job", lock="r")).outcome is BeginOutcome.IN_PROGRESS
    assert cluster.lock("r") == {}
    with pytest.raises(IdempotencyConflict):
        kit.other.begin("job", lock="r", fingerprint="two")
    assert cluster.lock("r") == {}
    cluster.admin.delete(cluster.keys.job("job"))
    cluster.admin.set(cluster.keys.job("job"), "somebody else's")
    with pytest.raises(ForeignValue):
        kit.other.begin("job", lock="r")
    assert cluster.lock("r") == {}
    kit.close()


def test_what_the_record_says_counts_more_than_a_busy_lock(cluster: Site) -> None:
    kit = Kit(cluster)
    kit.lock.acquire("r", ttl=600)
    claim = kit.guard.begin("job", fingerprint="one")
    begin = partial(kit.other.begin, "job", lock="r")
    assert (begin()).outcome is BeginOutcome.IN_PROGRESS
    with pytest.raises(IdempotencyConflict):
        begin(fingerprint="two")
    kit.guard.fail(claim, ValueError("no"), retry=False)
    failed = begin(fingerprint="one")
    assert (failed.outcome, failed.error_message) == (BeginOutcome.FAILED, "no")
    kit.close()


def test_a_dead_claim_is_taken_over_once_its_lock_has_lapsed_too(cluster: Site) -> None:
    kit = Kit(cluster)
    dead = kit.guard.begin("job", lock="r")
    cluster.lapse("job")
    with pytest.raises(LockNotAcquired):
        kit.other.begin("job", lock="r")
    cluster.expire_lock("r")
    claim = kit.other.begin("job", lock="r")
    assert (claim.outcome, claim.attempts) == (BeginOutcome.RECLAIMED, 2)
    assert dead.token is not None
    assert claim.token is not None
    assert claim.token > dead.token
    with pytest.raises(IdempotencyNotOwned):
        kit.guard.finish(dead, "old")
    assert cluster.lock("r")["token"] == str(claim.token.value)
    kit.other.finish(claim, "new")
    assert cluster.lock("r") == {}
    kit.close()


def test_both_leases_are_kept(cluster: Site) -> None:
    kit = Kit(cluster)
    claim = kit.guard.begin("job", lock="r", lease=1)
    lapses = int(cluster.job("job")["l"])
    both.until(lambda: int(cluster.job("job")["l"]) >= lapses + 1000)
    assert cluster.admin.pttl(cluster.keys.lock("r")) > 0
    kit.lock.break_lock("r", reason="stuck")
    both.until(lambda: claim.lost)
    kit.close()


def test_a_pending_job_is_taken_over_while_a_lock_elsewhere_is_free(cluster: Site) -> None:
    kit = Kit(cluster)
    reclaim = partial(kit.other.try_begin_or_reclaim, "job", lock=kit.lock, lock_resource="r")
    handle: Any = kit.lock.acquire("r", ttl=30)
    assert kit.guard.try_begin("job")
    assert reclaim() is BeginOutcome.IN_PROGRESS
    kit.lock.release(handle)
    assert reclaim() is BeginOutcome.RECLAIMED
    with pytest.raises(IdempotencyNotOwned):
        kit.guard.mark_done("job", result="old")
    kit.other.mark_done("job", result="new")
    assert reclaim() is BeginOutcome.ALREADY_DONE
    assert kit.guard.get_result("job") == "new"
    kit.close()


def test_a_call_waits_for_a_lock_elsewhere(cluster: Site) -> None:
    kit = Kit(cluster)
    handle = kit.lock.acquire("r", ttl=600)
    calling = both.Running(partial(kit.guard.once, "job", int, lock="r"))
    room = kit.guard._claiming.backends.get().room
    both.until(lambda: room.occupied(cluster.keys.free_channel("r")))
    assert not calling.done
    kit.lock.release(handle)
    assert calling.result(10) == 0
    assert cluster.lock("r") == {}
    kit.close()
