"""Tables: as SQLAlchemy and Alembic make them, found by their indexes."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import DropTable

import fencekit.sql.alembic
from fencekit import FencedOutError, FenceToken, RowMissing
from fencekit.sql import (
    FencedMixin,
    apply_once,
    execute_fenced,
    fence_token,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
    fences_table,
    metadata,
    operations_table,
    purge_fences,
    purge_operations,
)
from tests.sql.site import ALL, JOBS, KINDS, Place, done

POSTGRES = [kind for kind in KINDS if "sqlite" not in kind]


@pytest.fixture
def engine(fencekit_postgres: Any) -> Iterator[Engine]:
    engine = create_engine(fencekit_postgres.url.replace("postgresql", "postgresql+psycopg", 1))
    for tables in ALL:
        tables.create_all(engine)
    with engine.begin() as connection:
        for tables in ALL:
            for table in tables.sorted_tables:
                connection.execute(table.delete())
    yield engine
    engine.dispose()


def test_the_tables_may_have_other_names_and_a_schema(engine: Engine) -> None:
    own = MetaData()
    fences = fences_table(own, "my_fences", schema="own")
    operations = operations_table(own, "my_operations", schema="own")
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA own"))
        own.create_all(connection)
        with fenced_transaction(connection, FenceToken(5, "a"), table=fences):
            pass
        token = FenceToken(6, "a")
        assert apply_once(connection, "x", token, table=operations, fences=fences).first
        assert connection.scalar(text("SELECT token FROM own.my_fences")) == 6
        assert connection.scalar(text("SELECT count(*) FROM fencekit_fences")) == 0
        connection.execute(text("DROP SCHEMA own CASCADE"))


def test_a_fence_column_is_bigint_not_null_default_0(engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(FencedMixin, Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(engine)
    try:
        (column,) = [c for c in inspect(engine).get_columns("orders") if c["name"] != "id"]
        assert (str(column["type"]), column["nullable"]) == ("BIGINT", False)
        assert column["default"] in ("0", "'0'::bigint")
        assert Order(id=1).fence_token is None  # until it is flushed
    finally:
        Base.metadata.drop_all(engine)


def plan(connection: Any, statement: Any) -> str:
    compiled = statement.compile(
        dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}
    )
    query = str(compiled).replace("%%", "%")
    return "\n".join(
        row[0] for row in connection.execute(text("EXPLAIN " + query.replace(":", r"\:")))
    )


def test_rows_are_found_by_the_index_of_the_callers_condition(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        many = "INSERT INTO jobs SELECT n, 'x', 0, 0 FROM generate_series(1, 2000) n"
        connection.execute(text(many))
        update = fenced_update(JOBS, 5, where=JOBS.c.id == 7, values={"state": "y"})
        assert "Index Scan using jobs_pkey" in plan(connection, update)
        seen: list[str] = []

        def explain(_: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
            if "jobs" in statement and "EXPLAIN" not in statement:
                cursor.execute("EXPLAIN " + statement, parameters)
                seen.append("\n".join(row[0] for row in cursor.fetchall()))

        event.listen(connection, "before_cursor_execute", explain)
        execute_fenced(connection, update)
        execute_fenced(connection, fenced_upsert(JOBS, 6, values={"id": 7, "state": "z"}))
        event.remove(connection, "before_cursor_execute", explain)
        assert len(seen) == 2
        assert "Seq Scan" not in "".join(seen)
        old = purge_operations
        with_index = text(
            "EXPLAIN SELECT key FROM fencekit_operations WHERE at < now() ORDER BY at LIMIT 10"
        )
        rows = connection.execute(with_index)
        assert "fencekit_operations_at" in "".join(row[0] for row in rows)
        assert old(connection, timedelta(days=1)) == 0


def add_column(connection: Any, *names: str, **options: Any) -> None:
    op: Any = Operations(MigrationContext.configure(connection))
    op.add_fence_column(*names, **options)


def test_alembic_adds_the_column_and_waits_for_nobody_for_long(engine: Engine) -> None:
    assert fencekit.sql.alembic.AddFenceColumn("a").reverse() is not None
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
        connection.execute(text("INSERT INTO big SELECT generate_series(1, 1000)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))  # holds its lock until the end
    with engine.begin() as connection, pytest.raises(OperationalError):
        add_column(connection, "big", lock_timeout=0.01, tries=2)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(OperationalError):
            add_column(connection, "big", lock_timeout=0.01, tries=2)
        assert connection.scalar(text("SHOW lock_timeout")) == "0"
    ended = threading.Timer(0.1, reading.close)
    ended.start()
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '3s'"))
        add_column(connection, "big", "fence", lock_timeout=0.02, tries=500)
        assert connection.scalar(text("SHOW lock_timeout")) == "3s"
        assert connection.scalar(text("SELECT sum(fence) FROM big")) == 0
    ended.join()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        add_column(connection, "big", "another")
        connection.execute(text("DROP TABLE big"))


@pytest.mark.asyncio
async def test_alembic_tries_again_with_asyncpg_too(engine: Engine, fencekit_postgres: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))
    url = fencekit_postgres.url.replace("postgresql", "postgresql+asyncpg", 1)
    waiting = create_async_engine(url)
    threading.Timer(0.1, reading.close).start()
    async with waiting.begin() as found:
        await found.run_sync(add_column, "big", lock_timeout=0.02, tries=500)
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))
    threading.Timer(0.1, reading.close).start()
    async with waiting.connect() as found:
        await found.execution_options(isolation_level="AUTOCOMMIT")
        await found.run_sync(add_column, "big", "another", lock_timeout=0.02, tries=500)
        assert await found.scalar(text("SHOW lock_timeout")) == "0"
        await found.execute(text("DROP TABLE big"))
    await waiting.dispose()


def test_alembic_writes_the_statement_where_it_only_writes_a_script() -> None:
    alter = "ALTER TABLE big ADD COLUMN fence_token BIGINT DEFAULT 0 NOT NULL;"
    assert script("postgresql", "big", lock_timeout=0.5).split("\n\n")[:-1] == [
        "SET lock_timeout = '500ms';",
        alter,
        "RESET lock_timeout;",  # the script goes on
    ]
    assert script("sqlite", "big").strip() == alter


def script(dialect: str, *names: str, **options: Any) -> str:
    written = io.StringIO()
    settings = {"as_sql": True, "output_buffer": written}
    context = MigrationContext.configure(dialect_name=dialect, opts=settings)
    op: Any = Operations(context)
    op.add_fence_column(*names, **options)
    return written.getvalue()


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_alembic_refuses_what_cannot_be_meant(dialect: str) -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tries": 0}, ValueError, "tries is 1 or more, not 0"),
        ({"tries": -3}, ValueError, "tries"),
        ({"tries": "5"}, TypeError, "tries"),
        ({"tries": True}, TypeError, "tries"),
        ({"tries": 1.0}, TypeError, "tries"),
        ({"lock_timeout": 0}, ValueError, "lock_timeout is between 0.001 and 3600 seconds, not 0"),
        ({"lock_timeout": -1}, ValueError, "lock_timeout"),
        ({"lock_timeout": 1e-9}, ValueError, "lock_timeout"),
        ({"lock_timeout": 10**9}, ValueError, "lock_timeout"),
        ({"lock_timeout": float("nan")}, ValueError, "lock_timeout"),
        ({"lock_timeout": float("inf")}, ValueError, "lock_timeout"),
        ({"lock_timeout": "2s"}, TypeError, "lock_timeout"),
        ({"lock_timeout": True}, TypeError, "lock_timeout"),
        ({"lock_timeout": None}, TypeError, "lock_timeout"),
        ({"name": ""}, ValueError, "name"),
        ({"name": 5}, TypeError, "name"),
        ({"schema": ""}, ValueError, "schema"),
        ({"schema": 5}, TypeError, "schema"),
        ({"table": ""}, ValueError, "table"),
        ({"table": JOBS}, TypeError, "table"),
    ]
    for options, error, said in refused:
        with pytest.raises(error, match=said):
            script(dialect, **{"table": "big", **options})


def test_alembic_keeps_nobody_waiting_for_what_the_migration_holds(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE other (id int PRIMARY KEY)"))
        connection.execute(text("INSERT INTO other VALUES (1)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))
    before = (
        "ALTER TABLE other ADD COLUMN more int",
        "UPDATE other SET id = 2",
        "DROP TABLE other",
        "CREATE INDEX other_again ON other (id)",
    )
    for statement in before:
        begun = time.monotonic()
        with engine.begin() as connection:
            connection.execute(text(statement))
            with pytest.raises(
                RuntimeError, match=r"table big is in use.*autocommit_block"
            ) as told:
                add_column(connection, "big", lock_timeout=20, tries=20)
            assert ("what it has dropped" if "DROP" in statement else "other") in str(told.value)
            assert connection.scalar(text("SHOW lock_timeout")) == "0"
            connection.rollback()
        assert time.monotonic() - begun < 10
    reading.close()
    with engine.begin() as connection:  # what it has made itself it need not wait for
        connection.execute(text("CREATE TABLE made (id int PRIMARY KEY)"))
        add_column(connection, "made")
        add_column(connection, "big")
        assert connection.scalar(text("SELECT count(fence_token) FROM made")) == 0
        connection.execute(text("DROP TABLE big, other, made"))


def test_alembic_in_an_autocommit_block_holds_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE other (id int PRIMARY KEY)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))

    def read_other() -> None:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '2s'"))
            connection.execute(text("SELECT * FROM other"))
        reading.close()

    other = threading.Timer(0.1, read_other)
    other.start()
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        op: Any = Operations(context)
        with context.begin_transaction():
            op.execute("ALTER TABLE other ADD COLUMN more int")
            with context.autocommit_block():
                op.add_fence_column("big", lock_timeout=0.02, tries=500)
                with engine.begin() as somebody:  # also after it
                    somebody.execute(text("SET LOCAL lock_timeout = '2s'"))
                    assert somebody.scalar(text("SELECT count(fence_token) FROM big")) == 0
            op.execute("DROP TABLE big, other")
    other.join()


def test_alembics_own_table_is_none_that_others_wait_for(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))
    ended = threading.Timer(0.1, reading.close)
    ended.start()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num text PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('a')"))
        add_column(connection, "big", lock_timeout=0.02, tries=500)
        connection.execute(text("DROP TABLE big, alembic_version"))
    ended.join()


def test_alembic_tries_again_with_a_driver_that_says_pgcode(engine: Engine) -> None:
    class AsPsycopg2(Exception):
        pgcode = "55P03"

    def translate(context: Any) -> Exception:
        return OperationalError(context.statement, context.parameters, AsPsycopg2("lock timeout"))

    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
    reading = engine.connect()
    reading.execute(text("SELECT * FROM big"))
    event.listen(engine, "handle_error", translate, retval=True)
    ended = threading.Timer(0.1, reading.close)
    ended.start()
    with engine.begin() as connection:
        add_column(connection, "big", lock_timeout=0.02, tries=500)
        connection.execute(text("DROP TABLE big"))
    ended.join()


def test_a_condition_over_other_tables_needs_no_rights_and_no_locks_there(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in (
            "CREATE TABLE others (id int PRIMARY KEY, amount int)",
            "INSERT INTO others VALUES (1, 5)",
            "INSERT INTO jobs (id, fence_token) VALUES (1, 8), (2, 0)",
            "DROP ROLE IF EXISTS worker",
            "CREATE ROLE worker",
            "GRANT SELECT ON others TO worker",
            "GRANT SELECT, UPDATE ON jobs TO worker",
        ):
            connection.execute(text(statement))
    others = Table("others", MetaData(), Column("id", Integer), Column("amount", Integer))
    sums = select(others.c.id, func.sum(others.c.amount).label("sum")).group_by(others.c.id)
    grouped = sums.subquery()
    try:
        joined = (others.c.amount == JOBS.c.attempts + 5, grouped.c.sum == JOBS.c.attempts + 5)
        for more in joined:
            for number, error in ((1, FencedOutError), (2, None), (3, RowMissing)):
                where = (JOBS.c.id == number) & more
                statement = fenced_update(JOBS, 7, where=where, values={"state": "x"})
                with engine.begin() as connection:
                    connection.execute(text("SET LOCAL ROLE worker"))
                    if error is None:
                        assert execute_fenced(connection, statement).count == 1
                    else:
                        with pytest.raises(error):
                            execute_fenced(connection, statement)
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE others; DROP OWNED BY worker; DROP ROLE worker"))


def test_alembic_adds_the_column_on_sqlite() -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE big (id int PRIMARY KEY)"))
        connection.execute(text("INSERT INTO big VALUES (1)"))
        op: Any = Operations(MigrationContext.configure(connection))
        op.add_fence_column("big")
        assert connection.scalar(text("SELECT fence_token FROM big")) == 0
    engine.dispose()


@pytest.mark.asyncio
async def test_null_in_a_column_that_is_declared_so_is_never_fenced(place: Place) -> None:
    # scenario 83
    metadata = MetaData()
    old = Table(
        "old_jobs",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("status", Text),
        fence_token(nullable=True),
    )
    async with place.open(plain=True) as given:
        if place.waits:
            await given.run_sync(metadata.drop_all)
            await given.run_sync(metadata.create_all)
        else:
            metadata.drop_all(given)
            metadata.create_all(given)
    await place.fill(old, {"id": 1, "fence_token": None}, {"id": 2, "fence_token": 8}, {"id": 3})

    async def write(number: int, token: int) -> int:
        async with place.open() as given:
            update = fenced_update(
                old, token, where=old.c.id == number, values={"status": str(token)}
            )
            return int((await done(execute_fenced(given, update))).count)

    assert await write(1, 5) == 1
    assert await write(3, 5) == 1
    for number in (1, 2):
        with pytest.raises(FencedOutError):
            await write(number, 4)
    assert await place.rows(old) == [(1, "5", 5), (2, None, 8), (3, "5", 5)]
    async with place.open(plain=True) as given:
        await done(given.execute(DropTable(old)))


def test_a_fence_column_is_declared_as_it_is() -> None:
    class Base(DeclarativeBase):
        pass

    class Old(Base):
        __tablename__ = "old_jobs"
        id: Mapped[int] = mapped_column(primary_key=True)
        fence = fence_token("fence", nullable=True)

    assert Old.__table__.c.fence.nullable
    update = fenced_update(Old, 5, where=Old.id == 1, values={}, fence="fence")
    assert "fence IS NULL OR" in str(update)
    assert not fence_token().nullable
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"name": 5}, TypeError),
        ({"name": None}, TypeError),
        ({"name": ""}, ValueError),
        ({"nullable": "no"}, TypeError),
        ({"nullable": None}, TypeError),
    ]
    for options, error in refused:
        with pytest.raises(error, match=next(iter(options))):
            fence_token(**options)


@pytest.mark.asyncio
async def test_a_purge_that_cannot_be_meant_is_refused(place: Place) -> None:
    fences, operations = metadata.tables["fencekit_fences"], metadata.tables["fencekit_operations"]
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (30, {}, TypeError, "older_than"),
        (timedelta(-1), {}, ValueError, "older_than"),
        (timedelta(days=36526), {}, ValueError, "100 years"),
        (timedelta.max, {}, ValueError, "100 years"),
        (timedelta(1), {"batch": 0}, ValueError, "batch"),
        (timedelta(1), {"batch": 10_001}, ValueError, "10000"),
        (timedelta(1), {"batch": 10**20}, ValueError, "10000"),
        (timedelta(1), {"batch": "5"}, TypeError, "batch"),
        (timedelta(1), {"batch": True}, TypeError, "batch"),
        (timedelta(1), {"table": "fencekit_fences"}, TypeError, "table"),
        (timedelta(1), {"table": None}, TypeError, "table"),
    ]
    others = ((purge_operations, fences, "key"), (purge_fences, operations, "resource"))
    async with place.open() as given:
        sent = place.sent()
        for purge, other, said in others:
            for age, options, error, about in wrong:
                with pytest.raises(error, match=about):
                    purge(given, age, **options)
            with pytest.raises(TypeError, match=said):
                purge(given, timedelta(1), table=other)
        assert sent == []
        for purge in (purge_operations, purge_fences):
            assert await done(purge(given, timedelta(days=36525), batch=10_000)) == 0


@pytest.mark.asyncio
async def test_the_largest_batch_is_forgotten_at_once(place: Place) -> None:
    fences, operations = metadata.tables["fencekit_fences"], metadata.tables["fencekit_operations"]
    number, old = 10_000, datetime.now(timezone.utc) - timedelta(days=40)
    async with place.open(plain=True) as given:
        rows = [{"kind": "lock", "resource": f"a{n}", "token": 1, "at": old} for n in range(number)]
        await done(given.execute(fences.insert(), rows))
        keys = [{"key": f"pay:{n}", "at": old} for n in range(number)]
        await done(given.execute(operations.insert(), keys))
    for purge in (purge_operations, purge_fences):
        async with place.open() as given:
            assert await done(purge(given, timedelta(days=30), batch=number)) == number


@pytest.mark.asyncio
@pytest.mark.parametrize("place", POSTGRES, indirect=True)
async def test_a_purge_leaves_the_rows_that_others_are_at(place: Place) -> None:
    fences = metadata.tables["fencekit_fences"]
    old = datetime.now(timezone.utc) - timedelta(days=40)
    await place.fill(
        fences,
        *({"kind": "lock", "resource": str(n), "token": 1, "at": old} for n in range(4)),
    )
    async with place.open(plain=True) as writer:
        mine = fences.c.resource == "0"
        await done(writer.execute(fences.update().where(mine).values(at=func.now())))
        async with place.open() as given:
            assert await done(purge_fences(given, timedelta(days=30), batch=2)) == 2
            async with place.open() as another:
                assert await done(purge_fences(another, timedelta(days=30))) == 1
    assert [row[1] for row in await place.rows(fences)] == ["0"]


def test_our_tables_are_the_same_by_every_way_to_make_them(engine: Engine) -> None:
    names = {"fencekit_fences", "fencekit_operations"}
    assert names <= set(inspect(engine).get_table_names())
    assert set(metadata.tables) == names
