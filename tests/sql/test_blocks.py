"""What becomes of a block's transaction when a block, or its body, is not used as it should be."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencekit import FencedOutError, IdempotencyConflict, JsonCodec
from fencekit.sql import apply_once, fenced_transaction, metadata, operation
from tests.sql.site import JOBS, KINDS, Job, Place, done
from tests.sql.test_operations import FENCES, OPERATIONS, POSTGRES, ids, inside, token, write

AWAITED = ["psycopg-async", "psycopg-async-session", "asyncpg", "asyncpg-session"]

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = [kind for kind in KINDS if "session" in kind]
BLOCKS: list[Any] = [
    lambda given: fenced_transaction(given, token(5)),
    lambda given: operation(given, "pay:7"),
    lambda given: operation(given, "pay:7", token(5)),
]


async def end_savepoint(given: Any, how: str) -> None:
    """Roll back or commit the innermost savepoint."""

    def work(plain: Any) -> None:
        getattr(plain.get_nested_transaction(), how)()

    # An AsyncSession of the oldest SQLAlchemy cannot give its savepoint.
    await given.run_sync(work) if hasattr(given, "run_sync") else work(given)


# A block is entered once


@pytest.mark.asyncio
@pytest.mark.parametrize("make", BLOCKS)
async def test_a_block_that_was_used_is_refused_before_anything_is_sent(
    place: Place, make: Any
) -> None:
    async with place.idle() as given:
        block = make(given)
        async with inside(block):
            await write(given, 1)
        sent = place.sent()
        with pytest.raises(RuntimeError, match="entered before"):
            async with inside(block):
                raise AssertionError("the body ran")
        assert sent == []
        assert not given.in_transaction()
    assert await ids(place) == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("make", BLOCKS)
async def test_a_block_that_failed_is_refused_and_leaves_a_joined_transaction_open(
    place: Place, make: Any
) -> None:
    async with place.open() as given:
        block = make(given)
        with pytest.raises(ZeroDivisionError):
            async with inside(block):
                raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="entered before"):
            async with inside(block):
                raise AssertionError("the body ran")
        await write(given, 1)
    assert await ids(place) == [1]


@pytest.mark.asyncio
async def test_an_operation_says_nothing_before_it_was_asked(place: Place) -> None:
    async with place.idle() as given:
        async with inside(operation(given, "pay 7")):
            pass
        later: Any = operation(given, "pay 7")
        with pytest.raises(RuntimeError, match=r"'pay 7'.*enter the block first"):
            _ = later.first
        with pytest.raises(RuntimeError, match="enter the block first"):
            _ = later.result
        with pytest.raises(RuntimeError, match="enter the block first"):
            later.result = 1
        async with inside(later):
            assert not later.first


# The transaction is ended inside


@pytest.mark.asyncio
@pytest.mark.parametrize("make", BLOCKS)
@pytest.mark.parametrize("how", ["commit", "rollback"])
@pytest.mark.parametrize("joined", [False, True])
async def test_a_body_that_ends_the_transaction_is_told(
    place: Place, make: Any, how: str, joined: bool
) -> None:
    async with place.idle() as given:
        if joined:
            await write(given, 1)
        with pytest.raises(RuntimeError, match="ended inside"):
            async with inside(make(given)):
                await done(getattr(given, how)())
        assert not given.in_transaction()
        with pytest.raises(ZeroDivisionError):  # whatever the body says itself comes first
            async with inside(make(given)):
                await done(getattr(given, how)())
                raise ZeroDivisionError
        await write(given, 2)
        await done(given.commit())
    assert await ids(place) == ([1, 2] if joined and how == "commit" else [2])


@pytest.mark.asyncio
async def test_a_block_may_leave_a_savepoint_of_its_body_open_if_it_needs_none(
    place: Place,
) -> None:
    async with place.open() as given, inside(fenced_transaction(given, token(5))):
        await write(given, 1)
        await done(given.begin_nested())
        await write(given, 2)
    assert await ids(place) == [1, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
@pytest.mark.parametrize("make", BLOCKS)
async def test_a_flush_that_failed_unnoticed_ends_the_block_too(place: Place, make: Any) -> None:
    await place.fill(JOBS, {"id": 1})
    async with place.idle() as given:
        with pytest.raises(RuntimeError, match="a flush that failed"):
            async with inside(make(given)):
                await write(given, 2)
                given.add(Job(id=1))
                with suppress(IntegrityError):
                    await done(given.flush())
        assert not given.in_transaction()
    assert await ids(place) == [1]
    assert await place.rows(OPERATIONS) == await place.rows(FENCES) == []


@pytest.mark.parametrize("make", BLOCKS)
def test_a_session_that_is_removed_inside_is_told(make: Any) -> None:
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    given: Any = scoped_session(sessionmaker(engine))
    with pytest.raises(RuntimeError, match="ended inside"), make(given):
        given.remove()
    given.remove()
    engine.dispose()


# The operation's savepoint is ended inside


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["rollback", "commit"])
@pytest.mark.parametrize("raises", [True, False])
async def test_a_key_is_not_done_if_the_body_ended_the_savepoint(
    place: Place, how: str, raises: bool
) -> None:
    told = "by zero" if raises else "ended inside"
    async with place.open() as given:
        await write(given, 1)
        with pytest.raises(ZeroDivisionError if raises else RuntimeError, match=told):
            async with inside(operation(given, "pay:7")):
                await write(given, 2)
                await end_savepoint(given, how)
                if raises:
                    raise ZeroDivisionError("by zero")
        await write(given, 3)
    # What was released is the caller's to roll back: the error told.
    assert await ids(place) == ([1, 3] if how == "rollback" else [1, 2, 3])
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("raises", [True, False])
async def test_a_savepoint_that_the_body_left_open_goes_with_the_rest(
    place: Place, raises: bool
) -> None:
    told = "by zero" if raises else "still open"
    async with place.open() as given:
        await write(given, 1)
        with pytest.raises(ZeroDivisionError if raises else RuntimeError, match=told):
            async with inside(operation(given, "pay:7")):
                await write(given, 2)
                for number in (3, 4):
                    await done(given.begin_nested())
                    await write(given, number)
                if raises:
                    raise ZeroDivisionError("by zero")
        assert not given.in_nested_transaction()
        await write(given, 5)
    assert await ids(place) == [1, 5]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["rollback", "commit"])
async def test_a_key_is_not_done_if_the_body_ended_the_callers_savepoint(
    place: Place, how: str
) -> None:
    async with place.open() as given:
        await write(given, 1)
        callers = await done(given.begin_nested())
        with pytest.raises(RuntimeError, match="ended inside"):
            async with inside(operation(given, "pay:7")):
                await end_savepoint(given, "rollback")
                await done(getattr(callers, how)())
        await write(given, 2)
    assert await ids(place) == [1, 2]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
async def test_an_operation_in_the_callers_savepoint_gives_back_no_more_than_its_own(
    place: Place,
) -> None:
    async with place.open() as given:
        await write(given, 1)
        callers = await done(given.begin_nested())
        await write(given, 2)
        with pytest.raises(ZeroDivisionError):
            async with inside(operation(given, "pay:7")):
                await write(given, 3)
                raise ZeroDivisionError
        await done(callers.commit())
    assert await ids(place) == [1, 2]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
async def test_what_cannot_be_taken_back_takes_the_whole_transaction_along(place: Place) -> None:
    async with place.idle() as given:
        await write(given, 1)
        name = "sa_savepoint_1"  # as SQLAlchemy calls its first
        with pytest.raises(DBAPIError, match=name):
            async with inside(operation(given, "pay:7")):
                await write(given, 2)
                await done(given.execute(text(f"RELEASE SAVEPOINT {name}")))
                raise ZeroDivisionError
        assert not given.in_transaction()
        await done(given.commit())
    assert await ids(place) == []
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("place", AWAITED, indirect=True)
async def test_a_block_that_joined_passes_a_cancellation_on(place: Place) -> None:
    async def body(given: Any) -> None:
        async with operation(given, "pay:7"):
            await given.execute(text("SELECT pg_sleep(30)"))

    async with place.idle() as given:
        await write(given, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(body(given), 0.2)
    assert await ids(place) == []
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("place", [kind for kind in KINDS if "psycopg" in kind], indirect=True)
async def test_a_block_that_joined_passes_the_loss_of_the_connection_on(place: Place) -> None:
    async with place.idle() as given, place.open(plain=True) as other:
        await write(given, 1)
        pid = (await done(given.execute(text("SELECT pg_backend_pid()")))).scalar()
        with pytest.raises(OperationalError):
            async with inside(operation(given, "pay:7")):
                await done(other.execute(text(f"SELECT pg_terminate_backend({pid})")))
                await done(given.execute(text("SELECT 1")))
        await done(given.rollback())
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
async def test_a_key_is_not_done_if_no_savepoint_can_be_set(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise asyncio.CancelledError  # as when a task is cancelled there

    kind: Any = Session if place.session else Connection
    async with place.open() as given:
        await write(given, 1)
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(kind, "begin_nested", fail)
            async with inside(operation(given, "pay:7")):
                raise AssertionError("the body ran")
        await write(given, 2)
    assert await ids(place) == [1, 2]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_a_session_goes_on_after_a_flush_that_failed_in_the_body(place: Place) -> None:
    await place.fill(JOBS, {"id": 1})
    async with place.open() as given:
        await write(given, 2)
        with pytest.raises(IntegrityError):
            async with inside(operation(given, "pay:7")):
                given.add(Job(id=1))
                await done(given.flush())
        await write(given, 3)
    assert await ids(place) == [1, 2, 3]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_what_the_caller_had_pending_fails_in_the_callers_savepoint(place: Place) -> None:
    await place.fill(JOBS, {"id": 1})
    async with place.open() as given:
        await write(given, 2)
        callers = await done(given.begin_nested())
        given.add(Job(id=1))
        with pytest.raises(IntegrityError):
            async with inside(operation(given, "pay:7")):
                raise AssertionError("the body ran")
        await done(callers.rollback())
        await write(given, 3)
    assert await ids(place) == [1, 2, 3]
    assert await place.rows(OPERATIONS) == []


# What a session has pending


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
@pytest.mark.parametrize("make", [*BLOCKS, None])
async def test_the_fence_and_the_key_come_before_what_is_pending(place: Place, make: Any) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"})
    async with place.open() as given:
        job = await done(given.get(Job, 1))
        job.state = "pending"
        sent = place.sent()
        if make is None:
            await done(apply_once(given, "pay:7", token(5)))
        else:
            async with inside(make(given)):
                pass
    kinds = [
        "own" if "fencekit_" in line else "pending"
        for line in sent
        if "fencekit_" in line or "jobs" in line
    ]
    own = kinds.index("pending")
    assert own == (2 if make in (BLOCKS[2], None) else 1)  # a fence, a key, or both
    assert kinds.count("pending") == 1
    assert [row[1] for row in await place.rows()] == ["pending"]


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_who_is_refused_has_sent_nothing_of_what_is_pending(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"})
    await place.fill(FENCES, {"kind": "lock", "resource": "a", "token": 9})
    async with place.idle() as given:
        job = await done(given.get(Job, 1))
        job.state = "stale"
        sent = place.sent()
        with pytest.raises(FencedOutError):
            async with inside(fenced_transaction(given, token(5))):
                raise AssertionError("the body ran")
        with pytest.raises(FencedOutError):
            await done(apply_once(given, "pay:7", token(5)))
        assert not [line for line in sent if "jobs" in line]
        await done(given.rollback())


@pytest.mark.parametrize("place", ["psycopg-session"], indirect=True)
def test_two_holders_with_pending_changes_do_not_block_each_other_for_good(place: Place) -> None:
    asyncio.run(place.fill(JOBS, {"id": 1}))
    engine: Any = place.engine
    entered: list[int] = []

    def newer() -> None:
        with Session(engine) as session, session.begin():
            job: Any = session.get(Job, 1)
            job.state = "newer"
            with fenced_transaction(session, token(11)):
                entered.append(11)

    other = threading.Thread(target=newer)
    with engine.begin() as connection:
        with fenced_transaction(connection, token(10)):
            other.start()
            with engine.connect() as watcher:
                while not watcher.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")):
                    watcher.rollback()
            connection.execute(update(JOBS).values(state="older"))
        assert entered == []
    other.join(20)
    assert entered == [11]
    assert asyncio.run(place.rows())[0][1] == "newer"


# Sessions with several databases


@pytest.fixture
def two(tmp_path: Path) -> Any:
    engines = [create_engine(f"sqlite:///{tmp_path / name}") for name in ("a.db", "b.db")]
    for engine in engines:
        for tables in (JOBS.metadata, metadata):
            tables.create_all(engine)
    yield engines
    for engine in engines:
        engine.dispose()


def test_a_fence_goes_where_the_sessions_bind_for_its_table_says(two: Any) -> None:
    main, other = two
    with (
        Session(main, binds={FENCES: other, OPERATIONS: other, JOBS: other}) as session,
        operation(session, "pay:7", token(5)),
        fenced_transaction(session, token(6)),
    ):
        session.execute(insert(JOBS).values(id=1))
    for table in (FENCES, OPERATIONS, JOBS):
        with main.connect() as here, other.connect() as there:
            assert len(here.execute(select(table)).all()) == 0
            assert len(there.execute(select(table)).all()) == 1


def test_a_fence_and_a_key_in_two_databases_are_refused(two: Any) -> None:
    main, other = two
    sent: list[str] = []
    for engine in two:
        event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with Session(main, binds={FENCES: other}) as session:
        with pytest.raises(ValueError, match="two databases"):
            apply_once(session, "pay:7", token(5))
        with (
            pytest.raises(ValueError, match="two databases"),
            operation(session, "pay:7", token(5)),
        ):
            raise AssertionError("the body ran")
        assert sent == []
        assert apply_once(session, "pay:7").first


# What cannot be meant


class Encodes:
    """A codec that makes what is no bytes."""

    def encode(self, value: Any) -> Any:
        return str(value)

    def decode(self, data: bytes) -> Any:
        raise AssertionError


@pytest.mark.asyncio
async def test_what_cannot_be_meant_is_refused_before_anything_is_sent(place: Place) -> None:
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "fences_table", lambda c: fenced_transaction(c, token(5), table="fences")),
        (TypeError, "fences_table", lambda c: fenced_transaction(c, token(5), table=None)),
        (ValueError, "sequence", lambda c: fenced_transaction(c, token(5), table=OPERATIONS)),
        (ValueError, "no column key", lambda c: operation(c, "a", table=FENCES)),
        (ValueError, "fences_table", lambda c: operation(c, "a", fences=JOBS)),
        (ValueError, "operations_table", lambda c: apply_once(c, "a", table=JOBS)),
        (TypeError, "fences_table", lambda c: apply_once(c, "a", fences="fences")),
        (TypeError, "encode and decode", lambda c: operation(c, "a", codec=object())),
        (TypeError, "encode and decode", lambda c: operation(c, "a", codec=0)),
        (TypeError, "encode and decode", lambda c: apply_once(c, "a", codec=object())),
        (TypeError, r"JsonCodec\(\)", lambda c: operation(c, "a", codec=JsonCodec)),
        (TypeError, "bytes, not str", lambda c: apply_once(c, "a", result=1, codec=Encodes())),
        (ValueError, "NUL", lambda c: operation(c, "a", fingerprint="a\0b")),
        (ValueError, "surrogate", lambda c: operation(c, "a", fingerprint="\ud800")),
        (TypeError, "fingerprint", lambda c: operation(c, "a", fingerprint=7)),
        (TypeError, "token", lambda c: operation(c, "a", 7)),
        (TypeError, "key", lambda c: operation(c, b"a")),
    ]
    async with place.idle() as given:
        sent = place.sent()
        for kind, why, use in wrong:
            with pytest.raises(kind, match=why):
                use(given)
        assert sent == []
        assert not given.in_transaction()


@pytest.mark.asyncio
async def test_a_conflict_and_other_errors_name_the_callers_own_key(place: Place) -> None:
    async with place.open() as given:
        await done(apply_once(given, "pay 7", fingerprint="x"))
        for make in (apply_once, operation):
            with pytest.raises(IdempotencyConflict, match="'pay 7'") as conflict:
                made = make(given, "pay 7", fingerprint="y")
                if make is apply_once:
                    await done(made)
                else:
                    async with inside(made):
                        raise AssertionError("the body ran")
            assert conflict.value.key == "pay 7"
        async with inside(operation(given, "pay 7")) as pay:
            with pytest.raises(RuntimeError, match="'pay 7'"):
                pay.result = 1


@pytest.mark.asyncio
async def test_one_fingerprint_alone_is_not_compared(place: Place) -> None:
    async with place.open() as given:
        await done(apply_once(given, "without"))
        for mark in ("x", "y"):
            assert not (await done(apply_once(given, "without", fingerprint=mark))).first
        await done(apply_once(given, "with", fingerprint="x"))
        assert not (await done(apply_once(given, "with"))).first


@pytest.mark.asyncio
@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_a_fence_that_can_neither_be_written_nor_read_is_told(place: Place) -> None:
    async with place.idle() as given:
        for statement in (
            "CREATE OR REPLACE FUNCTION no_fence() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER no_fence BEFORE INSERT ON fencekit_fences "
            "FOR EACH ROW EXECUTE FUNCTION no_fence()",
        ):
            await done(given.execute(text(statement)))
        with pytest.raises(RuntimeError, match=r"'a'.*fencekit_fences.*trigger"):
            async with inside(fenced_transaction(given, token(5))):
                raise AssertionError("the body ran")
        await done(given.rollback())
