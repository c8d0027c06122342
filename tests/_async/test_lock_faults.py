"""The lock behind a network that fails: lost replies, cut connections, silence, dead servers."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencekit import (
    AsyncLock,
    FenceKitError,
    LeaseLost,
    LeaseState,
    LockHandle,
    LockNotAcquired,
    LockNotOwned,
)
from fencekit._scripts import SCRIPTS
from fencekit._seam import aio as seam
from fencekit.events import (
    Event,
    LeaseInDanger,
    Lost,
    Released,
    ReleaseFailed,
    RenewalFailed,
    Renewed,
)
from fencekit.testing import Proxy, RedisServer
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio

COULD_NOT_ASK = (RedisConnectionError, RedisTimeoutError)
LAPSED = "its deadline passed without a renewal"
ROOT = Path(__file__).resolve().parents[2]


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


def needle(script: str) -> bytes:
    """What tells the calls of one script from others on the wire."""
    return SCRIPTS[script].digest.encode()


@pytest.fixture
def own(private_server: RedisServer) -> Iterator[Site]:
    site = Site.at(private_server)
    for script in SCRIPTS.values():  # so that each call is one command
        site.admin.script_load(script.source)
    yield site
    site.close()


@pytest.fixture
def proxy(own: Site) -> Iterator[Proxy]:
    with Proxy.before(own.servers) as proxy:
        yield proxy


class Through:
    """A lock whose server is behind the proxy, and one that reaches it directly."""

    def __init__(self, proxy: Proxy, own: Site, **settings: Any) -> None:
        self.events: list[Event] = []
        options = {"socket_timeout": 0.25, "socket_connect_timeout": 0.5}
        self._clients = [both.client_before(proxy, **options), both.client_of(own)]
        far, near = self._clients
        self.lock = AsyncLock(far, listeners=[self.events.append], **settings)
        self.direct = AsyncLock(near)

    async def close(self) -> None:
        for client in self._clients:
            await both.close(client)


Reach = Callable[..., Through]


@pytest_asyncio.fixture
async def reach(proxy: Proxy, own: Site) -> AsyncIterator[Reach]:
    """Makes locks behind the proxy, and closes their clients."""
    made: list[Through] = []

    def make(**settings: Any) -> Through:
        made.append(Through(proxy, own, **settings))
        return made[-1]

    yield make
    proxy.reset()
    for through in made:
        await through.close()


# -- one attempt, one effect ----------------------------------------------------------------------


@pytest.mark.parametrize("then", ["cut", "stall"])
async def test_a_lost_grant_is_asked_for_again_and_is_the_same_grant(
    reach: Reach, own: Site, proxy: Proxy, then: Any
) -> None:
    # scenario 47, I7
    through = reach()
    before = own.calls()
    proxy.swallow_matching(b"{a}:lock", then=then, times=1)
    handle = await through.lock.acquire("a", ttl=30)
    assert own.calls() == before + 2
    assert own.lock("a")["token"] == str(handle.token.value)
    assert own.fence("a") == handle.token.value
    assert 28 < handle.remaining <= 30
    await through.lock.release(handle)
    assert own.lock("a") == {}


async def test_a_grant_whose_reply_was_lost_while_waiting_is_not_waited_for(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # scenario 47
    through = reach()
    held = await through.direct.acquire("a", ttl=600)
    waiter = both.Running(lambda: through.lock.acquire("a", ttl=600, wait=30))
    await both.until(lambda: own.admin.client_list(_type="pubsub"))
    await seam.sleep(0.2)
    proxy.swallow_matching(needle("acquire"), times=1)
    await through.direct.release(held)
    handle = await waiter.result()
    assert own.lock("a")["token"] == str(handle.token.value)
    assert own.fence("a") == handle.token.value


async def test_a_server_that_freezes_over_a_request_grants_once(
    reach: Reach, own: Site, private_server: RedisServer, proxy: Proxy
) -> None:
    # I7
    through = reach()
    await through.lock.release(await through.lock.acquire("warm"))
    private_server.freeze()
    asking = both.Running(lambda: through.lock.acquire("a", ttl=30))
    await seam.sleep(0.7)  # it has asked twice at least
    private_server.resume()
    handle = await asking.result()
    await seam.sleep(0.1)
    assert own.lock("a")["token"] == str(handle.token.value)
    assert own.fence("a") == handle.token.value


async def test_a_late_copy_of_a_request_takes_nothing_once_its_grant_was_given_back(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    await through.lock.release(await through.lock.acquire("warm"))
    proxy.stall_matching(b"{a}:lock", times=1)
    handle = await through.lock.acquire("a", ttl=30)
    fence = own.fence("a")
    assert fence == handle.token.value
    proxy.flow()
    await seam.sleep(0.1)
    assert own.lock("a")["token"] == str(handle.token.value)
    assert own.fence("a") == fence


async def test_a_release_whose_reply_was_lost_is_a_release(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    handle = await through.lock.acquire("a", ttl=30)
    proxy.swallow_matching(needle("release"), times=1)
    await through.lock.release(handle)
    assert handle.state is LeaseState.RELEASED
    assert own.lock("a") == {}


async def test_a_release_whose_reply_was_lost_leaves_the_heir_alone(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    handle = await through.lock.acquire("a", ttl=30)
    proxy.swallow_matching(needle("release"), then="stall", times=1)
    releasing = both.Running(lambda: through.lock.release(handle))
    heir = await through.direct.acquire("a", ttl=30, wait=20)
    await releasing.result()
    assert handle.state is LeaseState.RELEASED
    assert own.lock("a")["token"] == str(heir.token.value)


async def test_a_release_that_comes_too_late_is_told_so_although_it_was_sent_twice(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    through = reach()
    handle = await through.lock.acquire("a", ttl=0.4)
    await both.until(lambda: handle.lost)
    heir = await through.direct.acquire("a", ttl=30, wait=20)
    proxy.swallow_matching(needle("release"), times=1)
    with pytest.raises(LockNotOwned, match="taken over by"):
        await through.lock.release(handle)
    assert own.lock("a")["token"] == str(heir.token.value)


async def test_an_extension_whose_reply_was_lost_is_an_extension(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    handle = await through.lock.acquire("a", ttl=5)
    proxy.swallow_matching(needle("renew"), times=1)
    await through.lock.extend(handle, ttl=30)
    assert handle.remaining > 25
    assert own.admin.pttl(own.keys.lock("a")) > 25_000


async def test_a_break_whose_reply_was_lost_tells_who_held_it(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    handle = await through.direct.acquire("a", ttl=30, owner_id="hung")
    proxy.swallow_matching(needle("break"), times=1)
    held = await through.lock.break_lock("a", reason="a test")
    assert held is not None
    assert held.token == handle.token.value
    assert [type(event).__name__ for event in through.events] == ["Broken"]
    with pytest.raises(LockNotOwned, match="broken: a test"):
        await through.direct.release(handle)


# -- could not ask --------------------------------------------------------------------------------


async def test_could_not_ask_is_neither_yes_nor_busy(reach: Reach, own: Site, proxy: Proxy) -> None:
    # scenario 35, scenario 56
    through = reach(timeout=0.3)
    await through.direct.acquire("a", ttl=30)
    proxy.refuse()
    for wait in (0, 0.5):
        with pytest.raises(COULD_NOT_ASK) as failed:
            async with through.lock.hold("a", wait=wait):
                raise AssertionError("the body ran")
        assert not isinstance(failed.value, FenceKitError)
        with pytest.raises(COULD_NOT_ASK):
            await through.lock.try_acquire("a")
    for step in (
        lambda: through.lock.inspect("a"),
        lambda: through.lock.break_lock("a", reason="a test"),
    ):
        with pytest.raises(COULD_NOT_ASK):
            await step()


async def test_an_attempt_that_was_given_up_leaves_no_grant(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I10, scenario 35
    through = reach(timeout=0.4)
    proxy.swallow_matching(needle("acquire"), then="stall")
    with pytest.raises(RedisTimeoutError):
        await through.lock.acquire("a", ttl=600)
    await both.until(lambda: "owner" not in own.lock("a"))
    assert all(own.admin.pttl(key) > 0 for key in own.all_keys())  # I8
    proxy.reset()
    await through.lock.release(await through.lock.acquire("a", ttl=5))


async def test_a_late_copy_of_an_attempt_that_was_given_up_takes_nothing(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I10
    through = reach(timeout=0.4)
    await through.lock.release(await through.lock.acquire("warm"))
    proxy.stall_matching(needle("acquire"))
    with pytest.raises(RedisTimeoutError):
        await through.lock.acquire("a", ttl=600)
    await both.until(lambda: "nonce" in own.lock("a"))  # what was given up is remembered
    proxy.flow()
    await seam.sleep(0.2)
    assert "owner" not in own.lock("a")
    assert own.fence("a") == 0
    assert await through.direct.try_acquire("a", ttl=5) is not None


async def test_a_grant_that_took_longer_than_its_ttl_is_given_back(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    through = reach()
    await through.lock.release(await through.lock.acquire("warm"))
    proxy.delay(0.2, "reply")
    with pytest.raises(RedisTimeoutError, match="longer than its ttl"):
        await through.lock.acquire("a", ttl=0.15)
    assert own.lock("a") == {}


async def test_a_wait_goes_on_over_a_short_outage(reach: Reach, own: Site, proxy: Proxy) -> None:
    through = reach(timeout=0.3)
    held = await through.direct.acquire("a", ttl=600)
    waiter = both.Running(lambda: through.lock.acquire("a", ttl=30, wait=20))
    await both.until(lambda: own.admin.client_list(_type="pubsub"))
    proxy.refuse()
    proxy.cut()
    await through.direct.release(held)
    await seam.sleep(0.6)
    assert not waiter.done
    proxy.accept()
    assert (await waiter.result()).token > held.token


async def test_what_time_does_not_mend_is_raised_at_once(own: Site) -> None:
    own.admin.acl_setuser(
        "reader", enabled=True, passwords=["+secret"], commands=["+@all", "-evalsha"],
        keys=["*"],
    )  # fmt: skip
    for options, expected in (
        ({"username": "reader", "password": "secret"}, NoPermissionError),
        ({"username": "reader", "password": "wrong"}, AuthenticationError),
    ):
        client = both.client_of(own, **options)
        with pytest.raises(RedisError) as failed:
            await AsyncLock(client, timeout=60).acquire("a", wait=60)
        assert isinstance(failed.value, expected)
        await both.close(client)


async def test_a_server_that_may_not_write_now_is_asked_until_it_may(own: Site) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client, timeout=0.3)
    own.admin.config_set("min-replicas-to-write", 1)
    with pytest.raises(ResponseError, match="NOREPLICAS"):
        await lock.acquire("a", ttl=30)
    asking = both.Running(lambda: AsyncLock(client).acquire("a", ttl=30))
    await seam.sleep(0.1)
    assert not asking.done
    own.admin.config_set("min-replicas-to-write", 0)
    handle = await asking.result()
    assert own.lock("a")["token"] == str(handle.token.value)
    await both.close(client)


async def test_a_refused_copy_does_not_count_as_an_earlier_release(own: Site) -> None:
    client = both.client_of(own)
    lock = AsyncLock(client)
    handle = await lock.acquire("a", ttl=30)
    own.admin.pexpire(own.keys.lock("a"), 3000)
    own.admin.config_set("min-replicas-to-write", 1)
    failed = own.failed_calls()
    releasing = both.Running(lambda: lock.release(handle))
    # The first failure may be a script that the server did not know yet.
    await both.until(lambda: own.failed_calls() >= failed + 2)
    await both.until(lambda: own.lock("a") == {})
    own.admin.config_set("min-replicas-to-write", 0)
    with pytest.raises(LockNotOwned, match="it lapsed"):
        await releasing.result()
    await both.close(client)


# -- the heartbeat --------------------------------------------------------------------------------


async def test_failed_renewals_are_tried_again_within_the_lease(
    reach: Reach, own: Site, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    # scenario 38
    through = reach()
    events = through.events
    with caplog.at_level(logging.WARNING, "fencekit"):
        async with through.lock.hold("tried", ttl=3) as handle:
            await both.until(lambda: count(events, Renewed))
            proxy.refuse()
            proxy.cut()
            await both.until(lambda: count(events, RenewalFailed))
            assert handle.state is LeaseState.UNSURE
            handle.check()  # unsure is not lost
            proxy.accept()
            proxy.stall()
            failed = count(events, RenewalFailed)
            await both.until(lambda: count(events, RenewalFailed) > failed)
            proxy.flow()
            renewed = count(events, Renewed)
            await both.until(lambda: count(events, Renewed) > renewed)
            assert handle.state is LeaseState.HELD
            assert own.lock("tried")["token"] == str(handle.token.value)
    assert own.lock("tried") == {}
    assert count(events, Lost) == 0
    # By its name: a heartbeat of a test before this one may have something to say too.
    warnings = [text for text in caplog.messages if "'tried'" in text]
    assert len(warnings) >= 2
    assert all(text.startswith("renewal ") and "'tried' failed" in text for text in warnings)


async def test_a_holder_cut_off_stops_by_its_own_clock(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # scenario 37, I9
    through = reach()
    events = through.events
    with pytest.raises(LeaseLost) as lost:
        async with through.lock.hold("a", ttl=1.2) as handle:
            await both.until(lambda: count(events, Renewed))
            proxy.stall()
            while True:
                handle.check()
                await seam.sleep(0.01)
    assert lost.value.reason == LAPSED
    assert handle.lost
    kinds = [type(event) for event in events]
    assert kinds.count(Lost) == 1
    assert kinds.index(RenewalFailed) <= kinds.index(LeaseInDanger) < kinds.index(Lost)
    # Leaving did not try to give back what was lost.
    assert ReleaseFailed not in kinds
    assert Released not in kinds
    assert (await through.direct.acquire("a", ttl=5, wait=20)).token > handle.token
    proxy.flow()


async def test_a_renewal_whose_reply_was_lost_is_a_renewal(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # I7
    through = reach()
    events = through.events
    async with through.lock.hold("a", ttl=3) as handle:
        proxy.swallow_matching(needle("renew"), times=2)
        await both.until(lambda: count(events, Renewed) >= 2)
        assert handle.state is LeaseState.HELD
    assert count(events, Lost) == 0


async def test_one_renewal_that_hangs_costs_its_own_lease_only(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # scenario 43
    through = reach()
    leave = seam.Event()

    async def hold(name: str) -> LockHandle:
        async with through.lock.hold(name, ttl=4) as handle:
            await leave.wait(30)
        return handle

    names = [f"n{i}" for i in range(20)]
    holders = [both.Running(lambda name=name: hold(name)) for name in names]
    await both.until(lambda: all(own.lock(name) for name in names))
    tokens = {name: own.lock(name)["token"] for name in names}
    proxy.stall_matching(b"{n7}:lock")
    await both.until(lambda: count(through.events, Lost))
    await seam.sleep(1.4)  # one more beat
    alive = {name for name in names if own.lock(name).get("token") == tokens[name]}
    assert alive == set(names) - {"n7"}
    (lost,) = [event for event in through.events if isinstance(event, Lost)]
    assert (lost.subject, lost.reason) == ("n7", LAPSED)
    proxy.reset()
    leave.set()
    for name, holder in zip(names, holders, strict=True):
        if name == "n7":
            with pytest.raises(LeaseLost):
                await holder.result()
        else:
            assert (await holder.result()).state is LeaseState.RELEASED


async def test_a_lease_survives_a_restart_of_a_server_that_keeps_its_data(
    reach: Reach, own: Site, private_server: RedisServer, proxy: Proxy
) -> None:
    through = reach()
    async with through.lock.hold("a", ttl=4) as handle:
        private_server.kill()
        await seam.sleep(0.05)
        private_server.restart()
        renewed = count(through.events, Renewed)
        await both.until(lambda: count(through.events, Renewed) > renewed)
        assert handle.state is LeaseState.HELD
    site = Site.at(private_server)
    assert site.lock("a") == {}
    site.close()


# -- leaving --------------------------------------------------------------------------------------


async def test_a_good_body_is_not_failed_by_a_release_that_cannot_be_sent(
    reach: Reach, own: Site, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    # scenario 56
    through = reach(timeout=0.3)
    async with through.lock.hold("a", ttl=2) as handle:
        proxy.refuse()
        proxy.cut()
    (failed,) = [event for event in through.events if isinstance(event, ReleaseFailed)]
    assert failed.token == handle.token.value
    assert "could not be given back" in caplog.text
    assert (await through.direct.acquire("a", ttl=5, wait=20)).token > handle.token


async def test_a_release_that_cannot_be_sent_does_not_replace_the_bodys_exception(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    through = reach(timeout=0.3)
    with pytest.raises(ZeroDivisionError):
        async with through.lock.hold("a", ttl=2):
            proxy.refuse()
            proxy.cut()
            raise ZeroDivisionError
    assert count(through.events, ReleaseFailed) == 1


async def test_leaving_is_bounded_in_time_and_not_by_the_locks_timeout(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    # scenario 56
    through = reach(timeout=600)
    async with through.lock.hold("a", ttl=1):
        proxy.refuse()
        proxy.cut()
    assert count(through.events, ReleaseFailed) == 1


async def test_a_release_that_failed_may_be_tried_again(
    reach: Reach, own: Site, proxy: Proxy
) -> None:
    through = reach(timeout=0.3)
    handle = await through.lock.acquire("a", ttl=30)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(COULD_NOT_ASK):
        await through.lock.release(handle)
    with pytest.raises(COULD_NOT_ASK):
        await through.lock.extend(handle)
    assert handle.state is LeaseState.HELD
    await through.direct.release(handle)
    assert handle.state is LeaseState.RELEASED
    assert own.lock("a") == {}


async def test_a_killed_holder_leaves_a_lock_that_expires(own: Site) -> None:
    # scenario 52
    code = (
        "import sys, redis, time; from fencekit import DistributedLock;"
        "client = redis.Redis.from_url(sys.argv[1]);"
        "handle = DistributedLock(client).acquire('a');"
        "print(handle.token.value, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, own.servers.url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        token = int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    assert own.lock("a")["token"] == str(token)
    assert 0 < own.admin.pttl(own.keys.lock("a")) <= 30_000
    client = both.client_of(own)
    lock = AsyncLock(client)
    with pytest.raises(LockNotAcquired) as refused:
        await lock.acquire("a")
    assert refused.value.holder is not None
    assert f"/{process.pid}/" in refused.value.holder
    own.expire_lock("a")
    assert (await lock.acquire("a")).token.value > token
    await both.close(client)


async def test_a_short_socket_timeout_is_for_each_reply_not_for_a_whole_call(
    own: Site, proxy: Proxy
) -> None:
    own.admin.script_flush()
    client = both.client_before(proxy, socket_timeout=0.6, socket_connect_timeout=10)
    lock = AsyncLock(client, timeout=8)
    proxy.delay(0.4, "reply")
    for _ in range(2):  # unknown scripts: three replies; a second connection: its handshake too
        await lock.release(await lock.acquire("a", ttl=600))
        proxy.cut()
    proxy.delay(0)
    await both.close(client)
