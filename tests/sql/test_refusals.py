"""What cannot be meant is refused before anything is sent; what a driver cannot tell is said."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    bindparam,
    create_engine,
    event,
    false,
    func,
    literal,
    literal_column,
    null,
    select,
    text,
    true,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import aliased, with_loader_criteria

from fencekit import FencedOutError, FenceToken, LockHandle
from fencekit.errors import RowCountUnknown, RowMissing, UnexpectedRows
from fencekit.sql import (
    apply_once,
    execute_fenced,
    fence_token,
    fenced_delete,
    fenced_insert,
    fenced_transaction,
    fenced_update,
    fenced_update_many,
    fenced_upsert,
    metadata,
    operation,
    purge_operations,
)
from tests.sql.drivers import Double, Silent, engine_of
from tests.sql.site import JOBS, PARTS, Job

WHERE: Any = JOBS.c.id == 1
WRITES = select(JOBS.update().values(state="stale").returning(JOBS.c.state).cte()).scalar_subquery()
NAMELESS = Table("nameless", MetaData(), Column("id", Integer), fence_token())
SMALL = Table(
    "small", MetaData(), Column("id", Integer, primary_key=True), Column("fence_token", Integer)
)


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A connection that says what is sent on it."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        for tables in (JOBS.metadata, metadata):
            tables.create_all(connection)
        connection.commit()
        sent: list[str] = []
        connection.info["sent"] = sent
        event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
        yield connection
    engine.dispose()


@pytest.mark.parametrize("token", [None, "7", 7.0, True, 0, -1, 2**53, 2**63, float("nan"), b"7"])
def test_what_is_no_token_is_refused(token: Any, connection: Connection) -> None:
    for build in (
        lambda: fenced_update(JOBS, token, where=WHERE, values={"state": "x"}),
        lambda: fenced_delete(JOBS, token, where=WHERE),
        lambda: fenced_insert(JOBS, token, values={"id": 1}),
        lambda: fenced_upsert(JOBS, token, values={"id": 1}),
        lambda: fenced_update_many(JOBS, token, [{"id": 1, "state": "x"}]),
    ):
        with pytest.raises((TypeError, ValueError), match="token"):
            build()
    if token is not None:
        with pytest.raises(TypeError, match="token"):
            apply_once(connection, "a", token)
    with pytest.raises(TypeError, match="token"):
        fenced_transaction(connection, token)
    assert connection.info["sent"] == []


def test_a_handle_is_not_taken_for_its_token(connection: Connection) -> None:
    handle: Any = LockHandle("a", "me", FenceToken(7, "a"), timedelta(seconds=10))
    with pytest.raises(TypeError, match=r"\.token"):
        fenced_update(JOBS, handle, where=WHERE, values={})
    for given in (handle, [handle]):
        with pytest.raises(TypeError, match=r"\.token"):
            fenced_transaction(connection, given)


@pytest.mark.parametrize(
    "target", [None, "jobs", Job(), select(JOBS), select(JOBS).subquery(), 7, dict]
)
def test_what_cannot_be_written_to_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="table, a mapped class or an alias"):
        fenced_update(target, 7, where=WHERE, values={})


@pytest.mark.parametrize(
    "where",
    [
        None,
        True,
        False,
        "id = 1",
        7,
        object(),
        JOBS.c.id,
        JOBS.c.id.desc(),
        func.count(JOBS.c.state),
        literal(7),
        bindparam("flag"),
        null(),
        select(JOBS),
    ],
)
def test_what_is_no_condition_is_refused(where: Any) -> None:
    with pytest.raises(TypeError, match="where is a condition"):
        fenced_update(JOBS, 7, where=where, values={})
    with pytest.raises(TypeError, match="where is a condition"):
        fenced_delete(JOBS, 7, where=where)


@pytest.mark.parametrize(
    "where",
    [
        PARTS.c.job == 7,
        JOBS.alias().c.id == 7,
        select(PARTS.c.job).where(PARTS.c.job == 1).exists(),
        literal(1) == 1,
        func.now() > func.now(),
    ],
)
def test_a_condition_that_does_not_mention_the_target_is_refused(where: Any) -> None:
    for build in (
        lambda: fenced_update(JOBS, 7, where=where, values={}),
        lambda: fenced_delete(Job, 7, where=where),
        lambda: fenced_update(aliased(Job), 7, where=JOBS.c.id == 1, values={}),
    ):
        with pytest.raises(ValueError, match="does not mention jobs"):
            build()


@pytest.mark.parametrize(
    "where",
    [
        true(),
        false(),
        text("id = 7"),
        JOBS.c.id == PARTS.c.job,
        Job.id.in_(select(PARTS.c.job)),
        select(PARTS.c.job).where(PARTS.c.job == JOBS.c.id).exists(),
        literal_column("id = 7"),
        func.starts_with(JOBS.c.state, "x"),
        JOBS.c.state.op("~")("^a"),
        (JOBS.c.id == 7) & ~(JOBS.c.state == "x"),
    ],
)
def test_every_condition_on_the_target_is_one(where: Any) -> None:
    assert fenced_update(JOBS, 7, where=where, values={}) is not None
    assert fenced_delete(Job, 7, where=where) is not None


@pytest.mark.parametrize(
    "chosen",
    [
        select(JOBS.c.id).where(JOBS.c.state == "new").limit(1),
        select(JOBS.c.id).offset(1),
        select(JOBS.c.id).with_for_update(skip_locked=True),
        JOBS.delete().returning(JOBS.c.id).cte().select(),
    ],
)
def test_a_subquery_that_chooses_other_rows_the_second_time_is_refused(chosen: Any) -> None:
    with pytest.raises(ValueError, match="select the keys first"):
        fenced_update(JOBS, 7, where=JOBS.c.id.in_(chosen), values={"state": "mine"})


def test_a_statement_that_was_changed_is_refused(connection: Connection) -> None:
    # S3
    update: Any = fenced_update(Job, 7, where=Job.id == 1, values={"state": "x"})
    upsert: Any = fenced_upsert(JOBS, 7, values={"id": 1, "state": "x"})
    for changed in (
        update.values(fence_token=0),
        update.values(state="y"),
        update.where(Job.state == "x"),
        update.add_cte(JOBS.update().values(state="stale").cte()),
        update.prefix_with("/* hint */"),
        update.return_defaults(),
        update.options(with_loader_criteria(Job, Job.state == "x")),
        fenced_delete(JOBS, 7, where=WHERE).where(JOBS.c.state == "x"),
        upsert.values(state="y"),
    ):
        with pytest.raises(TypeError, match="was changed since"):
            execute_fenced(connection, changed)
    assert connection.info["sent"] == []


def test_columns_that_are_not_there_or_not_to_be_set_are_refused() -> None:
    refused: list[tuple[Any, str]] = [
        (lambda: fenced_update(JOBS, 7, where=WHERE, values={"nope": 1}), "no column 'nope'"),
        (lambda: fenced_update(JOBS, 7, where=WHERE, values={"fence_token": 1}), "leave it out"),
        (lambda: fenced_update(Job, 7, where=WHERE, values={Job.fence_token: 1}), "leave it out"),
        (lambda: fenced_update(Job, 7, where=WHERE, values={"tries": 1, Job.tries: 2}), "twice"),
        (lambda: fenced_update(PARTS, 7, where=WHERE, values={}), "no column 'fence_token'"),
        (lambda: fenced_update(JOBS, 7, where=WHERE, values={}, fence="nope"), "no column"),
        (lambda: fenced_upsert(JOBS, 7, values=[]), "no rows"),
        (lambda: fenced_upsert(JOBS, 7, values=[{"id": 1}, {"id": 2, "state": "x"}]), "same"),
        (lambda: fenced_upsert(JOBS, 7, values={"state": "x"}), "does not say|do not say id"),
        (lambda: fenced_upsert(NAMELESS, 7, values={"id": 1}), "no primary key"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, update=["state"]), "does not have"),
        (lambda: fenced_update_many(JOBS, 7, [{"id": 1}]), "nothing but their key"),
        (lambda: fenced_update_many(JOBS, 7, [{"id": 1, "state": "x"}] * 2), "twice"),
        (
            lambda: fenced_update_many(
                PARTS, 7, [{"job": 1, "text": ""}], key=["job"], fence="fence"
            ),
            "no unique key",
        ),
        (lambda: fenced_upsert(JOBS, 7, values={"id": None}), "None"),
        (lambda: fenced_update_many(JOBS, 7, [{"id": None, "state": "x"}]), "None"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, key=[]), "names no column"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, key=["id", "id"]), "twice"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, update=["fence_token"]), "leave it out"),
    ]
    for build, why in refused:
        with pytest.raises(ValueError, match=why):
            build()
    wrong: list[tuple[Any, str]] = [
        (lambda: fenced_update(SMALL, 7, where=SMALL.c.id == 1, values={}), "BIGINT"),
        (lambda: fenced_update(JOBS, 7, where=WHERE, values=[("state", 1)]), "mapping"),  # type: ignore[arg-type]
        (lambda: fenced_update(JOBS, 7, where=WHERE, values={7: 1}), "a key of values"),
        (lambda: fenced_update(JOBS, 7, where=WHERE, values={"state": WRITES}), "writes"),
        (lambda: fenced_upsert(JOBS, 7, values=[7]), "mapping"),  # type: ignore[list-item]
        (lambda: fenced_upsert(JOBS, 7, values={"id": func.random()}), "expression"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, key="id"), "comma"),
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, key=5), "sequence"),  # type: ignore[arg-type]
        (lambda: fenced_upsert(JOBS, 7, values={"id": 1}, update=5), "sequence"),  # type: ignore[arg-type]
        (lambda: fenced_insert(JOBS, 7, values=5), "mappings"),  # type: ignore[arg-type]
        (lambda: fenced_upsert(JOBS, 7, values=None), "mappings"),  # type: ignore[arg-type]
        (lambda: fenced_update_many(JOBS, 7, "id"), "mappings"),  # type: ignore[arg-type]
        (lambda: fenced_upsert(JOBS.alias(), 7, values={"id": 1}), "alias"),
        (lambda: fenced_insert(aliased(Job), 7, values={"id": 1}), "alias"),
    ]
    for build, why in wrong:
        with pytest.raises(TypeError, match=why):
            build()


def test_only_statements_of_this_package_run_and_only_on_connections(
    connection: Connection,
) -> None:
    fenced = fenced_update(JOBS, 7, where=WHERE, values={})
    with pytest.raises(TypeError, match="fenced_update and its kin"):
        execute_fenced(connection, JOBS.update().values(state="x"))
    nothing: Any
    for nothing in ("UPDATE jobs", None, text("UPDATE jobs"), 7):
        with pytest.raises(TypeError, match="fenced_update and its kin"):
            execute_fenced(connection, nothing)
    for rows in (0, -1, True, "2", 1.0):
        with pytest.raises(ValueError, match="rows"):
            execute_fenced(connection, fenced, rows=rows)  # type: ignore[arg-type]
    given: Any
    for given in (None, connection.engine, create_async_engine("sqlite+aiosqlite://"), "sqlite://"):
        for use in (
            lambda given=given: execute_fenced(given, fenced),
            lambda given=given: fenced_transaction(given, FenceToken(7, "a")),
            lambda given=given: apply_once(given, "a"),
            lambda given=given: operation(given, "a"),
            lambda given=given: purge_operations(given, timedelta(1)),
        ):
            with pytest.raises(TypeError, match="Connection, Session"):
                use()
    assert connection.info["sent"] == []


def test_names_tokens_and_numbers_that_cannot_be_meant_are_refused(connection: Connection) -> None:
    one = FenceToken(7, "a")
    refused: list[Any] = [
        lambda: fenced_transaction(connection, []),
        lambda: fenced_transaction(connection, [one, FenceToken(8, "a")]),
        lambda: fenced_transaction(connection, one, sequence=0),
        lambda: fenced_transaction(connection, one, sequence=2**63),
        lambda: apply_once(connection, ""),
        lambda: apply_once(connection, "  "),
        lambda: apply_once(connection, "x" * 1025),
        lambda: apply_once(connection, "%" * 1000),
        lambda: apply_once(connection, "\ud800"),
        lambda: operation(connection, ""),
        lambda: purge_operations(connection, timedelta(-1)),
        lambda: purge_operations(connection, timedelta(1), batch=0),
    ]
    for use in refused:
        with pytest.raises(ValueError):
            use()
    wrong: list[Any] = [
        lambda: fenced_transaction(connection, one, sequence=True),
        lambda: fenced_transaction(connection, one, sequence="1"),  # type: ignore[arg-type]
        lambda: apply_once(connection, None),  # type: ignore[call-overload]
        lambda: apply_once(connection, b"a"),  # type: ignore[call-overload]
        lambda: apply_once(connection, "a", fingerprint=7),  # type: ignore[call-overload]
        lambda: purge_operations(connection, 30),  # type: ignore[call-overload]
    ]
    for use in wrong:
        with pytest.raises(TypeError):
            use()
    assert connection.info["sent"] == []


async def _enter(block: Any) -> None:
    async with block:
        raise AssertionError("the body ran")


@pytest.mark.asyncio
async def test_the_wrong_kind_of_block_says_which_one_to_use(connection: Connection) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.connect() as waiting:
        for block in (fenced_transaction(waiting, FenceToken(7, "a")), operation(waiting, "a")):
            with pytest.raises(TypeError, match="async with"), block:
                raise AssertionError("the body ran")
    for other in (fenced_transaction(connection, FenceToken(7, "a")), operation(connection, "a")):
        with pytest.raises(TypeError, match="'with'"):
            await _enter(other)
    await engine.dispose()
    assert connection.info["sent"] == []


# Drivers


@pytest.mark.parametrize(("cursor", "error"), [(Silent, RowCountUnknown), (Double, UnexpectedRows)])
def test_a_drivers_count_that_cannot_be_true_is_neither_success_nor_stale(
    cursor: type[Silent], error: type[Exception]
) -> None:
    # scenario 89
    engine = engine_of(cursor)
    with engine.connect() as connection:
        JOBS.create(connection)
        connection.execute(text("INSERT INTO jobs (id, fence_token) VALUES (1, 5)"))
        with pytest.raises(error) as raised:
            execute_fenced(connection, fenced_update(JOBS, 7, where=WHERE, values={"state": "x"}))
        assert raised.value.table == "jobs"  # type: ignore[attr-defined]
        with pytest.raises((FencedOutError, error)):
            execute_fenced(connection, fenced_update(JOBS, 4, where=WHERE, values={"state": "x"}))
    engine.dispose()


def test_a_driver_that_counts_changed_rows_still_tells_missing_from_stale(
    connection: Connection,
) -> None:
    connection.execute(JOBS.insert().values(id=1, fence_token=5))
    with pytest.raises(RowMissing):
        execute_fenced(connection, fenced_update(JOBS, 7, where=JOBS.c.id == 2, values={}))


@pytest.mark.parametrize("dialect", [mysql.dialect(), postgresql.dialect()])
def test_update_and_delete_are_plain_sql_of_every_dialect(dialect: Any) -> None:
    update = str(
        fenced_update(JOBS, 7, where=WHERE, values={"state": "x"}).compile(dialect=dialect)
    )
    assert update.startswith("UPDATE jobs SET state=")
    assert "jobs.fence_token <= " in update
    delete = str(fenced_delete(JOBS, 7, where=WHERE).compile(dialect=dialect))
    assert delete.startswith("DELETE FROM jobs WHERE jobs.id = ")
    assert "jobs.fence_token <= " in delete
