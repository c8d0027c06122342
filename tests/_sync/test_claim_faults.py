"""Claims behind a network that fails, a frozen server, and workers that are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from fencekit import (
    IdempotencyGuard,
    BeginOutcome,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    LeaseState,
)
from fencekit._scripts import SCRIPTS
from fencekit._seam import threads as seam
from fencekit.events import Event, Finished, Reclaimed
from fencekit.testing import Proxy, RedisServer
from tests import threads as both
from tests.site import Site

pytestmark = pytest.mark.threads

ROOT = Path(__file__).resolve().parents[2]
LOCK = pytest.mark.parametrize("name", [None, "r"], ids=["no lock", "with a lock"])


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


@pytest.fixture
def done(own: Site) -> Iterator[Any]:
    """Hears every completion of the job: the message is a part of it."""
    ears = own.admin.pubsub()
    ears.subscribe(own.keys.done_channel("job"))
    assert ears.get_message(timeout=5)["type"] == "subscribe"
    yield ears
    ears.close()


def heard(done: Any) -> int:
    """How many completions there were since the last time."""
    count = 0
    while done.get_message(timeout=0.05) is not None:
        count += 1
    return count


class Through:
    """A guard whose server is behind the proxy, and one that reaches it directly."""

    def __init__(self, proxy: Proxy, own: Site, **settings: Any) -> None:
        self.events: list[Event] = []
        far = both.plain_client_before(proxy, socket_timeout=0.25, socket_connect_timeout=0.5)
        self._clients = [far, both.client_of(own)]
        self.guard = IdempotencyGuard(far, listeners=[self.events.append], **settings)
        self.patient = IdempotencyGuard(far)
        self.direct = IdempotencyGuard(self._clients[1])

    def close(self) -> None:
        for client in self._clients:
            both.close(client)


# Lost replies: one attempt has one effect (I7)


@LOCK
@pytest.mark.parametrize("then", ["cut", "stall"])
def test_a_claim_whose_reply_was_lost_is_the_same_claim(
    own: Site, proxy: Proxy, then: Any, name: str | None
) -> None:
    through = Through(proxy, own)
    before = own.calls()
    proxy.swallow_matching(needle("begin"), then=then, times=1)
    claim = through.guard.begin("job", lock=name)
    assert own.calls() == before + 2
    assert (claim.outcome, claim.attempts) == (BeginOutcome.BEGUN, 1)
    assert claim.token is not None
    assert int(own.job("job")["t"]) == claim.token.value
    assert own.job("job")["n"] == b"1"
    if name is not None:
        assert own.lock(name)["token"] == str(claim.token.value)
    through.guard.finish(claim, 1)
    assert through.direct.get_result("job") == 1
    through.close()


def test_a_takeover_whose_reply_was_lost_is_counted_once(own: Site, proxy: Proxy) -> None:
    through = Through(proxy, own)
    through.direct.begin("job")
    own.lapse("job")
    proxy.swallow_matching(needle("begin"), times=2)
    claim = through.guard.begin("job")
    assert (claim.outcome, claim.attempts) == (BeginOutcome.RECLAIMED, 2)
    assert claim.token is not None
    assert through.events == [Reclaimed("job", claim.token.value, 2)]
    through.close()


def test_a_plain_start_whose_reply_was_lost_still_answers_true(
    own: Site, proxy: Proxy
) -> None:
    through = Through(proxy, own)
    proxy.swallow_matching(needle("begin"), times=1)
    assert through.guard.try_begin("job")
    proxy.swallow_matching(needle("settle"), times=1)
    through.guard.mark_done("job", result=1)
    assert through.direct.get_result("job") == 1
    through.close()


@LOCK
@pytest.mark.parametrize("then", ["cut", "stall"])
def test_a_completion_whose_reply_was_lost_happens_once(
    own: Site, proxy: Proxy, done: Any, then: Any, name: str | None
) -> None:
    through = Through(proxy, own)
    claim = through.guard.begin("job", lock=name)
    before = own.calls()
    proxy.swallow_matching(needle("settle"), then=then, times=2)
    through.guard.finish(claim, "paid")
    assert own.calls() == before + 3
    assert heard(done) == 1
    assert claim.state is LeaseState.RELEASED
    assert through.direct.get_result("job") == "paid"
    assert own.lock("r") == {}
    assert claim.token is not None
    assert through.events[-1] == Finished("job", claim.token.value)
    through.close()


@pytest.mark.parametrize("retry", [True, False])
def test_a_failure_whose_reply_was_lost_happens_once(
    own: Site, proxy: Proxy, done: Any, retry: bool
) -> None:
    through = Through(proxy, own)
    claim = through.guard.begin("job", lock="r")
    proxy.swallow_matching(needle("settle"), times=1)
    through.guard.fail(claim, ValueError("no"), retry=retry)
    assert heard(done) == 1
    assert own.lock("r") == {}
    again = through.direct.begin("job")
    assert again.started is retry
    assert again.attempts == (2 if retry else 1)
    through.close()


def test_a_freed_job_that_was_begun_again_before_the_repeat_came_is_left_alone(
    own: Site, proxy: Proxy
) -> None:
    through = Through(proxy, own)
    claim = through.guard.begin("job")
    proxy.swallow_matching(needle("settle"), then="stall", times=1)
    failing = both.Running(partial(through.guard.fail, claim))
    both.until(lambda: own.job("job").get("s") == b"x")
    next_one = through.direct.begin("job")
    failing.result()
    assert next_one.attempts == 2
    through.direct.finish(next_one, 1)
    through.close()


# A server that does not answer


def test_a_completion_sent_to_a_frozen_server_happens_once(
    own: Site, private_server: RedisServer, done: Any
) -> None:
    # I7: however many copies the server finds when it goes on
    client = both.plain_client_before(private_server, socket_timeout=0.15)
    guard = IdempotencyGuard(client)
    claim = guard.begin("job", lock="r", lease=60)
    before = own.admin.info("stats")["total_connections_received"]
    private_server.freeze()
    finishing = both.Running(partial(guard.finish, claim, "paid"))
    seam.sleep(0.5)  # the caller gives up on one connection after the other
    assert not finishing.done
    private_server.resume()
    finishing.result()
    assert own.admin.info("stats")["total_connections_received"] > before
    assert heard(done) == 1
    assert guard.get_result("job") == "paid"
    assert own.lock("r") == {}
    both.close(client)


def test_a_completion_that_could_not_be_sent_is_tried_again_by_its_caller(
    own: Site, proxy: Proxy, done: Any
) -> None:
    through = Through(proxy, own, timeout=0.3)
    claim = through.guard.begin("job", lease=20)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(RedisError):
        through.guard.finish(claim, 1)
    assert claim.state is LeaseState.HELD
    assert through.direct.status("job") == "pending"
    proxy.accept()
    through.patient.finish(claim, 1)
    assert heard(done) == 1
    assert through.direct.get_result("job") == 1
    through.close()


@LOCK
def test_a_start_that_nobody_heard_of_is_taken_back_and_not_counted(
    own: Site, proxy: Proxy, name: str | None
) -> None:
    # I10
    through = Through(proxy, own, timeout=0.4)
    proxy.swallow_matching(needle("begin"))
    with pytest.raises(RedisError):
        through.guard.begin("job", lock=name)
    both.until(lambda: own.job("job").get("s") == b"x")
    assert own.lock("r").get("owner") is None
    assert through.direct.status("job") is None
    claim = through.direct.begin("job", lock=name)
    assert (claim.outcome, claim.attempts) == (BeginOutcome.BEGUN, 1)
    through.close()


def test_a_start_that_arrives_after_it_was_given_up_takes_nothing(
    own: Site, proxy: Proxy
) -> None:
    # I10
    through = Through(proxy, own, timeout=0.4)
    proxy.stall_matching(needle("begin"))
    with pytest.raises(RedisError):
        through.guard.begin("job", lock="r")
    both.until(lambda: own.job("job").get("s") == b"x")
    before = own.calls()
    proxy.flow()
    both.until(lambda: own.calls() > before)
    assert own.job("job")["s"] == b"x"
    assert own.lock("r").get("owner") is None
    claim = through.direct.begin("job", lock="r")
    assert (claim.outcome, claim.attempts) == (BeginOutcome.BEGUN, 1)
    through.close()


def test_a_claim_is_kept_over_a_blip(own: Site, proxy: Proxy) -> None:
    through = Through(proxy, own)
    claim = through.guard.begin("job", lease=1.5)
    proxy.refuse()
    proxy.cut()
    both.until(lambda: claim.state is LeaseState.UNSURE)
    claim.check()
    proxy.accept()
    both.until(lambda: claim.state is LeaseState.HELD)
    through.guard.finish(claim, 1)
    through.close()


def test_a_claim_cut_off_from_its_server_is_lost_by_its_own_clock_first(
    own: Site, proxy: Proxy
) -> None:
    # I9
    through = Through(proxy, own)
    claim = through.guard.begin("job", lease=0.9)
    proxy.stall()
    while True:
        moment = own.milliseconds()
        if claim.lost:
            break
        assert moment < int(own.job("job")["l"])
        seam.sleep(0.005)
    both.until(lambda: int(own.job("job")["l"]) <= own.milliseconds())
    assert (through.direct.begin("job")).outcome is BeginOutcome.RECLAIMED
    through.close()


# Killed workers


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_victim(private_server: RedisServer) -> Iterator[Start]:
    """Starts workers that are in their body when this returns; all are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(key: str, lease: float, on_lapse: str = "reclaim") -> subprocess.Popen[str]:
        module = "tests._sync.guard_victim"
        command = [sys.executable, "-m", module, private_server.url, key, str(lease), on_lapse]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# scenarios 67 and 77
def test_a_killed_workers_job_is_taken_over_after_its_lease_and_not_before(
    own: Site, start_victim: Start
) -> None:
    client = both.client_of(own)
    guard = IdempotencyGuard(client)
    victim = start_victim("job", 1.5)
    assert own.admin.pttl(own.keys.job("job")) > 3 * 3600 * 1000  # far longer than the lease
    victim.kill()
    victim.wait()
    refused = guard.begin("job")
    assert refused.outcome is BeginOutcome.IN_PROGRESS
    assert refused.holder is not None
    assert refused.holder.split("/")[1:] == [str(victim.pid), "victim"]
    assert refused.retry_after is not None
    assert 0 < refused.retry_after <= 1.5
    lapses = int(own.job("job")["l"])

    def body() -> str:
        assert own.milliseconds() >= lapses
        return "done by the second"

    assert guard.once("job", body, wait=10) == "done by the second"
    assert own.job("job")["n"] == b"2"
    both.close(client)


# scenario 77
def test_a_healthy_run_is_not_taken_over_however_long_it_takes(
    own: Site, start_victim: Start
) -> None:
    client = both.client_of(own)
    guard = IdempotencyGuard(client)
    start_victim("job", 0.9)
    with pytest.raises(IdempotencyInProgress):
        guard.once("job", int, wait=1.8)
    assert own.job("job")["n"] == b"1"
    both.close(client)


# scenario 70
def test_a_killed_workers_job_that_blocks_is_started_by_nobody_until_somebody_answers(
    own: Site, start_victim: Start
) -> None:
    client = both.client_of(own)
    guard = IdempotencyGuard(client)
    for key in ("paid", "unpaid"):
        victim = start_victim(key, 60, "block")
        victim.kill()
        victim.wait()
        with pytest.raises(IdempotencyInProgress):
            guard.once(key, int, wait=0)
        own.lapse(key)
        with pytest.raises(IdempotencyOutcomeUnknown) as unknown:
            guard.once(key, int)
        assert unknown.value.key == key
        assert unknown.value.holder is not None
        assert unknown.value.holder.endswith("/victim")
    guard.resolve("paid", 990)
    assert guard.once("paid", int) == 990
    guard.clear("unpaid")
    assert guard.once("unpaid", int) == 0
    both.close(client)
