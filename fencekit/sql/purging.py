"""Forgetting what is old in the two tables, in batches that hold nobody up."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, overload

from sqlalchemy import Table, delete, func, select, tuple_

from fencekit.sql._running import AnyAsyncConnection, AnyConnection, connection_of, run
from fencekit.sql.tables import FENCES, OPERATIONS

LONG_AGO = timedelta(days=36525)


@overload
def purge_operations(
    connection: AnyConnection,
    older_than: timedelta,
    *,
    batch: int = 1000,
    table: Table = OPERATIONS,
) -> int: ...


@overload
def purge_operations(
    connection: AnyAsyncConnection,
    older_than: timedelta,
    *,
    batch: int = 1000,
    table: Table = OPERATIONS,
) -> Coroutine[Any, Any, int]: ...


def purge_operations(
    connection: Any, older_than: timedelta, *, batch: int = 1000, table: Table = OPERATIONS
) -> int | Coroutine[Any, Any, int]:
    """Delete up to ``batch`` operations that are older, and return how many; commit and repeat.

    A forgotten key is applied again if it is delivered again: keep them for longer than your
    broker can redeliver. Rows that another purge is at are left to it.

    >>> from datetime import timedelta
    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import metadata, purge_operations
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> with engine.begin() as connection:
    ...     purge_operations(connection, timedelta(days=30))
    0
    """
    return _purge(connection, older_than, batch, table)  # type: ignore[no-any-return]


@overload
def purge_fences(
    connection: AnyConnection, older_than: timedelta, *, batch: int = 1000, table: Table = FENCES
) -> int: ...


@overload
def purge_fences(
    connection: AnyAsyncConnection,
    older_than: timedelta,
    *,
    batch: int = 1000,
    table: Table = FENCES,
) -> Coroutine[Any, Any, int]: ...


def purge_fences(
    connection: Any, older_than: timedelta, *, batch: int = 1000, table: Table = FENCES
) -> int | Coroutine[Any, Any, int]:
    """Delete up to ``batch`` fences that nobody wrote under for so long; commit and repeat.

    A forgotten fence lets an old token pass: keep them for much longer than a worker can be frozen.

    >>> from datetime import timedelta
    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import metadata, purge_fences
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> with engine.begin() as connection:
    ...     purge_fences(connection, timedelta(days=30))
    0
    """
    return _purge(connection, older_than, batch, table)  # type: ignore[no-any-return]


def _purge(connection: Any, older_than: timedelta, batch: int, table: Table) -> Any:
    if not isinstance(older_than, timedelta):
        raise TypeError(f"older_than is a timedelta, not {type(older_than).__name__}")
    if not timedelta(0) <= older_than <= LONG_AGO:
        raise ValueError(f"older_than is between 0 and 100 years, not {older_than}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch is a number of rows, 1 or more, not {batch!r}")

    def work(given: Any) -> int:
        own = connection_of(given, table=table)
        now = own.execute(select(func.now())).scalar_one()  # the database's clock, not ours
        keys = list(table.primary_key)
        aged = table.c.at < now - older_than
        old = select(*keys).where(aged).order_by(table.c.at).limit(batch)
        if own.dialect.name == "postgresql":
            old = old.with_for_update(skip_locked=True)
        found = [tuple(row) for row in own.execute(old)]
        if found:
            # Looked at again: without a transaction it may have been applied anew meanwhile.
            return int(own.execute(delete(table).where(tuple_(*keys).in_(found), aged)).rowcount)
        return 0

    return run(connection, work)
