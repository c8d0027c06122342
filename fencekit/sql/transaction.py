"""A whole transaction under a token: the resource's row of fences is held until its end.

Rules this module obeys:

* The row is taken in one statement, which refuses an older token (S1), and stays locked until the
  transaction ends (S5).
* Several rows are taken in one order, so that two holders of the same ones never wait for each
  other; and before what a session has pending, for the same reason.
* Without a transaction nothing would be held: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Table, and_, case, func, or_, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from fencekit import FenceToken
from fencekit.fencing import check_sequence, hidden_row, in_order, refusal, stored
from fencekit.sql._block import Block, C
from fencekit.sql._running import connection_of, driver_holds, in_autocommit
from fencekit.sql.tables import FENCES

Tokens = FenceToken | Iterable[FenceToken]


class fenced_transaction(Block[C]):
    """Fence everything that a transaction does: nothing in it commits under an older token.

    ``with`` (or ``async with``) begins a transaction and ends it, or joins the one that is open and
    leaves its end to whoever began it. ``token`` is one `FenceToken`, or several. A holder with a
    newer token waits until the transaction has ended. ``sequence``, a number, orders what one
    holder writes: of the same token only a larger one passes. ``table`` is one that
    `fences_table` made. Each block is entered once.

    In a savepoint that is rolled back the fence is gone too. What a session has pending is sent
    after the fence. The row is written where the session's bind for ``table`` says, and only what
    is written in the same database is fenced.

    Raises ``FencedOutError`` before the body starts, ``RuntimeError`` at the end of a body that
    ended the transaction itself. At REPEATABLE READ and SERIALIZABLE a race ends in the database's
    serialization failure, here or at the commit: repeat the transaction.

    >>> from sqlalchemy import create_engine, text
    >>> from fencekit import FenceToken
    >>> from fencekit.sql import fenced_transaction, metadata
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> with engine.connect() as connection:
    ...     with fenced_transaction(connection, FenceToken(42, "order:7")):
    ...         _ = connection.execute(text("SELECT 1"))
    >>> with engine.connect() as connection:
    ...     with fenced_transaction(connection, FenceToken(41, "order:7")):
    ...         ...  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencekit.errors.FencedOutError: token 41 of 'order:7' is older than 42, ...
    """

    def __init__(
        self,
        connection: C,
        token: Tokens,
        *,
        sequence: int | None = None,
        table: Table = FENCES,
    ) -> None:
        super().__init__(connection)
        self._tokens = in_order(token)
        self._sequence = check_sequence(sequence)
        self._table = check_table(table, FENCES, "fences_table")

    def __enter__(self) -> C:
        self._enter_blocking()
        return self._connection

    async def __aenter__(self) -> C:
        await self._enter_asyncio()
        return self._connection

    def _prepare(self, given: Any) -> None:
        take_fences(given, self._tokens, self._sequence, self._table)


def check_table(table: object, like: Table, maker: str) -> Table:
    """The table, if it has the columns of ours; TypeError or ValueError if it does not."""
    if not isinstance(table, Table):
        raise TypeError(f"pass a Table that {maker} made, not {type(table).__name__}")
    missing = [column.key for column in like.c if column.key not in table.c]
    if missing:
        raise ValueError(
            f"{table.fullname} has no column {', '.join(missing)}: pass a table that {maker} made"
        )
    return table


def holding_connection(given: Connection | Session, table: Table) -> Connection:
    """The connection, in a transaction; ValueError where each statement commits by itself.

    What a session has pending is not sent before what is done here.
    """
    connection = connection_of(given, table)
    dialect = connection.dialect.name
    if dialect not in ("postgresql", "sqlite"):
        raise NotImplementedError(
            f"this needs INSERT ... ON CONFLICT, which {dialect} does not have: use fenced_update"
        )
    if not in_autocommit(connection):
        if not connection.in_transaction():
            connection.begin()  # as the first statement would
        if driver_holds(connection):
            return connection
    raise ValueError("the connection is in AUTOCOMMIT, so nothing would be held: use another")


@lru_cache(maxsize=16)
def _taking(table: Table, *, ordered: bool) -> Any:
    """The statement that takes rows, made once: that costs more than to run it."""
    statement = postgresql.insert(table)  # SQLite compiles it as well
    new = statement.excluded
    same = table.c.token == new.token
    fresh = table.c.token <= new.token
    position: Any = case((same, table.c.sequence), else_=0)
    if ordered:
        fresh = or_(table.c.token < new.token, and_(same, table.c.sequence < new.sequence))
        position = new.sequence
    statement = statement.on_conflict_do_update(
        index_elements=[table.c.kind, table.c.resource],
        set_={"token": new.token, "sequence": position, "at": func.now()},
        where=fresh,
    )
    return statement.returning(table.c.kind, table.c.resource)


def take_fences(
    given: Connection | Session,
    tokens: Sequence[FenceToken],
    sequence: int | None,
    table: Table,
) -> None:
    """Take the rows of these resources, or raise FencedOutError."""
    connection = holding_connection(given, table)
    rows = [
        {
            "kind": token.kind,
            "resource": stored(token.resource),
            "token": token.value,
            "sequence": sequence or 0,
        }
        for token in tokens
    ]
    statement = _taking(table, ordered=sequence is not None)
    if len(rows) > 1:
        found = connection.execute(statement.values([{**row, "at": func.now()} for row in rows]))
    else:
        found = connection.execute(statement.values(at=func.now()), rows[0])
    taken = found.all()
    if len(taken) == len(rows):
        return
    known = set(map(tuple, taken))
    missing = next(row for row in rows if (row["kind"], row["resource"]) not in known)
    token = tokens[rows.index(missing)]
    now = select(table.c.token, table.c.sequence).where(
        table.c.kind == missing["kind"], table.c.resource == missing["resource"]
    )
    row = connection.execute(now).one_or_none()
    if row is None:
        raise hidden_row(f"the fence of {token.resource!r}", table.fullname)
    raise refusal(token, sequence, table.fullname, int(row.token), int(row.sequence))
