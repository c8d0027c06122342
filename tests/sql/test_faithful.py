"""A fenced statement is the caller's own: its options, events, defaults and transaction."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Delete,
    ForeignKeyConstraint,
    Insert,
    Integer,
    MetaData,
    Table,
    Text,
    Update,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    select,
    text,
    true,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, with_loader_criteria

from fencekit import FencedOutError, FenceToken
from fencekit.errors import RowMissing
from fencekit.sql import (
    FencedMixin,
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
)
from tests.sql.site import JOBS, KINDS, PARTS, Job, Place, done

SESSIONS = [kind for kind in KINDS if "session" in kind]

MADE = MetaData()


def counted(context: Any) -> int:
    return len(context.get_current_parameters()) + 40


CONTEXT = Table(
    "context",
    MADE,
    Column("id", Integer, primary_key=True),
    Column("made", Integer, default=counted),
    Column("changed", Integer, onupdate=counted),
    Column("plain", Text, default=lambda: "made", onupdate=lambda: "changed"),
    fence_token(),
)


class Base(DeclarativeBase):
    metadata = MADE


class Person(FencedMixin, Base):
    __tablename__ = "person"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str | None]
    __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012


class Manager(Person):
    __mapper_args__: Any = {"polymorphic_identity": "manager"}  # noqa: RUF012


class Whole(Base):
    __tablename__ = "whole"
    a: Mapped[int] = mapped_column(primary_key=True)
    b: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "whole"}  # noqa: RUF012


class Piece(FencedMixin, Whole):
    """Its table has the key in another order."""

    __tablename__ = "piece"
    b: Mapped[int] = mapped_column(primary_key=True)
    a: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str | None]
    __table_args__ = (ForeignKeyConstraint(["a", "b"], ["whole.a", "whole.b"]),)
    __mapper_args__: Any = {"polymorphic_identity": "piece"}  # noqa: RUF012


PERSON: Any = Person.__table__


class Loose(Base):
    """A table without a primary key, of which the mapper knows one, the other way round."""

    __table__ = Table(
        "loose",
        MADE,
        Column("b", Integer),
        Column("a", Integer),
        Column("name", Text),
        fence_token(),
    )
    __mapper_args__: Any = {"primary_key": [__table__.c.a, __table__.c.b]}  # noqa: RUF012


async def make(place: Place) -> None:
    async with place.open(plain=True) as connection:
        await done(
            connection.run_sync(MADE.create_all) if place.waits else MADE.create_all(connection)
        )
        for table in reversed(MADE.sorted_tables):
            await done(connection.execute(delete(table)))


@pytest.mark.asyncio
async def test_the_options_of_a_statement_reach_the_write_and_the_look(place: Place) -> None:
    schema = "other" if place.postgres else "temp"
    async with place.open(plain=True) as given:
        if place.postgres:
            await done(given.execute(text("CREATE SCHEMA IF NOT EXISTS other")))
        await done(given.execute(text(f"DROP TABLE IF EXISTS {schema}.jobs")))
    await place.fill(JOBS, {"id": 1, "state": "ours"})
    moved = {"schema_translate_map": {None: schema}}
    async with place.open() as given:
        table = "TABLE other.jobs" if place.postgres else "TEMP TABLE jobs"
        copied = "SELECT id, 'theirs' AS state, attempts, 9 AS fence_token FROM main_jobs"
        source = copied.replace("main_jobs", "public.jobs" if place.postgres else "main.jobs")
        await done(given.execute(text(f"CREATE {table} AS {source}")))
        for target in (JOBS, Job):
            for statement in (
                fenced_update(target, 5, where=JOBS.c.id == 1, values={"state": "stale"}),
                fenced_update(target, 5, where=true(), values={"state": "stale"}),
                fenced_delete(target, 5, where=JOBS.c.id == 1).returning(JOBS.c.state),
            ):
                with pytest.raises(FencedOutError):
                    await done(execute_fenced(given, statement.execution_options(**moved)))
        fresh = fenced_update(JOBS, 9, where=JOBS.c.id == 1, values={"state": "new"})
        await done(execute_fenced(given, fresh.execution_options(**moved)))
        there = (await done(given.execute(text(f"SELECT state FROM {schema}.jobs")))).scalar()
        assert there == "new"
        await done(given.execute(text(f"DROP TABLE {schema}.jobs")))
    assert await place.rows() == [(1, "ours", 0, 0)]


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_a_session_runs_it_with_its_events_and_criteria(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "a"}, {"id": 2, "state": "b", "fence_token": 9})

    def only_mine(execution: Any) -> None:
        if execution.is_select or execution.is_update or execution.is_delete:
            mine = with_loader_criteria(Job, Job.state == "a")
            execution.statement = execution.statement.options(mine)

    async with place.open() as session:
        event.listen(getattr(session, "sync_session", session), "do_orm_execute", only_mine)
        statement = fenced_update(Job, 5, where=true(), values={Job.tries: 7})
        assert (await done(execute_fenced(session, statement))).count == 1
        with pytest.raises(RowMissing):
            await done(execute_fenced(session, fenced_delete(Job, 5, where=Job.id == 2)))
    assert await place.rows() == [(1, "a", 7, 5), (2, "b", 0, 9)]


@pytest.mark.asyncio
async def test_a_class_means_its_own_rows_of_a_shared_table(place: Place) -> None:
    await make(place)
    await place.fill(
        PERSON,
        {"id": 1, "kind": "manager", "fence_token": 1},
        {"id": 2, "kind": "person", "fence_token": 9},
    )
    async with place.open() as given:
        statement = fenced_update(Manager, 5, where=true(), values={"name": "x"})
        assert (await done(execute_fenced(given, statement))).count == 1
        with pytest.raises(FencedOutError) as refused:
            await done(
                execute_fenced(given, fenced_update(Person, 5, where=true(), values={"name": "y"}))
            )
        assert refused.value.key == {"id": 2}


@pytest.mark.asyncio
async def test_defaults_that_look_at_the_execution_work(place: Place) -> None:
    await make(place)
    async with place.open() as given:
        await done(execute_fenced(given, fenced_insert(CONTEXT, 5, values={"id": 1})))
        update = fenced_update(CONTEXT, 6, where=CONTEXT.c.id == 1, values={})
        await done(execute_fenced(given, update))
        with pytest.raises(FencedOutError):
            stale = fenced_update(CONTEXT, 5, where=CONTEXT.c.id == 1, values={})
            await done(execute_fenced(given, stale))
        await done(execute_fenced(given, fenced_upsert(CONTEXT, 6, values={"id": 2})))
    (first, second) = await place.rows(CONTEXT)
    assert min(first[1], first[2], second[1]) > 40
    assert (first[3], second[3]) == ("changed", "made")


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
@pytest.mark.parametrize("kind", [Piece, Loose])
async def test_the_object_that_was_written_is_the_one_that_changes(place: Place, kind: Any) -> None:
    await make(place)
    for a, b in ((1, 2), (2, 1)):
        if kind is Piece:
            await place.fill(Whole.__table__, {"a": a, "b": b, "kind": "piece"})
        await place.fill(kind.__table__, {"a": a, "b": b, "name": "old"})
    columns = kind.__table__.c
    where = (columns.a == 1) & (columns.b == 2)
    statements = [fenced_update(kind, 5, where=where, values={"name": "new"})]
    if kind is Piece:
        statements.append(fenced_upsert(kind, 5, values={"a": 1, "b": 2, "name": "newer"}))
    for statement, name in zip(statements, ("new", "newer"), strict=False):
        async with place.open() as session:
            one, other = [await done(session.get(kind, key)) for key in ((1, 2), (2, 1))]
            await done(execute_fenced(session, statement))
            for job in (one, other):
                if "name" not in job.__dict__:  # expired: awaited, where it has to be
                    await done(session.refresh(job))
            assert (one.name, other.name) == (name, "old")


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_objects_follow_a_savepoint_that_is_rolled_back(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"})
    async with place.open() as session:
        job = await done(session.get(Job, 1))
        for statement in (
            fenced_update(Job, 5, where=Job.id == 1, values={"state": "new"}),
            fenced_upsert(Job, 5, values={"id": 1, "state": "new"}),
        ):
            savepoint = await done(session.begin_nested())
            await done(execute_fenced(session, statement))
            await done(session.refresh(job))
            assert job.state == "new"
            await done(savepoint.rollback())
            await done(session.refresh(job, ["state"]) if "state" not in job.__dict__ else None)
            assert job.state == "old"


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_an_expression_is_not_taken_for_a_value(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old", "attempts": 4})
    async with place.open() as session:
        job = await done(session.get(Job, 1))
        values = {Job.state: func.upper("x"), Job.tries: Job.id}
        await done(execute_fenced(session, fenced_update(Job, 5, where=Job.id == 1, values=values)))
        await done(session.refresh(job))
        assert (job.state, job.tries) == ("X", 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("place", SESSIONS, indirect=True)
async def test_what_is_pending_without_autoflush_is_kept(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"})
    async with place.open() as session:
        job = await done(session.get(Job, 1))
        plain = getattr(session, "sync_session", session)
        with plain.no_autoflush:
            job.tries = 7
            upsert = fenced_upsert(Job, 5, values={"id": 1, "state": "new"})
            await done(execute_fenced(session, upsert))
    assert await place.rows() == [(1, "new", 7, 5)]


@pytest.mark.asyncio
async def test_what_is_returned_is_what_was_asked_for(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"}, {"id": 2, "fence_token": 9})
    async with place.open() as given:
        update = fenced_update(JOBS, 5, where=JOBS.c.id == 1, values={"state": "new"})
        for asked in (
            [text("state")],
            [JOBS.c.id, JOBS.c.state],
            [func.upper(JOBS.c.state).label("fencekit_one")],
        ):
            written = await done(execute_fenced(given, update.returning(*asked)))
            assert (written.count, len(written.rows)) == (1, 1)
            assert written.rows[0][-1] in ("new", "NEW")
        with pytest.raises(FencedOutError):
            stale = fenced_update(JOBS, 5, where=JOBS.c.id == 2, values={"state": "stale"})
            await done(execute_fenced(given, stale.returning(JOBS.c.id)))


@pytest.mark.asyncio
async def test_a_refused_statement_with_a_cte_can_be_rolled_back(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "old"}, {"id": 2, "state": "old", "fence_token": 9})
    chosen = select(JOBS.c.id.label("id")).where(JOBS.c.state == "old").cte("chosen")
    for target in (JOBS, Job):
        where = JOBS.c.id.in_(select(chosen.c.id))
        for statement in (
            fenced_update(target, 5, where=where, values={"state": "stale"}),
            fenced_delete(target, 5, where=where).returning(JOBS.c.id),
        ):
            with pytest.raises(FencedOutError):
                async with place.open() as given:
                    await done(execute_fenced(given, statement))
    assert [row[1] for row in await place.rows()] == ["old", "old"]


@pytest.mark.asyncio
async def test_autocommit_is_refused_for_what_may_be_written_in_part(place: Place) -> None:
    await place.fill(JOBS, {"id": 1}, {"id": 2, "fence_token": 9})
    async with place.idle(isolation_level="AUTOCOMMIT") as given:
        for statement in (
            fenced_update(JOBS, 5, where=true(), values={"state": "stale"}),
            fenced_delete(Job, 5, where=true()),
            fenced_upsert(JOBS, 5, values=[{"id": 1}, {"id": 2}]),
        ):
            with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
                await done(execute_fenced(given, statement))
        one = fenced_update(JOBS, 5, where=JOBS.c.id == 1, values={"state": "one"})
        await done(execute_fenced(given, one))
        with pytest.raises(FencedOutError):
            await done(execute_fenced(given, fenced_delete(JOBS, 5, where=JOBS.c.id == 2)))
    assert [row[1] for row in await place.rows()] == ["one", None]


@pytest.mark.asyncio
async def test_another_key_than_the_primary_one_is_not_told(place: Place) -> None:
    await place.fill(PARTS, {"job": 1, "number": 1, "code": "secret", "fence": 9})
    for statement in (
        fenced_update(PARTS, 5, where=PARTS.c.code == "secret", values={}, fence="fence"),
        fenced_update_many(PARTS, 5, [{"code": "secret", "text": ""}], key=["code"], fence="fence"),
    ):
        with pytest.raises(FencedOutError) as refused:
            async with place.open() as given:
                await done(execute_fenced(given, statement))
        assert "secret" not in str(refused.value)
        assert "by code" in str(refused.value)
        assert refused.value.key == {"code": "secret"}


@pytest.mark.asyncio
async def test_two_values_for_one_column_name_no_row(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "fence_token": 9}, {"id": 2, "fence_token": 9})
    where = (JOBS.c.id == 1) & (JOBS.c.id == 2)
    with pytest.raises(RowMissing):
        async with place.open() as given:
            await done(execute_fenced(given, fenced_update(JOBS, 5, where=where, values={})))


@pytest.mark.asyncio
async def test_a_row_that_the_condition_excludes_is_said_to_be_that(place: Place) -> None:
    await place.fill(JOBS, {"id": 1, "state": "done"})
    where = (JOBS.c.id == 1) & (JOBS.c.state == "new")
    with pytest.raises(RowMissing, match="or the condition excludes it"):
        async with place.open() as given:
            await done(execute_fenced(given, fenced_update(JOBS, 5, where=where, values={})))


@pytest.mark.asyncio
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_on_sqlite_one_writes_at_a_time(place: Place) -> None:
    await place.fill(JOBS, {"id": 1})
    engines = [
        create_engine(f"sqlite:///{place.url}", connect_args={"timeout": wait}) for wait in (0.1, 5)
    ]

    def write(connection: Any, token: int) -> None:
        execute_fenced(connection, fenced_update(JOBS, token, where=JOBS.c.id == 1, values={}))

    hasty, patient = engines
    with patient.begin() as first:
        write(first, 5)
        with hasty.begin() as second, pytest.raises(OperationalError, match="is locked"):
            write(second, 6)
    with hasty.begin() as second:
        write(second, 6)
    with patient.connect() as reader, hasty.connect() as writer:
        reader.exec_driver_sql("BEGIN")
        reader.execute(select(JOBS)).all()
        write(writer, 7)
        with pytest.raises(OperationalError, match="is locked"):
            writer.commit()
        with pytest.raises(OperationalError, match="is locked"):
            write(reader, 8)
    for engine in engines:  # a commit that failed keeps its lock as long as its connection
        engine.dispose()
    assert await place.rows() == [(1, None, 0, 6)]


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": "AUTOCOMMIT"},
        {"connect_args": {"autocommit": True}},
        {"connect_args": {"isolation_level": None}},
    ],
    ids=["engine", "psycopg", "sqlite3"],
)
def test_autocommit_is_noticed_whoever_asked_for_it(
    options: Any, session: bool, tmp_path: Any, fencekit_postgres: Any
) -> None:
    # S4
    driver = options.get("connect_args", {})
    urls = [f"sqlite:///{tmp_path / 'test.db'}"] if "autocommit" not in driver else []
    if "isolation_level" not in driver:
        urls.append(fencekit_postgres.url.replace("postgresql", "postgresql+psycopg", 1))
    for url in urls:
        engine = create_engine(url, **options)
        with Session(engine) if session else engine.connect() as given:
            Job.metadata.create_all(given.connection() if isinstance(given, Session) else given)
            given.execute(delete(JOBS))
            given.execute(JOBS.insert(), [{"id": 1}, {"id": 2, "fence_token": 9}])
            for target in (JOBS, Job):
                many = fenced_update(target, 5, where=JOBS.c.id > 0, values={"state": "stale"})
                with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
                    execute_fenced(given, many)
            chosen = select(select(JOBS.c.id).where(JOBS.c.id == 1).cte().c.id)
            where = (JOBS.c.id == 1) & JOBS.c.id.in_(chosen)
            execute_fenced(given, fenced_update(JOBS, 5, where=where, values={"state": "one"}))
        with engine.connect() as given:  # it stays: nobody commits here
            rows = given.execute(select(JOBS.c.state).order_by(JOBS.c.id)).scalars().all()
            assert rows == ["one", None]
        engine.dispose()


def test_a_session_that_routes_writes_is_asked_for_the_writers_database(tmp_path: Any) -> None:
    leader, follower = (create_engine(f"sqlite:///{tmp_path / name}") for name in ("a", "b"))

    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
            return leader if isinstance(clause, (Update, Delete, Insert)) else follower

    for engine, fence in ((leader, 9), (follower, 0)):
        with engine.begin() as connection:
            for tables in (Job.metadata, metadata):
                tables.create_all(connection)
            connection.execute(JOBS.insert().values(id=1, fence_token=fence))
    for target in (JOBS, Job):
        for write in (
            fenced_update(target, 5, where=JOBS.c.id == 1, values={"state": "stale"}),
            fenced_upsert(target, 5, values={"id": 1, "state": "stale"}),
        ):
            with Routing() as session, pytest.raises(FencedOutError):
                execute_fenced(session, write)
    with Routing() as session, session.begin(), fenced_transaction(session, FenceToken(5, "a")):
        apply_once(session, "once")
    for table in metadata.sorted_tables:
        for engine, count in ((leader, 1), (follower, 0)):
            with engine.connect() as connection:
                assert len(connection.execute(select(table)).all()) == count
    for engine in (leader, follower):
        engine.dispose()


@pytest.mark.asyncio
async def test_an_insert_of_a_class_meets_the_other_classes_of_its_table(place: Place) -> None:
    await make(place)
    await place.fill(
        PERSON,
        {"id": 1, "kind": "person", "fence_token": 9},
        {"id": 2, "kind": "person", "fence_token": 1},
        {"id": 3, "kind": "manager", "fence_token": 1},
    )
    async with place.open() as given:
        for build in (fenced_insert, fenced_upsert):
            with pytest.raises(FencedOutError):
                await done(execute_fenced(given, build(Manager, 5, values={"id": 1, "name": "x"})))
        with pytest.raises(RowMissing):  # a person does not become a manager's row
            await done(execute_fenced(given, fenced_upsert(Manager, 5, values={"id": 2})))
        await done(execute_fenced(given, fenced_upsert(Manager, 5, values={"id": 3, "name": "m"})))
        await done(execute_fenced(given, fenced_upsert(Person, 5, values={"id": 3, "name": "p"})))
    assert [(row[2], row[3]) for row in await place.rows(PERSON)] == [
        (None, 9),
        (None, 1),
        ("p", 5),
    ]


@pytest.mark.asyncio
async def test_what_is_compared_with_null_names_no_row(place: Place) -> None:
    await place.fill(PARTS, {"job": 1, "number": 1, "fence": 9})
    where = PARTS.c.code == bindparam("code", None)
    with pytest.raises(RowMissing):
        async with place.open() as given:
            update = fenced_update(PARTS, 5, where=where, values={"text": "x"}, fence="fence")
            await done(execute_fenced(given, update))
