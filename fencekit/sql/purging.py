"""Forgetting what is old in the two tables, in batches that hold nobody up."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, overload

from sqlalchemy import Table, delete, func, select, tuple_

from fencekit.fencing import check_purge
from fencekit.sql._running import AnyAsyncConnection, AnyConnection, connection_of, run
from fencekit.sql.tables import FENCES, OPERATIONS


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
    broker can redeliver. Rows that another purge is at are left to it. ``older_than`` is at most
    100 years, ``batch`` at most 10,000.

    Raises ``TypeError`` or ``ValueError`` for what cannot be meant, before anything is sent.

    >>> from datetime import timedelta
    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import metadata, purge_operations
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> with engine.begin() as connection:
    ...     purge_operations(connection, timedelta(days=30))
    0
    """
    return _purge(connection, older_than, batch, table, OPERATIONS)  # type: ignore[no-any-return]


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
    Otherwise as `purge_operations`.

    >>> from datetime import timedelta
    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import metadata, purge_fences
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> with engine.begin() as connection:
    ...     purge_fences(connection, timedelta(days=30))
    0
    """
    return _purge(connection, older_than, batch, table, FENCES)  # type: ignore[no-any-return]


def _purge(connection: Any, older_than: timedelta, batch: int, table: Table, usual: Table) -> Any:
    check_purge(older_than, batch)
    _check_table(table, usual)

    def work(given: Any) -> int:
        own = connection_of(given, table)
        now = own.execute(select(func.now())).scalar_one()  # the database's clock, not ours
        keys = list(table.primary_key)
        aged = table.c.at < now - older_than
        old: Any = select(*keys).where(aged).order_by(table.c.at).limit(batch)
        if own.dialect.name == "postgresql":
            # A subquery could be run for each row, and pass the limit; this runs once.
            old = select(old.with_for_update(skip_locked=True).cte("fencekit_old"))
        # The age is asked for again: a row may have been written anew until it is locked.
        return int(own.execute(delete(table).where(tuple_(*keys).in_(old), aged)).rowcount)

    return run(connection, work)


def _check_table(table: object, usual: Table) -> None:
    """Refuse the other one of the two tables, of which everything would be forgotten."""
    names = usual.columns.keys()
    if not isinstance(table, Table) or not set(names) <= set(table.columns.keys()):
        raise TypeError(f"table is a Table with the columns {', '.join(names)}, not {table!r}")
