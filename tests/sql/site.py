"""One way to write a test for every kind of SQLAlchemy connection, on real databases."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    delete,
    event,
    select,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencekit.sql import FencedMixin, fence_token
from fencekit.sql import metadata as own_metadata


class Base(DeclarativeBase):
    """The mapped classes of these tests."""


class Job(FencedMixin, Base):
    """A row with a fence."""

    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str | None]
    # An attribute whose column has another name.
    tries: Mapped[int] = mapped_column("attempts", default=0, server_default="0")


JOBS: Any = Job.__table__

more = MetaData()
PARTS = Table(
    "parts",
    more,
    Column("job", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("code", Text),
    Column("text", Text),
    fence_token("fence"),
    UniqueConstraint("code"),
)
# As it is right after ALTER TABLE ... ADD COLUMN without a default.
OLD: Any = Table(
    "old",
    more,
    Column("id", Integer, primary_key=True),
    Column("owner", Text),
    Column("text", Text),
    Column("fence_token", fence_token().type),
)
NUMBERED = Table(
    "numbered", more, Column("id", Integer, primary_key=True), Column("text", Text), fence_token()
)
ALL = (Base.metadata, more, own_metadata)

KINDS = {
    "sqlite": ("sqlite", False, False),
    "sqlite-session": ("sqlite", False, True),
    "aiosqlite": ("sqlite+aiosqlite", True, False),
    "aiosqlite-session": ("sqlite+aiosqlite", True, True),
    "psycopg": ("postgresql+psycopg", False, False),
    "psycopg-session": ("postgresql+psycopg", False, True),
    "psycopg-async": ("postgresql+psycopg", True, False),
    "psycopg-async-session": ("postgresql+psycopg", True, True),
    "asyncpg": ("postgresql+asyncpg", True, False),
    "asyncpg-session": ("postgresql+asyncpg", True, True),
}


async def done(result: Any) -> Any:
    """The result, awaited where it has to be."""
    return await result if inspect.isawaitable(result) else result


class Place:
    """A database, and one kind of connection to it."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.kind, self.url = kind, url
        driver, self.waits, self.session = KINDS[kind]
        self.postgres = driver.startswith("postgresql")
        full = url.replace("postgresql", driver, 1) if self.postgres else f"{driver}:///{url}"
        make: Any = create_async_engine if self.waits else create_engine
        self.engine: Engine | AsyncEngine = make(full, **options)

    async def prepare(self) -> None:
        """All tables there, and empty."""
        async with self.open(plain=True) as connection:
            for metadata in ALL:
                if self.waits:
                    await connection.run_sync(metadata.create_all)
                else:
                    metadata.create_all(connection)
                for table in metadata.sorted_tables:
                    await done(connection.execute(delete(table)))

    @asynccontextmanager
    async def open(self, *, plain: bool = False, **options: Any) -> AsyncIterator[Any]:
        """A connection or session in a transaction that ends with the block."""
        async with self.idle(plain=plain, **options) as given:
            if self.waits:
                async with given.begin():
                    yield given
            else:
                with given.begin():
                    yield given

    @asynccontextmanager
    async def idle(self, *, plain: bool = False, **options: Any) -> AsyncIterator[Any]:
        """A connection or session that has not begun anything."""
        engine: Any = self.engine.execution_options(**options) if options else self.engine
        if self.session and not plain:
            made: Any = AsyncSession(engine) if self.waits else Session(engine)
        else:
            made = engine.connect()
        if self.waits:
            async with made as given:
                yield given
        else:
            with made as given:
                yield given

    def sent(self) -> list[str]:
        """What is sent to the database from now on, a statement each."""
        sent: list[str] = []
        engine: Any = self.engine.sync_engine if self.waits else self.engine  # type: ignore[union-attr]
        event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
        return sent

    async def rows(self, table: Any = JOBS) -> list[tuple[Any, ...]]:
        """All rows, as everybody sees them now."""
        async with self.open(plain=True) as connection:
            result = await done(connection.execute(select(table).order_by(*table.primary_key)))
            return [tuple(row) for row in result]

    async def fill(self, table: Any, *rows: dict[str, Any]) -> None:
        async with self.open(plain=True) as connection:
            for row in rows:
                await done(connection.execute(table.insert().values(row)))

    async def close(self) -> None:
        await done(self.engine.dispose())
