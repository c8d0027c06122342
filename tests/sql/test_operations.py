"""Transactions under a token, and effects that are applied once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from fencekit import CanonicalizeError, FencedOutError, FenceToken, IdempotencyConflict
from fencekit.sql import (
    apply_once,
    fenced_transaction,
    metadata,
    operation,
    purge_fences,
    purge_operations,
)
from tests.sql.site import JOBS, KINDS, Job, Place, done

pytestmark = pytest.mark.asyncio
POSTGRES = [kind for kind in KINDS if "sqlite" not in kind]
FENCES = metadata.tables["fencekit_fences"]
OPERATIONS = metadata.tables["fencekit_operations"]


@asynccontextmanager
async def inside(block: Any) -> Any:
    """Either kind of context manager."""
    if block._async:
        async with block as entered:
            yield entered
    else:
        with block as entered:
            yield entered


async def write(given: Any, number: int) -> None:
    await done(given.execute(insert(JOBS).values(id=number)))


async def ids(place: Place) -> list[int]:
    return [row[0] for row in await place.rows()]


def token(value: int, resource: str = "a", kind: str = "lock") -> FenceToken:
    return FenceToken(value, resource, kind)


# A transaction under a token


async def test_a_block_begins_and_ends_its_own_transaction(place: Place) -> None:
    async with place.idle() as given:
        async with inside(fenced_transaction(given, token(5))) as same:
            assert same is given
            await write(given, 1)
        assert not given.in_transaction()
        with pytest.raises(ZeroDivisionError):
            async with inside(fenced_transaction(given, token(6))):
                await write(given, 2)
                raise ZeroDivisionError
        assert not given.in_transaction()
        with pytest.raises(FencedOutError) as refused:
            async with inside(fenced_transaction(given, token(4))):
                raise AssertionError("the body ran")
        assert not given.in_transaction()
    assert await ids(place) == [1]
    assert (refused.value.token, refused.value.current, refused.value.resource) == (4, 5, "a")
    assert [row[:3] for row in await place.rows(FENCES)] == [("lock", "a", 5)]


async def test_a_block_in_an_open_transaction_leaves_its_end_to_whoever_began_it(
    place: Place,
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with place.open() as given:
            async with inside(fenced_transaction(given, token(5))):
                await write(given, 1)
            again = inside(fenced_transaction(given, token(5)))
            nested = inside(fenced_transaction(given, token(9, "b")))
            async with again, nested:
                await write(given, 2)
            assert given.in_transaction()
            raise ZeroDivisionError
    assert await ids(place) == []
    assert await place.rows(FENCES) == []


async def test_a_refusal_leaves_the_open_transaction_usable(place: Place) -> None:
    # scenario 88
    async with place.idle() as given, inside(fenced_transaction(given, token(5))):
        pass
    async with place.open() as given:
        with pytest.raises(FencedOutError):
            async with inside(fenced_transaction(given, token(4))):
                raise AssertionError("the body ran")
        await write(given, 1)
    assert await ids(place) == [1]


async def test_several_resources_are_taken_together(place: Place) -> None:
    async with place.idle() as given:
        both = [token(5, "b"), token(7, "a"), token(3, "a", "job"), token(5, "b")]
        async with inside(fenced_transaction(given, both)):
            pass
        with pytest.raises(FencedOutError) as refused:
            async with inside(fenced_transaction(given, [token(6, "b"), token(6, "a")])):
                raise AssertionError("the body ran")
    assert refused.value.resource == "a"
    known = [row[:3] for row in await place.rows(FENCES)]
    assert known == [("job", "a", 3), ("lock", "a", 7), ("lock", "b", 5)]


async def test_a_sequence_orders_the_writes_of_one_holder(place: Place) -> None:
    async def at(value: int, sequence: int | None) -> None:
        async with place.idle() as given:
            block = fenced_transaction(given, token(value), sequence=sequence)
            async with inside(block):
                pass

    await at(5, 2)
    await at(5, 3)
    for late in (3, 2):
        with pytest.raises(FencedOutError) as refused:
            await at(5, late)
        assert refused.value.current == 5
    await at(5, None)
    with pytest.raises(FencedOutError):  # what had no number has not changed the order
        await at(5, 3)
    await at(6, 1)
    with pytest.raises(FencedOutError):
        await at(5, 9)


async def test_names_that_a_database_would_not_take_are_stored_all_the_same(place: Place) -> None:
    for number, name in enumerate(("a\0b", "a b", "a%20b", "é" * 100, "'; DROP TABLE jobs; --")):
        async with place.idle() as given:
            async with inside(fenced_transaction(given, token(number + 1, name))):
                pass
            first = await done(apply_once(given, name))
            assert first.first
            await done(given.commit())
    assert len(await place.rows(FENCES)) == len(await place.rows(OPERATIONS)) == 5


async def test_without_a_transaction_nothing_runs(place: Place) -> None:
    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    for of_engine, of_connection in ((level, {}), ({}, level)):
        other = Place(place.kind, place.url, **of_engine)
        async with other.idle(plain=True, **of_connection) as given:
            with pytest.raises(ValueError, match="AUTOCOMMIT"):
                async with inside(fenced_transaction(given, token(5))):
                    raise AssertionError("the body ran")
            with pytest.raises(ValueError, match="AUTOCOMMIT"):
                await done(apply_once(given, "a"))
            with pytest.raises(ValueError, match="AUTOCOMMIT"):
                async with inside(operation(given, "b")):
                    raise AssertionError("the body ran")
        await other.close()
        assert await place.rows(FENCES) == await place.rows(OPERATIONS) == []


# Once


async def test_an_operation_is_applied_once_and_its_result_remembered(place: Place) -> None:
    seen = []
    for attempt in range(3):
        async with place.open() as given:
            applied = await done(
                apply_once(given, "pay:7", result={"receipt": attempt, "raw": b"x"})
            )
            if applied.first:
                await write(given, attempt)
            seen.append((applied.first, applied.result))
    remembered = {"receipt": 0, "raw": b"x"}
    assert seen == [(True, remembered), (False, remembered), (False, remembered)]
    assert await ids(place) == [0]


async def test_an_operation_that_rolled_back_was_never_applied(place: Place) -> None:
    # scenario 86
    with pytest.raises(ZeroDivisionError):
        async with place.open() as given:
            assert (await done(apply_once(given, "pay:7", result=1))).first
            raise ZeroDivisionError
    async with place.open() as given:
        assert (await done(apply_once(given, "pay:7", result=2))).first


async def test_a_block_remembers_what_it_is_told_to(place: Place) -> None:
    for attempt in range(2):
        async with place.idle() as given:
            async with inside(operation(given, "pay:7")) as pay:
                if pay.first:
                    await write(given, 1)
                    pay.result = ["receipt", attempt]
                else:
                    with pytest.raises(RuntimeError, match="applied before"):
                        pay.result = "other"
            assert pay.result == ["receipt", 0]
    assert await ids(place) == [1]


async def test_a_body_that_fails_leaves_neither_effect_nor_row_also_if_the_caller_goes_on(
    place: Place,
) -> None:
    async with place.open() as given:
        await write(given, 1)
        with pytest.raises(ZeroDivisionError):
            async with inside(operation(given, "pay:7")):
                await write(given, 2)
                raise ZeroDivisionError
        with pytest.raises(CanonicalizeError):
            async with inside(operation(given, "pay:8")) as pay:
                await write(given, 3)
                pay.result = object()
        await write(given, 4)
    assert await ids(place) == [1, 4]
    assert await place.rows(OPERATIONS) == []
    async with place.idle() as given:
        with pytest.raises(ZeroDivisionError):
            async with inside(operation(given, "pay:7")):
                await write(given, 5)
                raise ZeroDivisionError
    assert await ids(place) == [1, 4]
    async with place.open() as given, inside(operation(given, "pay:7")) as pay:
        assert pay.first


async def test_a_block_whose_end_fails_leaves_nothing_and_the_caller_goes_on(place: Place) -> None:
    class Unsayable:
        def encode(self, value: Any) -> bytes:
            return b"\xff"

        def decode(self, data: bytes) -> Any:
            raise AssertionError

    codec = Unsayable()
    async with place.open() as given:
        await write(given, 1)
        with pytest.raises(ValueError, match="UTF-8"):
            async with inside(operation(given, "pay:7", codec=codec)) as pay:
                await write(given, 2)
                pay.result = 1
        with pytest.raises(ValueError, match="UTF-8"):
            await done(apply_once(given, "pay:8", result=1, codec=codec))
        for mark in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match="fingerprint"):
                await done(apply_once(given, "pay:9", fingerprint=mark))
        await write(given, 3)
    assert await ids(place) == [1, 3]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.parametrize("place", [kind for kind in KINDS if "session" in kind], indirect=True)
async def test_what_a_session_has_pending_fails_inside_the_block(place: Place) -> None:
    await place.fill(JOBS, {"id": 1})
    async with place.open() as given:
        given.autoflush = False
        with pytest.raises(IntegrityError):
            async with inside(operation(given, "pay:7")):
                given.add(Job(id=1))
        await write(given, 2)
    assert await ids(place) == [1, 2]
    assert await place.rows(OPERATIONS) == []


@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_a_block_that_hides_an_sql_error_does_not_end_as_if_it_had_committed(
    place: Place,
) -> None:
    async with place.idle() as given:
        with pytest.raises(DBAPIError):
            async with inside(operation(given, "pay:7")):
                with suppress(DBAPIError):
                    await done(given.execute(text("SELECT 1/0")))
    async with place.open() as given:
        await write(given, 1)
        with pytest.raises(DBAPIError):
            async with inside(operation(given, "pay:7")):
                with suppress(DBAPIError):
                    await done(given.execute(text("SELECT 1/0")))
        await write(given, 2)
    assert await ids(place) == [1, 2]
    assert await place.rows(OPERATIONS) == []


async def test_a_body_that_ends_the_callers_transaction_is_told(place: Place) -> None:
    async with place.idle() as given:
        for block in (fenced_transaction(given, token(5)), operation(given, "pay:7")):
            await write(given, 1)
            with pytest.raises(RuntimeError, match="ended inside"):
                async with inside(block):
                    await done(given.rollback())
                    await write(given, 2)
            await done(given.rollback())
    assert await ids(place) == []


@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_a_key_that_can_neither_be_written_nor_read_is_told(place: Place) -> None:
    async with place.open(plain=True) as given:
        for statement in (
            "CREATE OR REPLACE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER nothing BEFORE INSERT ON fencekit_operations "
            "FOR EACH ROW EXECUTE FUNCTION nothing()",
        ):
            await done(given.execute(text(statement)))
        with pytest.raises(RuntimeError, match="pay:7"):
            await done(apply_once(given, "pay:7"))
        await done(given.execute(text("DROP TRIGGER nothing ON fencekit_operations")))


async def test_an_operation_under_an_old_token_is_refused(place: Place) -> None:
    async with place.open() as given:
        assert (await done(apply_once(given, "pay:7", token(5), result=1))).first
    with pytest.raises(FencedOutError):
        async with place.open() as given:
            await done(apply_once(given, "pay:8", token(4), result=1))
    async with place.open() as given, inside(operation(given, "pay:7", token(6))) as pay:
        assert not pay.first
    assert [row[0] for row in await place.rows(OPERATIONS)] == ["pay:7"]
    assert [row[2] for row in await place.rows(FENCES)] == [6]


async def test_a_key_with_another_fingerprint_is_a_conflict(place: Place) -> None:
    async with place.open() as given:
        await done(apply_once(given, "pay:7", fingerprint="x"))
        assert not (await done(apply_once(given, "pay:7", fingerprint="x"))).first
        with pytest.raises(IdempotencyConflict) as conflict:
            await done(apply_once(given, "pay:7", fingerprint="y"))
        assert (conflict.value.fingerprint, conflict.value.known) == ("y", "x")
        await write(given, 1)
    assert await ids(place) == [1]


async def test_what_is_old_is_forgotten_in_batches(place: Place) -> None:
    async with place.open() as given:
        for number in range(5):
            await done(apply_once(given, f"pay:{number}", token(number + 1, f"r{number}")))
        old = datetime.now(timezone.utc) - timedelta(days=40)
        for table, name in ((OPERATIONS, "key"), (FENCES, "resource")):
            some = table.c[name].not_in(["pay:4", "r4"])
            await done(given.execute(update(table).where(some).values(at=old)))
    for purge, table in ((purge_operations, OPERATIONS), (purge_fences, FENCES)):
        counts = []
        for _ in range(3):
            async with place.open() as given:
                counts.append(await done(purge(given, timedelta(days=30), batch=3)))
        assert counts == [3, 1, 0]
        assert len(await place.rows(table)) == 1


async def test_a_fence_and_an_operation_cost_a_statement_each(place: Place) -> None:
    sent = place.sent()
    async with place.idle() as given, inside(fenced_transaction(given, [token(5), token(7, "b")])):
        assert len(sent) == 1
        assert (await done(apply_once(given, "pay:7", result=1))).first
        assert len(sent) == 2


# Together


@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_callers_at_the_same_time_wait_and_one_applies_if_the_winner_rolls_back(
    place: Place,
) -> None:
    # scenario 86
    won, go, seen = asyncio.Event(), asyncio.Event(), []

    async def winner() -> None:
        with pytest.raises(ZeroDivisionError):
            async with place.open() as given:
                assert (await done(apply_once(given, "job", result="winner"))).first
                won.set()
                await go.wait()
                raise ZeroDivisionError

    async def loser(number: int) -> None:
        async with place.open() as given:
            applied = await done(apply_once(given, "job", result=number))
            seen.append(applied)
            await done(given.execute(select(text("1"))))  # its transaction goes on

    def loser_in_thread(number: int) -> None:
        asyncio.run(loser(number))

    first = asyncio.create_task(winner())
    await won.wait()
    if place.waits:
        others = [asyncio.create_task(loser(n)) for n in range(4)]
    else:
        others = [asyncio.create_task(asyncio.to_thread(loser_in_thread, n)) for n in range(4)]
    await blocked(place, 4)
    assert seen == []  # nobody was told "already done"
    go.set()
    await asyncio.gather(first, *others)
    (applied,) = [one for one in seen if one.first]
    assert [one.result for one in seen] == [applied.result] * 4


async def blocked(place: Place, number: int) -> None:
    """Wait until so many sessions wait for a lock."""
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    for _ in range(1000):
        async with place.open(plain=True) as connection:
            if (await done(connection.execute(waiting))).scalar() == number:
                return
        await asyncio.sleep(0.01)
    raise AssertionError(f"there are not {number} sessions that wait")


@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_a_newer_holder_waits_for_an_older_ones_transaction(place: Place) -> None:
    newer_done = asyncio.Event()

    async def newer() -> None:
        async with place.idle() as given, inside(fenced_transaction(given, token(6))):
            await write(given, 2)
        newer_done.set()

    async with place.idle() as given, inside(fenced_transaction(given, token(5))):
        if place.waits:
            running = asyncio.create_task(newer())
        else:
            running = asyncio.create_task(asyncio.to_thread(asyncio.run, newer()))
        await blocked(place, 1)
        await write(given, 1)
        assert not newer_done.is_set()
    await running
    assert await ids(place) == [1, 2]
    assert [row[2] for row in await place.rows(FENCES)] == [6]
