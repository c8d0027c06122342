"""The lock's promises on a healthy server."""

from __future__ import annotations

import pytest

from fencekit import AsyncLock, LeaseState, LockNotAcquired, LockNotOwned
from tests.site import Site

pytestmark = pytest.mark.asyncio


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


async def test_every_grant_has_a_larger_token(lock: AsyncLock, site: Site) -> None:
    last = 0
    for _ in range(5):
        handle = await lock.acquire("a", ttl=5)
        assert handle.token.value > last
        assert site.fence("a") == handle.token.value
        last = handle.token.value
        await lock.release(handle)


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
