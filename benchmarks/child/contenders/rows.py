"""Ways to update a row of PostgreSQL, with psycopg and, awaited, with asyncpg.

Each operation is a transaction of its own on a row of its own; names choose the row.
"""

from __future__ import annotations

import itertools
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    func,
    select,
    update,
)
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencekit import FenceToken
from fencekit.sql import execute_fenced, fence_token, fenced_transaction, fenced_update

JOBS = Table(
    "benchmark_jobs",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("state", Text),
    Column("version", Integer),
    fence_token(),
)
TOKEN = FenceToken(1_796_000_000_000_000, "benchmark")


class Base(DeclarativeBase):
    pass


class Versioned(Base):
    """The same table, as SQLAlchemy's own optimistic lock sees it."""

    __tablename__ = "benchmark_jobs"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    state: Mapped[str]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class _Rows:
    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._count = itertools.count(1)

    def _next(self) -> int:
        return next(self._count) * 7919 % self._rows + 1

    def _plain(self, number: int) -> Any:
        return update(JOBS).where(JOBS.c.id == number).values(state="x", fence_token=TOKEN.value)

    def _by_hand(self, number: int) -> Any:
        fresh = JOBS.c.fence_token <= TOKEN.value
        statement = update(JOBS).where(JOBS.c.id == number, fresh)
        return statement.values(state="x", fence_token=TOKEN.value)

    def _fenced(self, number: int) -> Any:
        return fenced_update(JOBS, TOKEN, where=JOBS.c.id == number, values={"state": "x"})


class Psycopg(_Rows):
    """One connection of psycopg 3."""

    ASYNC = False

    def __init__(self, url: str, database: str, rows: int) -> None:
        super().__init__(rows)
        engine = create_engine(database.replace("postgresql", "postgresql+psycopg", 1))
        self._connection = engine.connect()
        self._session = Session(engine)

    def plain(self, name: str) -> None:
        with self._connection.begin():
            self._connection.execute(self._plain(self._next()))

    def by_hand(self, name: str) -> None:
        with self._connection.begin():
            self._connection.execute(self._by_hand(self._next()))

    def fenced(self, name: str) -> None:
        with self._connection.begin():
            self._connection.execute(self._fenced(self._next()))

    def told(self, name: str) -> None:
        with self._connection.begin():
            execute_fenced(self._connection, self._fenced(self._next()))

    def row_lock(self, name: str) -> None:
        number = self._next()
        with self._connection.begin():
            look = select(JOBS.c.fence_token).where(JOBS.c.id == number).with_for_update()
            self._connection.execute(look).one()
            self._connection.execute(self._plain(number))

    def advisory_lock(self, name: str) -> None:
        number = self._next()
        with self._connection.begin():
            self._connection.execute(select(func.pg_advisory_xact_lock(number)))
            self._connection.execute(self._plain(number))

    def version(self, name: str) -> None:
        with self._session.begin():
            row = self._session.get_one(Versioned, self._next())
            row.state = "y" if row.state == "x" else "x"

    def transaction(self, name: str) -> None:
        with fenced_transaction(self._connection, TOKEN):
            self._connection.execute(self._plain(self._next()))


class Asyncpg(_Rows):
    """One connection of asyncpg."""

    ASYNC = True

    def __init__(self, url: str, database: str, rows: int) -> None:
        super().__init__(rows)
        self._engine = create_async_engine(database.replace("postgresql", "postgresql+asyncpg", 1))
        self._connection: Any = None

    async def _open(self) -> Any:
        if self._connection is None:
            self._connection = await self._engine.connect()
        return self._connection

    async def plain(self, name: str) -> None:
        connection = await self._open()
        async with connection.begin():
            await connection.execute(self._plain(self._next()))

    async def by_hand(self, name: str) -> None:
        connection = await self._open()
        async with connection.begin():
            await connection.execute(self._by_hand(self._next()))

    async def fenced(self, name: str) -> None:
        connection = await self._open()
        async with connection.begin():
            await connection.execute(self._fenced(self._next()))

    async def told(self, name: str) -> None:
        connection = await self._open()
        async with connection.begin():
            await execute_fenced(connection, self._fenced(self._next()))

    async def transaction(self, name: str) -> None:
        connection = await self._open()
        async with fenced_transaction(connection, TOKEN):
            await connection.execute(self._plain(self._next()))
