"""Statements with a fence: fresh ones write, stale ones are refused, and both are told apart."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select, text, true
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from fencekit import FencedOutError, FenceToken
from fencekit.errors import RowExists, RowMissing, UnexpectedRows
from fencekit.sql import (
    execute_fenced,
    fenced_delete,
    fenced_insert,
    fenced_update,
    fenced_update_many,
    fenced_upsert,
)
from tests.sql.site import JOBS, KINDS, NUMBERED, OLD, PARTS, Job, Place, done

pytestmark = pytest.mark.asyncio


async def run(place: Place, statement: Any, **options: Any) -> Any:
    """Execute it in a transaction of its own."""
    async with place.open() as given:
        return await done(execute_fenced(given, statement, **options))


def to(target: Any, token: Any, number: int, state: str, **options: Any) -> Any:
    column = target.id if hasattr(target, "id") else target.c.id
    return fenced_update(target, token, where=column == number, values={"state": state}, **options)


@pytest.mark.parametrize("target", [JOBS, Job], ids=["table", "class"])
async def test_a_newer_or_equal_token_writes_and_an_older_one_is_refused(
    place: Place, target: Any
) -> None:
    # scenario 82
    await place.fill(JOBS, {"id": 1, "state": "new"})
    assert (await run(place, to(target, FenceToken(7, "a"), 1, "stalled"))).count == 1
    assert (await run(place, to(target, FenceToken(7, "a"), 1, "again"))).count == 1
    assert (await run(place, to(target, FenceToken(8, "a"), 1, "taken"))).count == 1
    with pytest.raises(FencedOutError) as refused:
        await run(place, to(target, FenceToken(7, "a"), 1, "stale"))
    error = refused.value
    assert (error.token, error.current, error.table) == (7, 8, "jobs")
    assert (error.key, error.resource) == ({"id": 1}, "a")
    with pytest.raises(FencedOutError):  # a heartbeat's column is no exception
        beat = fenced_update(target, 7, where=JOBS.c.id == 1, values={"attempts": 5})
        await run(place, beat)
    assert await place.rows() == [(1, "taken", 0, 8)]


async def test_nothing_of_a_refused_writers_transaction_is_committed(place: Place) -> None:
    # scenario 82
    await place.fill(JOBS, {"id": 1, "fence_token": 8}, {"id": 2})
    with pytest.raises(FencedOutError):
        async with place.open() as given:
            await done(execute_fenced(given, to(JOBS, 7, 2, "mine")))
            await done(execute_fenced(given, to(JOBS, 7, 1, "stale")))
    assert [row[1] for row in await place.rows()] == [None, None]


async def test_a_row_that_is_not_there_is_missing_and_not_stale(place: Place) -> None:
    with pytest.raises(RowMissing) as missing:
        await run(place, to(JOBS, 7, 1, "x"))
    error = missing.value
    assert (error.table, error.key, error.token, error.written) == ("jobs", {"id": 1}, 7, 0)


async def test_a_row_that_a_newer_holder_moved_out_of_the_condition_is_stale(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "done", "fence_token": 8}, {"id": 2, "state": "done"})

    def claim(number: int) -> Any:
        where = (JOBS.c.id == number) & (JOBS.c.state == "new")
        return fenced_update(JOBS, 7, where=where, values={"state": "mine"})

    with pytest.raises(FencedOutError):
        await run(place, claim(1))
    with pytest.raises(RowMissing):  # nobody newer: it is just not new
        await run(place, claim(2))


async def test_null_is_never_fenced_and_an_owner_that_was_cleared_clears_no_fence(
    place: Place,
) -> None:
    # scenario 83
    await place.fill(OLD, {"id": 1}, {"id": 2, "fence_token": 0})

    def write(token: int, number: int, **values: Any) -> Any:
        return fenced_update(OLD, token, where=OLD.c.id == number, values=values)

    await run(place, write(5, 1, text="a", owner="A"))
    await run(place, write(6, 1, owner=None))  # parked by a newer one
    with pytest.raises(FencedOutError):
        await run(place, write(5, 1, text="stale", owner="A"))
    await run(place, write(5, 2, text="a"))
    assert await place.rows(OLD) == [(1, None, "a", 6), (2, None, "a", 5)]


async def test_one_refused_row_among_many_refuses_them_all(place: Place) -> None:
    await place.fill(JOBS, *({"id": n, "fence_token": 8 * (n == 3)} for n in range(1, 6)))
    many = fenced_update(JOBS, 7, where=JOBS.c.id < 6, values={"state": "x"})
    with pytest.raises(FencedOutError) as refused:
        await run(place, many)
    assert (refused.value.current, refused.value.key) == (8, {"id": 3})
    assert all(row[1] is None for row in await place.rows())
    fresh = fenced_update(JOBS, 7, where=JOBS.c.id < 3, values={"state": "x"})
    assert (await run(place, fresh, rows=2)).count == 2


async def test_the_caller_may_say_how_many_rows_it_means(place: Place) -> None:
    # scenario 89
    await place.fill(JOBS, {"id": 1}, {"id": 2})
    everything = fenced_update(JOBS, 7, where=true(), values={"state": "x"})
    with pytest.raises(UnexpectedRows) as more:
        await run(place, everything, rows=1)
    assert (more.value.written, more.value.expected) == (2, 1)
    with pytest.raises(RowMissing) as fewer:
        await run(place, everything, rows=3)
    assert fewer.value.written == 2
    assert all(row[1] is None for row in await place.rows())
    assert (await run(place, everything, rows=2)).count == 2


async def test_many_rows_get_values_of_their_own_in_one_statement(place: Place) -> None:
    await place.fill(PARTS, *({"job": 1, "number": n, "fence": n} for n in range(4)))
    rows = [{"job": 1, "number": n, "text": f"t{n}"} for n in range(3)]
    many = fenced_update_many(PARTS, 5, rows, fence="fence")
    assert (await run(place, many)).count == 3
    assert [row[3:] for row in await place.rows(PARTS)] == [
        ("t0", 5),
        ("t1", 5),
        ("t2", 5),
        (None, 3),
    ]
    with pytest.raises(FencedOutError):
        await run(
            place, fenced_update_many(PARTS, 4, [*rows, {**rows[0], "number": 3}], fence="fence")
        )
    one_more = [*rows, {"job": 1, "number": 9, "text": "?"}]
    with pytest.raises(RowMissing) as missing:  # each row has to be there
        await run(place, fenced_update_many(PARTS, 5, one_more, fence="fence"))
    assert missing.value.written == 3


async def test_returned_columns_come_back(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "attempts": 3}, {"id": 2, "attempts": 4})
    statement = fenced_update(
        JOBS, 7, where=true(), values={"attempts": JOBS.c.attempts + 1}
    ).returning(JOBS.c.id, JOBS.c.attempts)
    written = await run(place, statement)
    assert written.count == 2
    assert sorted((row.id, row.attempts) for row in written.rows) == [(1, 4), (2, 5)]
    nothing = fenced_update(JOBS, 7, where=JOBS.c.id == 9, values={}).returning(JOBS.c.id)
    with pytest.raises(RowMissing):
        await run(place, nothing)


async def test_a_stale_delete_is_refused_and_a_tombstone_keeps_the_fence(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "fence_token": 8}, {"id": 2, "fence_token": 6})
    with pytest.raises(FencedOutError):
        await run(place, fenced_delete(JOBS, 7, where=JOBS.c.id == 1))
    assert (await run(place, fenced_delete(JOBS, 7, where=JOBS.c.id == 2))).count == 1
    with pytest.raises(RowMissing):
        await run(place, fenced_delete(JOBS, 7, where=JOBS.c.id == 2))
    gone = fenced_delete(Job, 9, where=Job.id == 1, tombstone={"state": "deleted"})
    await run(place, gone)
    with pytest.raises(FencedOutError):  # it does not come back
        await run(place, fenced_upsert(JOBS, 8, values={"id": 1, "state": "back"}))
    assert await place.rows() == [(1, "deleted", 0, 9)]


@pytest.mark.parametrize("target", [JOBS, Job], ids=["table", "class"])
async def test_an_upsert_inserts_or_updates_unless_the_row_is_newer(
    place: Place, target: Any
) -> None:
    assert (await run(place, fenced_upsert(target, 5, values={"id": 1, "state": "a"}))).count == 1
    assert (await run(place, fenced_upsert(target, 6, values={"id": 1, "state": "b"}))).count == 1
    with pytest.raises(FencedOutError) as refused:
        await run(place, fenced_upsert(target, 5, values={"id": 1, "state": "stale"}))
    assert (refused.value.current, refused.value.key) == (6, {"id": 1})
    tries = "attempts" if target is JOBS else Job.tries
    rows = [{"id": n, "state": f"s{n}", tries: n} for n in (1, 2, 3)]
    with pytest.raises(FencedOutError):
        await run(place, fenced_upsert(target, 5, values=rows))
    assert (await run(place, fenced_upsert(target, 7, values=rows))).count == 3
    assert await place.rows() == [(1, "s1", 1, 7), (2, "s2", 2, 7), (3, "s3", 3, 7)]


async def test_an_upsert_by_another_key_updates_what_it_is_told_to(place: Place) -> None:
    await place.fill(PARTS, {"job": 1, "number": 1, "code": "x", "text": "old"})
    values = {"job": 2, "number": 2, "code": "x", "text": "new"}
    statement = fenced_upsert(
        PARTS, 5, values=values, key=["code"], update=[PARTS.c.text], fence="fence"
    )
    await run(place, statement)
    assert await place.rows(PARTS) == [(1, 1, "x", "new", 5)]


async def test_an_insert_says_whether_a_row_that_is_there_is_newer(place: Place) -> None:
    await run(place, fenced_insert(JOBS, 5, values={"id": 1, "state": "a"}))
    with pytest.raises(RowExists):
        await run(place, fenced_insert(JOBS, 6, values={"id": 1, "state": "b"}))
    with pytest.raises(FencedOutError):
        await run(place, fenced_insert(JOBS, 4, values={"id": 1, "state": "c"}))
    async with place.open() as given:  # the transaction goes on: scenario 88
        with pytest.raises(RowExists):
            await done(execute_fenced(given, fenced_insert(JOBS, 6, values={"id": 1})))
        await done(execute_fenced(given, fenced_insert(JOBS, 6, values={"id": 2})))
    assert await place.rows() == [(1, "a", 0, 5), (2, None, 0, 6)]


async def test_rows_that_the_database_numbers_are_always_new(place: Place) -> None:
    statement = fenced_insert(NUMBERED, 5, values=[{"text": "a"}, {"text": "b"}])
    assert (await run(place, statement)).count == 2
    written = await run(
        place, fenced_insert(NUMBERED, 5, values={"text": "c"}).returning(NUMBERED.c.id)
    )
    assert written.count == len(written.rows) == 1


async def test_a_violation_of_another_key_is_the_databases_own_error(place: Place) -> None:
    await place.fill(PARTS, {"job": 1, "number": 1, "code": "x"})
    statement = fenced_insert(PARTS, 5, values={"job": 1, "number": 2, "code": "x"}, fence="fence")
    with pytest.raises(IntegrityError):
        await run(place, statement)


async def test_an_alias_can_be_written_to(place: Place) -> None:
    await place.fill(JOBS, {"id": 1})
    one, other = JOBS.alias("one"), aliased(Job, name="other")
    await run(place, fenced_update(one, 5, where=one.c.id == 1, values={"state": "a"}))
    await run(place, fenced_update(other, 6, where=other.id == 1, values={"state": "b"}))
    with pytest.raises(FencedOutError):
        await run(place, fenced_update(other, 5, where=other.id == 1, values={"state": "c"}))
    assert await place.rows() == [(1, "b", 0, 6)]


async def test_values_may_be_expressions_and_attributes(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "attempts": 2})
    statement = fenced_update(
        Job, 5, where=Job.id == 1, values={Job.tries: Job.tries + 1, "state": func.upper("x")}
    )
    await run(place, statement)
    assert await place.rows() == [(1, "X", 3, 5)]


@pytest.mark.parametrize("place", [kind for kind in KINDS if "session" in kind], indirect=True)
async def test_objects_of_a_session_are_brought_up_to_date(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"}, {"id": 2, "state": "old"})
    async with place.open() as session:
        one = await done(session.get(Job, 1))
        two = await done(session.get(Job, 2))
        two.tries = 4  # pending: goes first, like before a query
        statement = fenced_update(Job, 5, where=Job.id == 1, values={Job.state: "new"})
        await done(execute_fenced(session, statement))
        assert (one.state, one.fence_token, one.tries, two.state) == ("new", 5, 0, "old")
    assert await place.rows() == [(1, "new", 0, 5), (2, "old", 4, 0)]


async def test_the_transaction_goes_on_after_a_refusal(place: Place) -> None:
    # scenario 88
    await place.fill(JOBS, {"id": 1, "fence_token": 8})
    async with place.open() as given:
        with pytest.raises(FencedOutError):
            await done(execute_fenced(given, to(JOBS, 7, 1, "stale")))
        assert (await done(given.execute(select(text("1"))))).scalar() == 1


async def test_the_statement_alone_writes_only_fresh_rows(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "fence_token": 8}, {"id": 2})
    async with place.open() as given:
        stale = await done(given.execute(to(JOBS, 7, 1, "stale")))
        fresh = await done(given.execute(to(JOBS, 7, 2, "fresh")))
        assert (stale.rowcount, fresh.rowcount) == (0, 1)


@pytest.mark.parametrize("place", [k for k in KINDS if "sqlite" not in k], indirect=True)
async def test_postgresql_writes_and_tells_in_one_statement(place: Place) -> None:
    # S2
    await place.fill(JOBS, {"id": 1, "fence_token": 8}, {"id": 2})
    many = fenced_update(JOBS, 7, where=true(), values={"state": "x"})
    told: list[tuple[Any, type[Exception] | None]] = [
        (to(JOBS, 7, 2, "fresh"), None),
        (to(Job, 7, 2, "fresh"), None),
        (to(JOBS, 7, 1, "stale"), FencedOutError),
        (to(JOBS, 7, 3, "missing"), RowMissing),
        (many, FencedOutError),
        (fenced_upsert(JOBS, 7, values={"id": 1}), FencedOutError),
        (fenced_delete(JOBS, 7, where=JOBS.c.id == 1), FencedOutError),
        (fenced_insert(JOBS, 7, values={"id": 1}), FencedOutError),
    ]
    for statement, error in told:
        sent = place.sent()
        async with place.open() as given:
            if error is None:
                await done(execute_fenced(given, statement))
            else:
                with pytest.raises(error):
                    await done(execute_fenced(given, statement))
        assert len(sent) == 1, sent
