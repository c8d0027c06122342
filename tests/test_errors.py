"""Errors are certain, say what happened in a sentence, carry its facts, and survive pickling."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from redis.exceptions import RedisError

import fencekit
from fencekit import (
    CanonicalizeError,
    DistributedLock,
    Durability,
    DurabilityNotReached,
    FencedOutError,
    FenceGate,
    FenceKitError,
    FenceToken,
    ForeignValue,
    IdempotencyAbandoned,
    IdempotencyAlreadyDone,
    IdempotencyConflict,
    IdempotencyFailed,
    IdempotencyGuard,
    IdempotencyInProgress,
    IdempotencyNotOwned,
    IdempotencyOutcomeUnknown,
    IdempotencyReentered,
    IdempotencyResultMissing,
    LeaseLost,
    LockNotAcquired,
    LockNotOwned,
    LockReentered,
    ResultTooLarge,
    RowCountUnknown,
    RowExists,
    RowMissing,
    UnexpectedRows,
    fenced_update,
    idempotency_key,
)
from fencekit.sql import execute_fenced, fenced_insert
from fencekit.testing import RedisServer
from tests.sql.drivers import Silent, engine_of
from tests.sql.site import JOBS

FACTS: dict[type[FenceKitError], dict[str, Any]] = {
    LockNotAcquired: {"resource": "a", "holder": "host/1/me", "retry_after": 1.5},
    LockReentered: {"resource": "a"},
    LockNotOwned: {"resource": "a", "token": 7, "reason": "it lapsed"},
    LeaseLost: {"resource": "a", "token": 7, "reason": "it lapsed"},
    FencedOutError: {
        "resource": "a", "token": 41, "current": 42, "table": "jobs", "key": {"id": 7},
    },
    RowMissing: {"table": "jobs", "key": {"id": 7}, "token": 41, "written": 1},
    RowExists: {"table": "jobs", "key": {"id": 7}, "token": 41},
    UnexpectedRows: {"table": "jobs", "token": 41, "written": 2, "expected": 1},
    RowCountUnknown: {"table": "jobs", "token": 41},
    IdempotencyNotOwned: {
        "key": "k", "token": 7, "state": "done", "has_result": True, "result": {"paid": [990]},
    },
    IdempotencyResultMissing: {"key": "k", "state": "pending"},
    IdempotencyConflict: {"key": "k", "fingerprint": "f2", "known": "f1"},
    IdempotencyInProgress: {"key": "k", "holder": "host/1/me", "retry_after": 1.5},
    IdempotencyReentered: {"key": "k"},
    IdempotencyAlreadyDone: {"key": "k", "has_result": True, "result": None},
    IdempotencyFailed: {"key": "k", "error_type": "builtins.ValueError", "error_message": "no"},
    IdempotencyAbandoned: {"key": "k", "attempts": 3},
    IdempotencyOutcomeUnknown: {"key": "k", "holder": "host/1/me"},
    ResultTooLarge: {"key": "k", "size": 11, "limit": 10},
    ForeignValue: {"key": "fencekit:{a}:lock"},
    DurabilityNotReached: {"resource": "a", "wanted": 2, "reached": 1},
    CanonicalizeError: {"path": "payload['a'][0]"},
}  # fmt: skip


def every(kind: type[FenceKitError]) -> Iterator[type[FenceKitError]]:
    """The class and all that derive from it in the package."""
    if kind.__module__.startswith("fencekit."):
        yield kind
    for derived in kind.__subclasses__():
        yield from every(derived)


CORE = sorted(
    {kind for kind in every(FenceKitError) if kind.__module__ == "fencekit.errors"},
    key=lambda kind: kind.__name__,
)


def test_every_error_of_the_core_is_public_and_has_its_facts_here() -> None:
    assert {kind.__name__ for kind in CORE} <= set(fencekit.__all__)
    assert set(CORE) - {FenceKitError} == set(FACTS)
    for kind, facts in FACTS.items():
        own = {name for name in vars(kind) if not name.startswith("_")}
        assert own <= set(facts)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", CORE, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_unchanged(kind: type[FenceKitError], protocol: int) -> None:
    facts = FACTS.get(kind, {})
    error = kind("'a' is held: try again later", **facts)
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "'a' is held: try again later"
        assert twin.args == error.args
        assert vars(twin) == vars(error) == facts
        assert {name: getattr(twin, name) for name in facts} == facts


@pytest.mark.parametrize("kind", CORE, ids=lambda kind: kind.__name__)
def test_facts_that_were_not_given_have_a_default(kind: type[FenceKitError]) -> None:
    error = pickle.loads(pickle.dumps(kind("why")))
    for name in FACTS.get(kind, {}):
        assert getattr(error, name) in (None, "", 0, False)
    assert str(kind()) == ""


@pytest.mark.parametrize("kind", CORE, ids=lambda kind: kind.__name__)
def test_a_fact_that_the_class_does_not_declare_is_a_type_error(kind: type[FenceKitError]) -> None:
    for name in ("colour", "_private", "__dict__"):
        with pytest.raises(TypeError, match=kind.__name__):
            kind("why", **{name: 1})


def test_an_error_keeps_its_facts_in_another_process_and_with_notes() -> None:
    error = FencedOutError("refused", resource="a", token=41, current=42)
    if hasattr(error, "add_note"):
        error.add_note("while shipping order 7")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back = pool.apply(_raise_and_catch, (error,))
    assert type(back) is FencedOutError
    assert (str(back), vars(back)) == ("refused", vars(error))


def _raise_and_catch(error: FenceKitError) -> FenceKitError:
    try:
        raise error
    except FenceKitError as caught:
        return caught


def test_an_applications_own_error_may_derive_from_one_and_still_pickle() -> None:
    error = Busy(7)
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), twin.order, twin.resource) == (Busy, "order 7", 7, "o7")


class Busy(LockNotAcquired):
    order = 0

    def __init__(self, order: int) -> None:
        super().__init__(f"order {order}", resource=f"o{order}")
        self.order = order


def test_busy_lost_and_not_owned_are_told_apart_and_none_is_redis_own() -> None:
    # scenario 56
    for one in (LockNotAcquired, LeaseLost, LockNotOwned, FencedOutError, IdempotencyNotOwned):
        for other in (LockNotAcquired, LeaseLost, LockNotOwned, FencedOutError):
            assert one is other or not issubclass(one, other)
    for kind in CORE:
        assert issubclass(kind, FenceKitError)
        assert not issubclass(kind, (RedisError, OSError, TimeoutError, ValueError))


# The sentences, as they come from real calls


@pytest.fixture(scope="module")
def errors() -> dict[type[FenceKitError], FenceKitError]:
    """One of each, raised by a verb on a real server."""
    with RedisServer() as server, server.client() as client, ExitStack() as stack:
        return dict(_raised(client, stack))


def wait_for_oneself(lock: DistributedLock) -> None:
    with lock.hold("nested"):
        lock.acquire("nested", wait=1)


def _raised(client: Any, stack: ExitStack) -> Iterator[tuple[type[FenceKitError], FenceKitError]]:
    lock = DistributedLock(client)
    guard = IdempotencyGuard(client, max_result=10)
    gate = FenceGate(client)
    handle = lock.acquire("held", ttl=60)
    calls: dict[type[FenceKitError], Callable[[], Any]] = {
        LockNotAcquired: lambda: lock.acquire("held", ttl=60),
        LockReentered: lambda: wait_for_oneself(lock),
        LockNotOwned: lambda: (lock.release(gone), lock.release(gone)),
        LeaseLost: lambda: gone.check(),  # noqa: PLW0108 - bound later
        FencedOutError: lambda: gate.check(FenceToken(1, "held")),
        IdempotencyNotOwned: lambda: guard.mark_done("nobody's"),
        IdempotencyResultMissing: lambda: guard.get_result("nobody's"),
        IdempotencyConflict: lambda: guard.begin("running", fingerprint="f2"),
        IdempotencyInProgress: lambda: guard.run("running", fingerprint="f1").__enter__(),
        IdempotencyReentered: lambda: guard.once("running", dict, fingerprint="f1"),
        IdempotencyAlreadyDone: lambda: guard.run("done").__enter__(),
        IdempotencyFailed: lambda: guard.run("failed").__enter__(),
        IdempotencyAbandoned: lambda: guard.run("hopeless", max_attempts=1).__enter__(),
        IdempotencyOutcomeUnknown: lambda: guard.run("unknown").__enter__(),
        ResultTooLarge: lambda: guard.finish(claim, "x" * 10),
        ForeignValue: lambda: lock.acquire("foreign"),
        DurabilityNotReached: lambda: lock.acquire("d", durability=Durability(2, timeout=0.01)),
        CanonicalizeError: lambda: idempotency_key({"a": [object()]}, namespace="n"),
    }
    calls.update(_sql_calls(stack))
    gone = lock.acquire("gone", ttl=60)
    claim = guard.begin("running", lease=60, fingerprint="f1")
    guard.finish(guard.begin("done"), None)
    guard.fail(guard.begin("failed"), ValueError("no input"), retry=False)
    client.set("fencekit:{foreign}:lock", "x")
    for key, terms in (("hopeless", {}), ("unknown", {"on_lapse": "block"})):
        guard.begin(key, **terms)
        client.hset(f"fencekit:{{{key}}}:job", "l", "1")
    for kind, call in calls.items():
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        yield kind, caught.value
    lock.release(handle)


def _sql_calls(stack: ExitStack) -> dict[type[FenceKitError], Callable[[], Any]]:
    """Calls on databases in memory; one of them has a driver that cannot count."""
    engines = engine_of(), engine_of(Silent)
    for engine in engines:
        stack.callback(engine.dispose)
    connection, silent = (stack.enter_context(engine.connect()) for engine in engines)
    for each in (connection, silent):
        JOBS.create(each)
        each.execute(JOBS.insert(), [{"id": 1}, {"id": 2}])
    update = fenced_update(JOBS, 41, where=JOBS.c.id < 3, values={"state": "x"})
    missing = fenced_update(JOBS, 41, where=JOBS.c.id == 9, values={"state": "x"})
    return {
        RowMissing: lambda: execute_fenced(connection, missing),
        RowExists: lambda: execute_fenced(
            connection, fenced_insert(JOBS, 41, values={"id": 1, "state": "x"})
        ),
        UnexpectedRows: lambda: execute_fenced(connection, update, rows=1),
        RowCountUnknown: lambda: execute_fenced(silent, update),
    }


@pytest.mark.parametrize("kind", FACTS, ids=lambda kind: kind.__name__)
def test_a_message_is_one_sentence_that_names_what_it_is_about(
    kind: type[FenceKitError], errors: dict[type[FenceKitError], FenceKitError]
) -> None:
    error = errors[kind]
    message = str(error)
    assert 20 < len(message) < 300
    assert "\n" not in message
    assert not message.endswith(".")
    assert not re.search(r"\. [A-Z]", message)
    names = (getattr(error, name, "") for name in ("resource", "table", "key", "path"))
    assert next(filter(None, names)) in message
    for fact in ("token", "current", "size", "limit", "known", "wanted"):
        if getattr(error, fact, 0):
            assert str(getattr(error, fact)) in message
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize("kind", FACTS, ids=lambda kind: kind.__name__)
def test_a_raised_error_carries_its_main_facts(
    kind: type[FenceKitError], errors: dict[type[FenceKitError], FenceKitError]
) -> None:
    facts = vars(errors[kind])
    first = next(iter(FACTS[kind]))
    assert facts[first]
    assert set(facts) <= set(FACTS[kind]) | {"error_type", "error_message"}
