"""Tables: as SQLAlchemy and Alembic make them, found by their indexes."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from datetime import timedelta
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

import fencekit.sql.alembic
from fencekit import FencedOutError, FenceToken, RowMissing
from fencekit.sql import (
    FencedMixin,
    apply_once,
    execute_fenced,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
    fences_table,
    metadata,
    operations_table,
    purge_operations,
)
from tests.sql.site import ALL, JOBS


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
        await found.execute(text("DROP TABLE big"))
    await waiting.dispose()


def test_alembic_writes_the_statement_where_it_only_writes_a_script() -> None:
    script = io.StringIO()
    options = {"as_sql": True, "output_buffer": script}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    op: Any = Operations(context)
    op.add_fence_column("big")
    said = script.getvalue()
    assert "SET lock_timeout = '2000ms'" in said
    assert "ALTER TABLE big ADD COLUMN fence_token BIGINT DEFAULT 0 NOT NULL" in said


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


def test_our_tables_are_the_same_by_every_way_to_make_them(engine: Engine) -> None:
    names = {"fencekit_fences", "fencekit_operations"}
    assert names <= set(inspect(engine).get_table_names())
    assert set(metadata.tables) == names
