"""The lock's promises on a healthy server."""

from __future__ import annotations

import pytest

from fencekit import DistributedLock, LeaseState, LockNotAcquired, LockNotOwned
from tests.site import Site

pytestmark = pytest.mark.threads


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


def test_every_grant_has_a_larger_token(lock: DistributedLock, site: Site) -> None:
    last = 0
    for _ in range(5):
        handle = lock.acquire("a", ttl=5)
        assert handle.token.value > last
        assert site.fence("a") == handle.token.value
        last = handle.token.value
        lock.release(handle)


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
