"""One function for SQLAlchemy's blocking connections and its asyncio ones.

SQLAlchemy's asyncio is its blocking code in a greenlet: what is written once for a connection runs
on the other kind through its `run_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
)
from sqlalchemy.orm import Session, scoped_session

T = TypeVar("T")

AnyConnection = Connection | Session | scoped_session[Any]
AnyAsyncConnection = AsyncConnection | AsyncSession | async_scoped_session[Any]


def is_async(given: object) -> bool:
    """Whether it is one of SQLAlchemy's asyncio kinds; TypeError if it is of no kind."""
    if isinstance(given, (AsyncConnection, AsyncSession, async_scoped_session)):
        return True
    if isinstance(given, (Connection, Session, scoped_session)):
        return False
    hint = " (an engine has no transaction: begin one)"
    raise TypeError(
        "pass a Connection, Session, AsyncConnection or AsyncSession, "
        f"not {type(given).__name__}{hint if isinstance(given, (Engine, AsyncEngine)) else ''}"
    )


def run(given: Any, work: Callable[[Any], T]) -> Any:
    """What `work` returns for the blocking kind behind it, or an awaitable of that."""
    if is_async(given):
        if isinstance(given, async_scoped_session):
            given = given()
        return given.run_sync(work)
    return work(given() if isinstance(given, scoped_session) else given)


def connection_of(given: Connection | Session, table: Table) -> Connection:
    """The connection to write the table on; what a session has pending stays so."""
    if isinstance(given, Connection):
        return given
    # A session that routes by the kind of statement sees one that writes.
    return given.connection(bind_arguments={"clause": table.insert()})


def in_autocommit(connection: Connection) -> bool:
    """Whether each statement commits by itself, by SQLAlchemy's option or the driver's."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    return getattr(connection.connection.dbapi_connection, "autocommit", None) is True


def driver_holds(connection: Connection) -> bool:
    """Whether the driver is in a transaction, or begins one before it writes.

    Without an isolation level sqlite3 does not; an application's own BEGIN may.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite" or driver.isolation_level is not None:
        return True
    return bool(driver.in_transaction)
