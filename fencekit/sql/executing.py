"""Running a fenced statement, and telling stale, missing and unknown apart.

Rules this module obeys:

* A connection to PostgreSQL gets one statement that writes and says what became of it; elsewhere a
  second one in the same transaction looks, and only when the first leaves a question (S2).
* A session runs a statement on a mapped class as it runs its own: with its events and criteria, and
  with SQLAlchemy's synchronization of its objects.
* Both have the options that the caller gave to the statement.
* A row that was refused raises, however many were written (S4).
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

from sqlalchemy import (
    CTE,
    Connection,
    Delete,
    Insert,
    Row,
    Update,
    and_,
    case,
    func,
    literal_column,
    select,
)
from sqlalchemy.orm import Session
from sqlalchemy.sql import visitors

from fencekit import (
    FencedOutError,
    RowCountUnknown,
    RowExists,
    RowMissing,
    UnexpectedRows,
)
from fencekit.sql._fenced import Fenced, Statement, is_unchanged
from fencekit.sql._objects import write_on
from fencekit.sql._running import (
    AnyAsyncConnection,
    AnyConnection,
    driver_holds,
    in_autocommit,
    run,
)


class Newer(NamedTuple):
    """A row that refuses the token."""

    fence: int
    key: dict[str, Any] | None


@dataclass(frozen=True)
class Written:
    """What a fenced statement wrote."""

    count: int
    """The number of rows."""
    rows: Sequence[Row[Any]] = ()
    """What the statement's own ``returning()`` asked for."""


@overload
def execute_fenced(
    connection: AnyConnection, statement: Update | Delete | Insert, *, rows: int | None = None
) -> Written: ...


@overload
def execute_fenced(
    connection: AnyAsyncConnection, statement: Update | Delete | Insert, *, rows: int | None = None
) -> Coroutine[Any, Any, Written]: ...


def execute_fenced(
    connection: Any, statement: Update | Delete | Insert, *, rows: int | None = None
) -> Written | Coroutine[Any, Any, Written]:
    """Run a statement of this package, and return what it wrote or raise why it did not.

    With an ``AsyncConnection`` or ``AsyncSession`` the result is to be awaited. ``rows`` is how
    many rows the statement has to write. Objects of a session that were written are brought up to
    date or, where Python does not know the new value, expired.

    Raises ``FencedOutError`` if a row it means carries a newer token, also if others were written;
    ``RowMissing`` if none was written, or fewer than ``rows``; ``RowExists`` for an insert;
    ``UnexpectedRows`` for more than ``rows``, or than the key in its condition can have;
    ``RowCountUnknown`` if the driver does not tell. After each of them, roll back. What
    the database raises passes through, serialization failures included. ``TypeError`` for a
    statement that was changed since, other than by ``returning()`` and ``execution_options()``;
    ``RuntimeError`` for many rows with AUTOCOMMIT, where nothing could be rolled back.

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine
    >>> from fencekit.sql import execute_fenced, fence_token, fenced_insert, fenced_update
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("status", Text), fence_token())
    >>> engine = create_engine("sqlite://")
    >>> with engine.begin() as connection:
    ...     jobs.create(connection)
    ...     _ = execute_fenced(connection, fenced_insert(jobs, 42, values={"id": 7}))
    >>> with engine.begin() as connection:
    ...     stale = fenced_update(jobs, 41, where=jobs.c.id == 7, values={"status": "old"})
    ...     execute_fenced(connection, stale)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencekit.errors.FencedOutError: token 41 is older than 42, which jobs {'id': 7} carries: ...
    """
    if not isinstance(statement, Statement):
        raise TypeError("execute_fenced runs what fenced_update and its kin return")
    facts = statement.fenced
    if not is_unchanged(statement):
        raise TypeError(
            f"the statement was changed since fenced_{facts.verb} made it, which could let a stale "
            "value pass: say everything there, and add returning() or execution_options() alone"
        )
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is a number of rows, 1 or more, not {rows!r}")
    return run(connection, lambda given: _execute(given, statement, facts, rows))  # type: ignore[no-any-return]


def _execute(
    given: Connection | Session,
    statement: Statement,
    facts: Fenced,
    rows: int | None,
) -> Written:
    target = facts.target
    key = target.pinned(facts.where)
    if key is not None:  # what else the condition says, a newer holder may have changed
        row = and_(*(target.source.c[name] == value for name, value in key.items()))
        facts = replace(facts, key=key, most=1, where=row)
    # A session that routes by mapper and kind of statement is asked for the one that writes.
    connection: Any = given
    if isinstance(given, Session):
        if given.autoflush:
            given.flush()
        writer = {"mapper": target.mapper, "clause": statement}
        connection = given.connection(bind_arguments=writer)
    _check_possible(connection, facts)
    if connection.dialect.name == "sqlite" and _has_with(statement):
        _begin(connection)
    look = _Look(connection, facts, statement.get_execution_options())
    if isinstance(given, Session) and target.mapper is not None:
        look.session = given
        count, found = write_on(given, statement, facts)
        newer = look.unless_done(count)
    elif connection.dialect.name != "postgresql" or _has_to_be_plain(statement, facts):
        count, found = _write(connection, statement, facts)
        newer = look.unless_done(count)
    else:
        found = ()
        count, newer = _write_and_look(statement, facts, look)
    _judge(facts, count, newer, rows)
    return Written(count, found)


def _check_possible(connection: Connection, facts: Fenced) -> None:
    dialect = connection.dialect.name
    if facts.verb in ("insert", "upsert") and dialect not in ("postgresql", "sqlite"):
        raise NotImplementedError(
            f"fenced_{facts.verb} needs INSERT ... ON CONFLICT, which {dialect} does not have: "
            "write the row in a transaction that fenced_update protects"
        )
    if facts.most != 1 and _commits_by_itself(connection):
        raise RuntimeError(
            f"fenced_{facts.verb} may write some rows of {facts.target.name} and be refused for "
            "others, and with AUTOCOMMIT the first could not be rolled back: use a transaction, or "
            "name one row by its key"
        )


def _commits_by_itself(connection: Connection) -> bool:
    return in_autocommit(connection) or not driver_holds(connection)


def _write(
    connection: Connection, statement: Statement, facts: Fenced
) -> tuple[int, Sequence[Any]]:
    """Send it as it is, but for a RETURNING where the driver would not tell how many rows."""
    silent = facts.verb in ("insert", "upsert") or _has_with(statement)
    counting = silent and not statement._returning and _can_return(connection, facts)
    sent: Any = statement.returning(literal_column("1")) if counting else statement
    result = connection.execute(sent)
    rows = result.all() if result.returns_rows else ()
    return (len(rows) if result.returns_rows else result.rowcount), () if counting else rows


def _can_return(connection: Connection, facts: Fenced) -> bool:
    verb = "insert" if facts.verb == "upsert" else facts.verb
    return bool(getattr(connection.dialect, f"{verb}_returning"))


def _has_with(statement: Statement) -> bool:
    return any(isinstance(part, CTE) for part in visitors.iterate(statement))


def _begin(connection: Connection) -> None:
    """Begin what sqlite3 does not begin for a statement whose text starts with WITH."""
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction and not _commits_by_itself(connection):
        connection.exec_driver_sql("BEGIN")


def _has_to_be_plain(statement: Statement, facts: Fenced) -> bool:
    """Whether the statement has to be sent as it is, and not within another.

    One that returns rows, so that they are what SQLAlchemy makes of them; and one with a default
    that looks at its execution, which has none of its own within another.
    """
    if statement._returning:
        return True
    name = "onupdate" if facts.verb == "update" else "default"
    defaults = (getattr(column, name) for column in facts.target.table.c)
    return any(one is not None and one.is_callable and _takes_context(one.arg) for one in defaults)


def _takes_context(function: Any) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:  # of a builtin, which SQLAlchemy calls without arguments as well
        return False


class _Look:
    """Looks at the rows that a statement means, fresh or not, as the caller's statement would."""

    def __init__(self, connection: Connection, facts: Fenced, options: Mapping[str, Any]) -> None:
        self.session: Session | None = None
        self._connection = connection
        self._locking = connection.dialect.name in ("mysql", "mariadb")
        self._facts = facts
        self._options = options

    def run(self, statement: Any) -> Any:
        """The first row, with the options that the caller gave to the statement."""
        asked: Connection | Session = self._connection
        if self.session is not None:
            # Its events have a say, unless it would read from another database.
            bind = self.session.get_bind(mapper=self._facts.target.mapper, clause=statement)
            asked = self.session if bind.engine is self._connection.engine else asked
        return asked.execute(statement, execution_options=self._options).first()

    def rows(self, *columns: Any) -> Any:
        """A SELECT of the rows meant: of a class only its own, but an INSERT meets all."""
        target = self._facts.target
        inserts = self._facts.verb in ("insert", "upsert")
        found = select(*columns).select_from(target.source if inserts else target.given)
        return found.where(self._facts.where)

    def newer(self) -> Newer | None:
        """The newest of the rows meant that are newer than the token."""
        target = self._facts.target
        keys = list(target.table.primary_key)
        look = self.rows(target.fence, *map(target.at, keys))
        look = look.where(target.fence > self._facts.token).order_by(target.fence.desc()).limit(1)
        if self._locking:  # a plain one would read an old snapshot
            look = look.with_for_update(read=True)
        row = self.run(look)
        if row is None:
            return None
        named = dict(zip((column.key for column in keys), row[1:], strict=True))
        return Newer(int(row[0]), self._facts.key or named or None)

    def unless_done(self, count: int) -> Newer | None:
        """A row that refused the statement, if one can have."""
        facts = self._facts
        if count < 0:
            raise RowCountUnknown(
                f"the driver does not tell how many rows of {facts.target.name} were written under "
                f"token {facts.token}: roll back, and use a driver that can tell",
                table=facts.target.name,
                token=facts.token,
            )
        done = facts.most is not None and count >= facts.most
        return None if done else self.newer()


def _write_and_look(statement: Statement, facts: Fenced, look: _Look) -> tuple[int, Newer | None]:
    """Both in one statement of PostgreSQL's."""
    target = facts.target
    written = statement.returning(literal_column("1")).cte()
    count = select(func.count()).select_from(written).scalar_subquery()
    meant = look.rows(func.count()).scalar_subquery()
    short = count < (meant if facts.most is None else facts.most)
    keys = [] if facts.key else list(target.table.primary_key)
    fences = [target.fence, *map(target.at, keys)]
    now = look.rows(*(one.label(f"is_{number}") for number, one in enumerate(fences)))
    # Every row meant as it is now. (Weaker than FOR SHARE, a lock would be content with the version
    # before the newer one.)
    seen = now.with_for_update(read=True, of=target.given).cte()
    # Not compared in SQL: the planner would do that first, on the version before the newer one.
    newest = select(seen).order_by(seen.c.is_0.desc().nulls_last()).limit(1).cte()
    # Only if something is left to explain is any of that looked at.
    told = (case((short, select(one).scalar_subquery())) for one in newest.c)
    number, fence, *key = look.run(select(count, *told))
    if fence is not None and fence > facts.token:
        named = dict(zip((column.key for column in keys), key, strict=True))
        return number, Newer(int(fence), facts.key or named or None)
    if facts.verb in ("insert", "upsert"):  # whose own snapshot may not show the row yet
        return number, look.unless_done(number)
    return number, None


def _named(facts: Fenced, key: Mapping[str, Any] | None) -> str:
    """The row in an error's text. Other keys than the primary one may be secrets."""
    table = facts.target.name
    if not key:
        return table
    primary = {column.key for column in facts.target.table.primary_key}
    return f"{table} {dict(key)!r}" if key.keys() <= primary else f"{table} (by {', '.join(key)})"


def _judge(facts: Fenced, count: int, newer: Newer | None, rows: int | None) -> None:
    table, key, token = facts.target.name, facts.key, facts.token
    row = _named(facts, key)
    if newer is not None:
        raise FencedOutError(
            f"token {token} is older than {newer.fence}, which {_named(facts, newer.key)} carries: "
            "somebody newer has taken over; roll back and stop",
            resource=facts.resource,
            token=token,
            current=newer.fence,
            table=table,
            key=newer.key,
        )
    least = facts.least if rows is None else rows
    if facts.verb == "insert" and facts.most is not None and count < facts.most:
        raise RowExists(
            f"{row} is there already, with no newer token than {token}: update it, or roll back",
            table=table,
            key=key,
            token=token,
        )
    if count < least:
        written = "nothing" if not count else f"{count} of {least} rows"
        raise RowMissing(
            f"{written} of {row} was written under token {token}: no such row is there, or the "
            "condition excludes it",
            table=table,
            key=key,
            token=token,
            written=count,
        )
    most = min(n for n in (rows, facts.most, count) if n is not None)
    if count > most:
        raise UnexpectedRows(
            f"{count} rows of {row} were written under token {token}, not {most}: roll back, and "
            "check the condition",
            table=table,
            token=token,
            written=count,
            expected=most,
        )
