"""Whole runs: as a block, as a call, and as a decorated function."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from fencekit import (
    AsyncFenceGate,
    AsyncGuard,
    AsyncLock,
    CanonicalizeError,
    ForeignValue,
    IdempotencyAbandoned,
    IdempotencyAlreadyDone,
    IdempotencyConflict,
    IdempotencyFailed,
    IdempotencyInProgress,
    IdempotencyNotOwned,
    IdempotencyOutcomeUnknown,
    IdempotencyReentered,
    LeaseLost,
    LeaseState,
    LockNotAcquired,
    LockReentered,
    ResultTooLarge,
)
from fencekit._seam import aio as seam
from fencekit.events import Begun, Event, Failed, Finished, Replayed
from tests import aio as both
from tests.site import Site

pytestmark = pytest.mark.asyncio


class Body:
    """Something to do once: counts its runs, and returns or raises what it is told."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.runs = 0
        self.result = result
        self.error = error

    async def __call__(self, *args: Any) -> Any:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return args or self.result


class Held:
    """A body that goes on until it is let go."""

    def __init__(self, result: Any = None) -> None:
        self.runs = 0
        self.result = result
        self._end = seam.Event()

    async def __call__(self) -> Any:
        self.runs += 1
        assert await self._end.wait(20)
        return self.result

    def let_go(self) -> None:
        self._end.set()


def waiting(guard: AsyncGuard, key: str) -> int:
    """How many callers of this process wait for the job."""
    channel = guard._claiming.backends.keys.done_channel(key)
    queue = guard._claiming.backends.get().room._queues.get(channel)
    return 0 if queue is None else len(queue.places)


# As a block


async def test_a_block_is_entered_once_and_its_result_remembered(
    guard: AsyncGuard, gate: AsyncFenceGate, site: Site
) -> None:
    async with guard.run("job", ttl=60) as job:
        assert (job.key, job.attempts) == ("job", 1)
        assert job.state is LeaseState.HELD
        job.check()
        await gate.set_if_fresh(job.token, gate.key("job", "status"), "running")
        job.result = {"pages": 3}
    assert await guard.get_result("job") == {"pages": 3}
    with pytest.raises(IdempotencyAlreadyDone) as done:
        async with guard.run("job"):
            pytest.fail("entered twice")
    assert (done.value.key, done.value.has_result, done.value.result) == ("job", True, {"pages": 3})


async def test_a_block_without_a_result_is_done_without_one(guard: AsyncGuard) -> None:
    async with guard.run("job"):
        pass
    assert await guard.status("job") == "done"
    with pytest.raises(IdempotencyAlreadyDone) as done:
        async with guard.run("job"):
            pytest.fail("entered twice")
    assert not done.value.has_result


async def test_a_memo_lives_for_its_ttl_from_the_end_of_the_run(
    guard: AsyncGuard, site: Site
) -> None:
    async with guard.run("job", ttl=50):
        site.admin.pexpire(site.keys.job("job"), 5000)  # as if most of it had gone by
    assert 40_000 < site.admin.pttl(site.keys.job("job")) <= 50_000


async def test_a_running_block_keeps_others_out(guard: AsyncGuard, client: Any) -> None:
    async with guard.run("job"):
        with pytest.raises(IdempotencyInProgress) as busy:
            async with AsyncGuard(client).run("job"):
                pytest.fail("two at once")
    assert busy.value.holder is not None
    assert busy.value.holder.endswith(guard.owner_id)
    assert busy.value.retry_after is not None
    assert 0 < busy.value.retry_after <= 30


async def test_a_run_is_entered_once(guard: AsyncGuard) -> None:
    run = guard.run("job")
    async with run:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        async with run:
            pytest.fail("entered twice")


async def test_a_block_holds_its_lock_until_it_ends(guard: AsyncGuard, lock: AsyncLock) -> None:
    async with guard.run("job", lock="r") as job:
        assert job.token.resource == "r"
        assert await lock.inspect("r") is not None
        with pytest.raises(LockNotAcquired):
            async with guard.run("other", lock="r"):
                pytest.fail("two holders")
    assert await lock.inspect("r") is None
    with pytest.raises(KeyError):
        async with guard.run("third", lock="r"):
            raise KeyError
    assert await lock.inspect("r") is None


class Stop(BaseException):
    """Neither a success nor an ordinary failure."""


@pytest.mark.parametrize("error", [ValueError("no"), Stop()], ids=repr)
async def test_an_exception_passes_and_frees_the_job(
    guard: AsyncGuard, events: list[Event], error: BaseException
) -> None:
    async def body() -> None:
        async with guard.run("job") as job:
            job.result = "not remembered"
            raise error

    with pytest.raises(type(error)) as raised:
        await body()
    assert raised.value is error
    assert isinstance(events[-1], Failed)
    assert not events[-1].remembered
    async with guard.run("job") as job:
        assert job.attempts == 2


class Unspeakable(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize("remember", [(), (Unspeakable,)], ids=["freed", "remembered"])
async def test_an_exception_that_cannot_be_shown_passes_all_the_same(
    guard: AsyncGuard, remember: Any
) -> None:
    error = Unspeakable()
    raised: BaseException | None = None
    try:
        async with guard.run("job", remember=remember):
            raise error
    except BaseException as found:
        raised = found
    assert raised is error
    assert await guard.status("job") == ("failed" if remember else None)


# scenario 73
async def test_a_run_that_was_overtaken_is_told_the_newer_result(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    other = AsyncGuard(client)

    async def body() -> str:
        site.lapse("job")
        assert await other.once("job", Body("R2")) == "R2"
        return "R1"

    with pytest.raises(IdempotencyNotOwned) as refused:
        await guard.once("job", body)
    assert refused.value.has_result
    assert refused.value.result == "R2"
    assert await guard.get_result("job") == "R2"


async def test_a_body_is_told_when_its_claim_is_lost(guard: AsyncGuard, site: Site) -> None:
    async def body() -> None:
        async with guard.run("job", lease=0.9) as job:
            site.flush()
            while True:
                await seam.sleep(0.01)
                job.check()

    with pytest.raises(LeaseLost) as lost:
        await body()
    assert lost.value.resource == "job"
    assert lost.value.reason is not None
    assert "no such claim" in lost.value.reason
    assert site.all_keys() == []


async def test_a_hung_body_is_given_up_after_max_hold(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    taker = AsyncGuard(client)

    async def body() -> None:
        async with guard.run("job", lease=0.6, max_hold=0.1) as job:
            while True:
                await seam.sleep(0.01)
                job.check()

    with pytest.raises(LeaseLost, match="deadline passed"):
        await body()
    assert await taker.once("job", Body("second"), wait=10) == "second"


async def test_a_late_run_that_nobody_overtook_counts(guard: AsyncGuard) -> None:
    # I5: by owner and token, never by time
    async with guard.run("job", lease=0.4, max_hold=0.1) as job:
        time.sleep(0.5)
        job.result = "late"
    assert await guard.get_result("job") == "late"


# As a call


async def test_a_call_runs_once_and_returns_what_it_returned(
    guard: AsyncGuard, client: Any, events: list[Event]
) -> None:
    body = Body()
    assert await guard.once("job", body, 1, "two", ttl=60) == (1, "two")
    assert await guard.once("job", body, 3) == [1, "two"]  # JSON has no tuples
    assert await AsyncGuard(client).once("job", Body("other")) == [1, "two"]
    assert body.runs == 1
    assert [type(event) for event in events] == [Begun, Finished, Replayed]


async def test_a_plain_function_is_called_as_well(guard: AsyncGuard) -> None:
    assert await guard.once("job", max, 3, 4) == 4
    assert await guard.once("job", min, 3, 4) == 4


# scenario 74
@pytest.mark.parametrize("result", [None, False, 0, "", [], b""], ids=repr)
async def test_a_call_that_returns_nothing_much_runs_once(guard: AsyncGuard, result: Any) -> None:
    body = Body(result)
    for _ in range(2):
        found = await guard.once("job", body)
        assert found == result
        assert type(found) is type(result)
    assert body.runs == 1


# scenario 68
async def test_an_overlapping_call_waits_for_the_first_with_default_settings(
    guard: AsyncGuard, client: Any
) -> None:
    first, second = Held("first"), Body("second")
    other = AsyncGuard(client)
    running = both.Running(partial(guard.once, "job", first))
    await both.until(lambda: first.runs)
    waiter = both.Running(partial(other.once, "job", second))
    await both.until(lambda: waiting(other, "job"))
    assert not waiter.done
    first.let_go()
    assert await running.result() == "first"
    assert await waiter.result() == "first"
    assert second.runs == 0


async def test_the_end_of_a_run_wakes_everybody_who_waits_for_it(
    guard: AsyncGuard, client: Any
) -> None:
    body, never = Held(["done"]), Body()
    others = [AsyncGuard(client) for _ in range(6)]
    running = both.Running(partial(guard.once, "job", body, lease=600))
    await both.until(lambda: body.runs)
    waiters = [both.Running(partial(other.once, "job", never)) for other in others]
    await both.until(lambda: waiting(guard, "job") == 6)
    body.let_go()
    assert await running.result() == ["done"]
    assert [await waiter.result(10) for waiter in waiters] == [["done"]] * 6
    assert never.runs == 0
    await both.until(lambda: waiting(guard, "job") == 0)


async def test_when_a_run_fails_one_of_the_waiters_runs_it_and_the_rest_wait_on(
    guard: AsyncGuard, client: Any
) -> None:
    first, second = Held(), Body("second")
    running = both.Running(partial(guard.once, "job", _failing(first), lease=600))
    await both.until(lambda: first.runs)
    others = [AsyncGuard(client) for _ in range(4)]
    waiters = [both.Running(partial(other.once, "job", second)) for other in others]
    await both.until(lambda: waiting(guard, "job") == 4)
    first.let_go()
    with pytest.raises(ValueError, match="after all"):
        await running.result()
    assert [await waiter.result(10) for waiter in waiters] == ["second"] * 4
    assert second.runs == 1


def _failing(body: Held) -> Any:
    async def fail() -> None:
        await body()
        raise ValueError("not, after all")

    return fail


@pytest.mark.parametrize("wait", [0, 0.1])
async def test_a_caller_waits_no_longer_than_it_said(
    guard: AsyncGuard, client: Any, wait: float
) -> None:
    body = Held()
    running = both.Running(partial(guard.once, "job", body))
    await both.until(lambda: body.runs)
    with pytest.raises(IdempotencyInProgress) as busy:
        await AsyncGuard(client).once("job", Body(), wait=wait)
    assert busy.value.retry_after is not None
    assert 0 < busy.value.retry_after <= 30
    body.let_go()
    await running.result()


async def test_a_caller_who_waits_takes_over_when_the_lease_runs_out(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    claim = await AsyncGuard(client, heartbeat=None).begin("job", lease=600)
    waiter = both.Running(partial(guard.once, "job", Body("second")))
    await both.until(lambda: waiting(guard, "job"))
    assert not waiter.done
    site.lapse("job")
    # (A real lease would have been slept for; this one was moved, so somebody says so.)
    site.admin.publish(site.keys.done_channel("job"), "1")
    assert await waiter.result(10) == "second"
    with pytest.raises(IdempotencyNotOwned):
        await guard.finish(claim, "first")


async def test_a_call_waits_for_its_lock_too(guard: AsyncGuard, lock: AsyncLock) -> None:
    handle = await lock.acquire("r", ttl=600)
    with pytest.raises(LockNotAcquired) as busy:
        await guard.once("job", Body(), lock="r", wait=0.05)
    assert busy.value.resource == "r"
    assert await guard.status("job") is None
    body = Body("ran")
    waiter = both.Running(partial(guard.once, "job", body, lock="r"))
    await both.until(lambda: guard._claiming.backends.get().room._queues)
    assert not waiter.done
    await lock.release(handle)
    assert await waiter.result(10) == "ran"
    assert await lock.inspect("r") is None
    # Who is done needs no lock.
    await lock.acquire("r", ttl=600)
    assert await guard.once("job", body, lock="r", wait=0) == "ran"


async def test_a_call_with_another_fingerprint_is_a_conflict(guard: AsyncGuard) -> None:
    body = Body(1)
    assert await guard.once("job", body, fingerprint="one") == 1
    assert await guard.once("job", body, fingerprint="one") == 1
    with pytest.raises(IdempotencyConflict):
        await guard.once("job", body, fingerprint="two")
    assert body.runs == 1


async def test_a_call_that_keeps_failing_is_abandoned_after_its_last_attempt(
    guard: AsyncGuard,
) -> None:
    body = Body(error=ValueError("again"))
    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            await guard.once("job", body, max_attempts=3)
    with pytest.raises(IdempotencyAbandoned, match="3 times") as abandoned:
        await guard.once("job", body, max_attempts=3)
    assert abandoned.value.attempts == 3
    assert body.runs == 3


# scenario 70
async def test_a_call_whose_outcome_is_unknown_asks_somebody(
    guard: AsyncGuard, client: Any, site: Site
) -> None:
    await AsyncGuard(client, label="dead").begin("job", on_lapse="block")
    site.lapse("job")
    body = Body("again")
    for _ in range(2):
        with pytest.raises(IdempotencyOutcomeUnknown, match="resolve") as unknown:
            await guard.once("job", body)
        assert unknown.value.holder is not None
        assert unknown.value.holder.endswith("/dead")
    with pytest.raises(IdempotencyOutcomeUnknown):
        async with guard.run("job"):
            pytest.fail("started again")
    await guard.resolve("job", "it happened")
    assert await guard.once("job", body) == "it happened"
    assert body.runs == 0


# Results that cannot be remembered: the work is done, and not done again


async def test_a_result_that_is_too_large_is_reported_and_the_work_not_repeated(
    client: Any,
) -> None:
    guard = AsyncGuard(client, max_result=10)
    body = Body("x" * 9)
    with pytest.raises(ResultTooLarge) as large:
        await guard.once("job", body)
    assert (large.value.size, large.value.limit) == (11, 10)
    assert await guard.status("job") == "done"
    with pytest.raises(IdempotencyAlreadyDone) as done:
        await guard.once("job", body)
    assert not done.value.has_result
    assert body.runs == 1


@pytest.mark.parametrize("result", [object(), math.nan, {1: 2}], ids=["object", "NaN", "int key"])
async def test_a_result_that_is_no_json_is_reported_and_the_work_not_repeated(
    guard: AsyncGuard, result: Any
) -> None:
    body = Body(result)
    with pytest.raises(CanonicalizeError, match="result"):
        await guard.once("job", body)
    with pytest.raises(IdempotencyAlreadyDone):
        await guard.once("job", body)
    with pytest.raises(CanonicalizeError):
        async with guard.run("block") as job:
            job.result = result
    assert await guard.status("block") == "done"
    assert body.runs == 1


class Shouting:
    """A codec that is not JSON."""

    def encode(self, value: Any) -> bytes:
        return str(value).upper().encode()

    def decode(self, data: bytes) -> Any:
        return data.decode()


class TextCodec(Shouting):
    """A codec that gives text where bytes are asked for."""

    def encode(self, value: Any) -> Any:
        return str(value)


async def test_another_codec_may_remember_results(client: Any, site: Site) -> None:
    guard = AsyncGuard(client, codec=Shouting())
    assert await guard.once("job", Body("hello")) == "hello"
    assert site.job("job")["r"] == b"HELLO"
    assert await guard.once("job", Body()) == "HELLO"
    assert await guard.get_result("job") == "HELLO"
    with pytest.raises(TypeError, match="encodes to bytes"):
        await AsyncGuard(client, codec=TextCodec()).once("other", Body("x"))
    assert await guard.status("other") == "done"


async def test_a_memo_of_another_codec_is_a_foreign_value_and_stays(client: Any) -> None:
    guard, other = AsyncGuard(client, codec=Shouting()), AsyncGuard(client)
    await guard.once("job", Body("hello"))
    for ask in (other.try_begin, other.begin, other.get_result):
        with pytest.raises(ForeignValue, match="'job'"):
            await ask("job")
    with pytest.raises(ForeignValue, match="'job'"):
        await other.once("job", Body("again"), remember=ValueError)
    with pytest.raises(IdempotencyNotOwned) as refused:
        await other.mark_done("job")
    assert not refused.value.has_result
    assert await guard.get_result("job") == "HELLO"


# Failures


# scenario 71
async def test_a_failure_frees_the_job_by_default_and_is_done_again(guard: AsyncGuard) -> None:
    body = Body(error=ValueError("declined"))
    for _ in range(2):
        with pytest.raises(ValueError, match="declined"):
            await guard.once("job", body)
    assert body.runs == 2


class Declined(Exception):
    """A failure of the application's own."""


class Verbose(Exception):
    """One whose message is not what it was made of."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


# scenario 71
@pytest.mark.parametrize(
    "error",
    [ValueError("declined"), Declined("card", 7), KeyError("who"), Declined(), OSError(2, "gone")],
    ids=repr,
)
async def test_a_remembered_failure_is_raised_again_as_it_was(
    guard: AsyncGuard, client: Any, error: Exception
) -> None:
    body = Body(error=error)
    once = partial(guard.once, "job", body, remember=(Declined, type(error)), ttl=60)
    for _ in range(3):
        with pytest.raises(type(error)) as raised:
            await once()
        assert type(raised.value) is type(error)
        assert raised.value.args == error.args
        assert str(raised.value) == str(error)
    assert body.runs == 1
    assert await guard.status("job") == "failed"


# scenario 71
async def test_only_listed_failures_are_remembered(guard: AsyncGuard, events: list[Event]) -> None:
    listed, other = Body(error=Declined("no")), Body(error=ValueError("no"))
    for _ in range(2):
        with pytest.raises(Declined):
            await guard.once("listed", listed, remember=(Declined,))
        with pytest.raises(ValueError, match="no"):
            await guard.once("other", other, remember=(Declined,))
    assert (listed.runs, other.runs) == (1, 2)
    told = [(event.subject, event.remembered) for event in events if isinstance(event, Failed)]
    assert told == [("listed", True), ("other", False), ("other", False)]


async def test_a_remembered_failure_of_a_type_that_was_not_named_comes_as_facts(
    guard: AsyncGuard,
) -> None:
    # A subclass of a listed type is remembered, but data never chooses code.
    body = Body(error=FileNotFoundError(2, "gone"))
    with pytest.raises(FileNotFoundError):
        await guard.once("job", body, remember=(OSError,))
    for remember in ((OSError,), (), (ValueError,)):
        with pytest.raises(IdempotencyFailed) as failed:
            await guard.once("job", body, remember=remember)
        assert failed.value.key == "job"
        assert failed.value.error_type == "builtins.FileNotFoundError"
        assert failed.value.error_message == "[Errno 2] gone"
    with pytest.raises(FileNotFoundError):
        await guard.once("job", body, remember=FileNotFoundError)
    assert body.runs == 1


async def test_a_failure_that_would_not_come_back_as_it_was_comes_as_facts(
    guard: AsyncGuard,
) -> None:
    body = Body(error=Verbose(5))
    with pytest.raises(Verbose, match=r"^code 5$"):
        await guard.once("job", body, remember=(Verbose,))
    with pytest.raises(IdempotencyFailed) as failed:
        await guard.once("job", body, remember=(Verbose,))
    assert failed.value.error_type.endswith("test_runs.Verbose")
    assert failed.value.error_message == "code 5"


async def test_a_block_that_failed_for_good_is_not_entered_again(guard: AsyncGuard) -> None:
    with pytest.raises(Declined):
        async with guard.run("job", remember=(Declined,), ttl=60):
            raise Declined("no")
    with pytest.raises(Declined, match="no"):
        async with guard.run("job", remember=(Declined,)):
            pytest.fail("entered again")
    with pytest.raises(IdempotencyFailed):
        async with guard.run("job"):
            pytest.fail("entered again")
    await guard.clear("job")
    async with guard.run("job"):
        pass


# Asking for oneself


async def test_a_job_that_calls_itself_is_told_at_once(guard: AsyncGuard, client: Any) -> None:
    async def body() -> Any:
        return await AsyncGuard(client).once("job", Body(), lease=600)

    with pytest.raises(IdempotencyReentered, match="wait for itself"):
        await guard.once("job", body, lease=600)
    assert await guard.status("job") is None

    async def block() -> None:
        async with guard.run("job"):
            pytest.fail("entered twice")

    with pytest.raises(IdempotencyInProgress):
        await guard.once("job", block, lease=600)


async def test_a_decorated_function_that_recurs_with_equal_arguments_is_told_at_once(
    guard: AsyncGuard,
) -> None:
    calls = []

    @guard.idempotent(key=lambda n: f"recur:{n}", lease=600)
    async def recur(n: int) -> int:
        calls.append(n)
        return 1 + await recur(n - 1 if n > 1 else n)

    with pytest.raises(IdempotencyReentered):
        await recur(3)
    assert calls == [3, 2, 1]


async def test_a_job_that_asks_for_a_lock_its_caller_holds_is_told_at_once(
    guard: AsyncGuard, lock: AsyncLock
) -> None:
    async def inner() -> Any:
        return await guard.once("inner", Body("in"), lock="r", lease=600)

    with pytest.raises(LockReentered, match="wait for itself"):
        await guard.once("outer", inner, lock="r", lease=600)
    async with lock.hold("r", ttl=600):
        with pytest.raises(LockReentered):
            await inner()
    assert await inner() == "in"


async def test_a_job_may_run_others(guard: AsyncGuard) -> None:
    async def outer() -> Any:
        return [await guard.once("inner", Body("in")), "out"]

    assert await guard.once("outer", outer) == ["in", "out"]
    assert await guard.get_result("inner") == "in"


# As a decorated function


class Shop:
    """Methods of every kind. Each call counts in `runs`."""

    runs = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def plain(self, order: int, gift: bool = False) -> list[Any]:
        Shop.runs += 1
        return [self.name, order, gift]

    async def method(self, order: int, gift: bool = False) -> list[Any]:
        Shop.runs += 1
        return [self.name, order, gift]


class Branch(Shop):
    """Inherits everything."""


@dataclass(frozen=True)
class Till:
    """Its value is its identity."""

    number: int


async def ship(order: int, gift: bool = False) -> list[Any]:
    """Ship it."""
    Shop.runs += 1
    return ["ship", order, gift]


def pack(order: int, gift: bool = False) -> list[Any]:
    """Pack it."""
    Shop.runs += 1
    return ["pack", order, gift]


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Shop.runs = 0


# scenario 76
@pytest.mark.parametrize("function", [ship, pack], ids=["coroutine function", "function"])
async def test_a_decorated_function_runs_once_for_equal_calls(
    guard: AsyncGuard, function: Any
) -> None:
    name = function.__name__
    guarded = guard.idempotent(ttl=60)(function)
    assert await guarded(1) == [name, 1, False]
    assert await guarded(order=1) == [name, 1, False]
    assert await guarded(1, gift=False) == [name, 1, False]
    assert Shop.runs == 1
    assert await guarded(2) == [name, 2, False]
    assert await guarded(1, True) == [name, 1, True]
    assert Shop.runs == 3
    assert guarded.__name__ == name
    assert guarded.__doc__ == function.__doc__
    assert guarded.__wrapped__ is function
    assert inspect.signature(guarded) == inspect.signature(function)
    assert inspect.iscoroutinefunction(guarded) == both.COROUTINES


# scenario 76
@pytest.mark.parametrize("name", ["plain", "method"])
async def test_a_decorated_method_knows_its_instance(guard: AsyncGuard, name: str) -> None:
    function = getattr(Shop, name)

    class Guarded(Shop):
        by_key = guard.idempotent(key=lambda self, order, gift=False: f"{self.name}:{order}")(
            function
        )
        by_arguments = guard.idempotent()(function)

    one, two = Guarded("one"), Guarded("two")
    for _ in range(2):
        assert await one.by_key(1) == ["one", 1, False]
        assert await two.by_key(1) == ["two", 1, False]
        assert await one.by_key(order=2, gift=True) == ["one", 2, True]
    assert Shop.runs == 3
    # Nothing says which instances are equal: that is found out before the body runs.
    with pytest.raises(CanonicalizeError, match="self"):
        await one.by_arguments(1)
    assert Shop.runs == 3


async def test_an_instance_with_a_value_needs_no_key(guard: AsyncGuard) -> None:
    @dataclass(frozen=True)
    class Guarded(Till):
        @guard.idempotent()
        async def open(self, cents: int) -> list[int]:
            Shop.runs += 1
            return [self.number, cents]

    for _ in range(2):
        assert await Guarded(1).open(5) == [1, 5]
        assert await Guarded(2).open(cents=5) == [2, 5]
    assert Shop.runs == 2


# scenario 76
async def test_a_decorated_classmethod_works_in_both_orders(guard: AsyncGuard) -> None:
    class Base:
        @guard.idempotent()
        @classmethod
        async def outside(cls, order: int) -> list[Any]:
            Shop.runs += 1
            return [cls.__name__, order]

        @classmethod
        @guard.idempotent()
        async def inside(cls, order: int) -> list[Any]:
            Shop.runs += 1
            return [cls.__name__, order]

    class Derived(Base):
        pass

    for name in ("outside", "inside"):
        Shop.runs = 0
        for _ in range(2):
            assert await getattr(Base, name)(1) == ["Base", 1]
            assert await getattr(Base(), name)(order=1) == ["Base", 1]
            assert await getattr(Derived, name)(1) == ["Derived", 1]
        assert Shop.runs == 2


# scenario 76
async def test_a_decorated_staticmethod_works_in_both_orders(guard: AsyncGuard) -> None:
    class Tools:
        @guard.idempotent()
        @staticmethod
        async def outside(order: int) -> int:
            Shop.runs += 1
            return order

        @staticmethod
        @guard.idempotent()
        async def inside(order: int) -> int:
            Shop.runs += 1
            return order

    for name in ("outside", "inside"):
        Shop.runs = 0
        for _ in range(2):
            assert await getattr(Tools, name)(1) == 1
            assert await getattr(Tools(), name)(order=1) == 1
        assert Shop.runs == 1


# scenario 76
@pytest.mark.parametrize("function", [ship, pack], ids=["coroutine function", "function"])
async def test_a_decorated_partial_is_the_call_that_it_makes(
    guard: AsyncGuard, function: Any
) -> None:
    name = function.__name__
    guarded = guard.idempotent()(partial(function, 1))
    assert await guarded() == [name, 1, False]
    assert await guarded(gift=True) == [name, 1, True]
    assert await guard.idempotent()(partial(function, 1, gift=True))() == [name, 1, True]
    assert await guard.idempotent()(function)(1) == [name, 1, False]
    assert Shop.runs == 2


# scenario 76
async def test_a_callable_object_and_a_bound_method_may_be_decorated(guard: AsyncGuard) -> None:
    body = Body("called")
    guarded = guard.idempotent(key=lambda *args: f"body:{args}")(body)
    assert await guarded() == "called"
    assert await guarded() == "called"
    assert await guarded(5) == (5,)
    assert body.runs == 2
    bound = guard.idempotent()(Shop("one").method)
    assert await bound(1) == ["one", 1, False]
    assert await bound(order=1) == ["one", 1, False]
    assert Shop.runs == 1


def lazy(order: int) -> Iterator[int]:
    yield order


async def stream(order: int) -> Any:
    yield order


class Lazy:
    """Generators of every other kind."""

    def method(self) -> Iterator[int]:
        yield 1

    async def stream(self) -> Any:
        yield 1

    def __call__(self) -> Iterator[int]:
        yield 1


# scenario 76
@pytest.mark.parametrize(
    "function",
    [
        lazy,
        stream,
        partial(lazy, 1),
        partial(stream, 1),
        Lazy().method,
        Lazy().stream,
        Lazy(),
        partial(Lazy()),
        classmethod(lazy),
        staticmethod(stream),
    ],
    ids=lambda function: type(function).__name__,
)
async def test_generators_are_refused_at_decoration(guard: AsyncGuard, function: Any) -> None:
    with pytest.raises(TypeError, match="cannot guard a generator"):
        guard.idempotent()(function)
    if not isinstance(function, (classmethod, staticmethod)):
        with pytest.raises(TypeError, match="cannot guard a generator"):
            await guard.once("job", function)


async def test_what_is_no_function_is_refused_at_decoration(guard: AsyncGuard) -> None:
    for thing in (None, "ship", 5, property(pack)):
        with pytest.raises(TypeError, match="guards a function"):
            guard.idempotent()(thing)


async def test_a_wrapper_is_taken_at_its_word_and_an_unfinished_result_refused(
    guard: AsyncGuard, site: Site
) -> None:
    @functools.wraps(lazy)
    def collect(order: int) -> list[int]:
        return list(lazy(order))

    @functools.wraps(lazy)
    def pass_on(order: int) -> Any:
        return lazy(order)

    assert await guard.idempotent()(collect)(1) == [1]
    guarded = guard.idempotent(key=str)(pass_on)
    with pytest.raises(TypeError, match="work still to be done"):
        await guarded(1)
    assert await guard.status("1") is None


# Keys of decorated functions


async def test_the_key_may_be_a_text_or_a_payload(guard: AsyncGuard, site: Site) -> None:
    by_text = guard.idempotent(key=lambda order, **_: f"ship:{order}")(ship)
    assert await by_text(1) == ["ship", 1, False]
    assert await by_text(1, gift=True) == ["ship", 1, False]
    assert await guard.status("ship:1") == "done"
    by_payload = guard.idempotent(key=lambda order: {"order": order}, namespace="ships")(ship)
    assert await by_payload(1) == ["ship", 1, False]
    assert await by_payload(1) == ["ship", 1, False]
    assert Shop.runs == 2
    assert [key for key in site.all_keys() if key.startswith(b"fencekit:{ships:")]
    with pytest.raises(CanonicalizeError):
        await guard.idempotent(key=lambda order: object())(ship)(1)
    with pytest.raises(ZeroDivisionError):
        await guard.idempotent(key=lambda order: 1 / 0)(ship)(1)
    assert Shop.runs == 2


async def test_equal_functions_of_different_names_do_not_share_a_record(guard: AsyncGuard) -> None:
    assert await guard.idempotent()(ship)(1) == ["ship", 1, False]
    assert await guard.idempotent()(pack)(1) == ["pack", 1, False]
    assert Shop.runs == 2
    with pytest.raises(ValueError, match="namespace"):
        await guard.idempotent()(lambda: 1)()
    assert await guard.idempotent(namespace="one")(lambda: 1)() == 1


# scenario 64
@pytest.mark.parametrize("chosen", [None, "", " \t\n"], ids=repr)
async def test_a_missing_key_is_an_error_or_no_guard_but_never_a_shared_record(
    guard: AsyncGuard, site: Site, chosen: Any
) -> None:
    guarded = guard.idempotent(key=lambda order: chosen)(ship)
    for order in (1, 2):
        with pytest.raises(ValueError, match="without a key would share one record"):
            await guarded(order)
    assert Shop.runs == 0
    unguarded = guard.idempotent(key=lambda order: chosen, on_missing_key="run")(ship)
    for order in (1, 2, 1):
        with pytest.warns(UserWarning, match="runs without a guard") as warned:
            assert await unguarded(order) == ["ship", order, False]
        assert warned[0].filename == __file__
    assert Shop.runs == 3
    assert site.all_keys() == []


# scenario 64
@pytest.mark.parametrize("payload", [{}, [], [None], 0], ids=repr)
async def test_a_payload_that_is_something_is_a_key(guard: AsyncGuard, payload: Any) -> None:
    guarded = guard.idempotent(key=lambda order: payload)(ship)
    assert await guarded(1) == ["ship", 1, False]
    assert await guarded(2) == ["ship", 1, False]


async def test_a_decorated_function_keeps_to_the_settings_it_was_given(
    guard: AsyncGuard, client: Any, site: Site, lock: AsyncLock
) -> None:
    body = Body(error=Declined("no"))
    guarded = guard.idempotent(
        key=str, ttl=50, lease=20, lock="r", max_attempts=2, remember=(Declined,), wait=0
    )(body)
    handle = await lock.acquire("r", ttl=30)
    with pytest.raises(LockNotAcquired):
        await guarded(1)
    await lock.release(handle)
    for _ in range(2):
        with pytest.raises(Declined):
            await guarded(1)
    assert body.runs == 1
    assert 40_000 < site.admin.pttl(site.keys.job("1")) <= 50_000
    held = Held(1)
    slow = guard.idempotent(key=lambda: "slow", wait=0)(held)
    running = both.Running(slow)
    await both.until(lambda: held.runs)
    with pytest.raises(IdempotencyInProgress):
        await slow()
    held.let_go()
    assert await running.result() == 1
