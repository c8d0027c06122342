"""Running a fenced statement, and telling stale, missing and unknown apart.

Rules this module obeys:

* On PostgreSQL one statement writes and says what became of it; elsewhere a second one in the same
  transaction looks, and only when the first leaves a question (S2).
* A row that was refused raises, however many were written (S4).
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from sqlalchemy import (
    ClauseElement,
    Column,
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
    true,
)
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from fencekit import (
    FencedOutError,
    RowCountUnknown,
    RowExists,
    RowMissing,
    UnexpectedRows,
)
from fencekit.sql._running import AnyAsyncConnection, AnyConnection, connection_of, run
from fencekit.sql.statements import OPTION, Fenced

Statement = Update | Delete | Insert


@dataclass(frozen=True)
class Written:
    """What a fenced statement wrote."""

    count: int
    """The number of rows."""
    rows: Sequence[Row[Any]] = ()
    """What the statement's own ``returning()`` asked for, as plain rows."""


@overload
def execute_fenced(
    connection: AnyConnection, statement: Statement, *, rows: int | None = None
) -> Written: ...


@overload
def execute_fenced(
    connection: AnyAsyncConnection, statement: Statement, *, rows: int | None = None
) -> Coroutine[Any, Any, Written]: ...


def execute_fenced(
    connection: Any, statement: Statement, *, rows: int | None = None
) -> Written | Coroutine[Any, Any, Written]:
    """Run a statement of this package, and return what it wrote or raise why it did not.

    With an ``AsyncConnection`` or ``AsyncSession`` the result is to be awaited. ``rows`` is how
    many rows the statement has to write. Objects of a session that were written are brought up to
    date.

    Raises ``FencedOutError`` if a row it means carries a newer token, also if others were written;
    ``RowMissing`` if there is no row, or fewer than ``rows``; ``RowExists`` for an insert;
    ``UnexpectedRows`` for more than ``rows``, or than the key in its condition can have;
    ``RowCountUnknown`` if the driver does not tell. After each of them, roll back. What
    the database raises passes through, serialization failures included.

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
    facts = statement.get_execution_options().get(OPTION)
    if not isinstance(facts, Fenced):
        raise TypeError("execute_fenced runs what fenced_update and its kin return")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is a number of rows, 1 or more, not {rows!r}")
    return run(connection, lambda given: _execute(given, statement, facts, rows))  # type: ignore[no-any-return]


def _execute(
    given: Connection | Session, statement: Statement, facts: Fenced, rows: int | None
) -> Written:
    target = facts.target
    key = target.pinned(facts.where)
    if key is not None:  # what else the condition says, a newer holder may have changed
        row = and_(*(target.source.c[name] == value for name, value in key.items()))
        facts = replace(facts, key=key, most=1, where=row)
    connection = connection_of(given, target.mapper, target.table)
    dialect = connection.dialect.name
    if facts.verb in ("insert", "upsert") and dialect not in ("postgresql", "sqlite"):
        raise NotImplementedError(
            f"fenced_{facts.verb} needs INSERT ... ON CONFLICT, which {dialect} does not have: "
            "write the row in a transaction that fenced_update protects"
        )
    session = given if isinstance(given, Session) and target.mapper is not None else None
    look = _in_one if dialect == "postgresql" else _in_two
    written, newest = look(connection, statement, facts, session)
    _judge(facts, written.count, newest, rows)
    return written


def _in_one(
    connection: Connection, statement: Statement, facts: Fenced, session: Session | None
) -> tuple[Written, int | None]:
    target = facts.target
    one: Any = literal_column("1").label("fencekit_one")
    added = [one] if session is None else _keys_of(facts)
    written = statement.returning(*added).cte("fencekit_written")
    asked = len(written.c) - len(added)
    count = select(func.count()).select_from(written).scalar_subquery()
    meant = select(func.count()).select_from(target.source).where(facts.where).scalar_subquery()
    # Only if something is left to explain: then every row meant is looked at as it is now.
    now = select(target.fence.label("fence")).where(facts.where)
    # (Weaker than FOR SHARE, a lock would be content with the version before the newer one.)
    seen = now.with_for_update(read=True, of=target.source).subquery("fencekit_now")
    # Not compared in SQL: the planner would do that first, on the version before the newer one.
    newest = select(func.max(seen.c.fence)).scalar_subquery()
    short = count < (meant if facts.most is None else facts.most)
    told = (count.label("fencekit_count"), case((short, newest)).label("fencekit_newest"))
    if not asked and session is None:
        number, newer = connection.execute(select(*told)).one()
        return Written(number), _looked(connection, facts, number, newer)
    # The outer join has a row also when nothing was written.
    always = select(one).subquery("fencekit_always")
    both = always.outerjoin(written, true())
    found = connection.execute(select(*told, *written.c).select_from(both)).freeze()
    number, newer = found().columns(0, 1).all()[0]
    end = 2 + asked
    if session is not None and number:
        keys = found().columns(*range(end, end + len(added))).all()
        _synchronize(session, facts, map(tuple, keys))
    rows = found().columns(*range(2, end)).all() if asked and number else ()
    return Written(number, rows), _looked(connection, facts, number, newer)


def _looked(connection: Connection, facts: Fenced, number: int, newest: Any) -> int | None:
    """The newest fence if it refuses us, which an insert's own snapshot may not show yet."""
    if newest is not None and newest > facts.token:
        return int(newest)
    if facts.verb in ("insert", "upsert") and number < (facts.most or 0):
        return _newest(connection, facts)
    return None


def _in_two(
    connection: Connection, statement: Statement, facts: Fenced, session: Session | None
) -> tuple[Written, int | None]:
    verb = "insert" if facts.verb == "upsert" else facts.verb
    tells = session is not None and getattr(connection.dialect, f"{verb}_returning")
    added = _keys_of(facts) if tells else []
    result: Any = connection.execute(statement.returning(*added) if added else statement)
    rows: Sequence[Any] = ()
    keys: Any = None
    if result.returns_rows:
        found = result.freeze()
        width = len(found().keys())
        asked = width - len(added)
        count = len(found().all())
        rows = found().columns(*range(asked)).all() if asked and count else ()
        keys = found().columns(*range(asked, width)).all() if added and count else None
    else:
        count = result.rowcount
    if session is not None:
        _synchronize(session, facts, None if keys is None else map(tuple, keys))
    if count < 0:
        raise RowCountUnknown(
            f"the driver does not tell how many rows of {facts.target.name} were written under "
            f"token {facts.token}: roll back, and use a driver that can tell",
            table=facts.target.name,
            token=facts.token,
        )
    newest = None if facts.most is not None and count >= facts.most else _newest(connection, facts)
    return Written(count, rows), newest


def _keys_of(facts: Fenced) -> list[Any]:
    """The primary key, under names that no column has."""
    keys = enumerate(facts.target.table.primary_key)
    return [facts.target.at(column).label(f"fencekit_{number}") for number, column in keys]


def _newest(connection: Connection, facts: Fenced) -> int | None:
    """The newest fence among the rows meant that are newer than the token."""
    fence = facts.target.fence
    look = select(func.max(fence)).where(facts.where, fence > facts.token)
    if connection.dialect.name in ("mysql", "mariadb"):  # a plain one reads an old snapshot
        look = look.with_for_update(read=True)
    newest = connection.execute(look).scalar()
    return None if newest is None else int(newest)


def _synchronize(session: Session, facts: Fenced, keys: Iterable[tuple[Any, ...]] | None) -> None:
    """Tell the session's objects what was written, as SQLAlchemy does after its own UPDATE.

    Without keys every object of the class is read again when it is used next.
    """
    mapper = facts.target.mapper
    assert mapper is not None
    if keys is None:
        for known in list(session.identity_map.values()):
            if isinstance(known, mapper.class_):
                session.expire(known)
        return
    plain = {k: v for k, v in facts.values.items() if not isinstance(v, ClauseElement)}
    computed = [
        attribute.key
        for attribute in mapper.column_attrs
        if attribute.key not in facts.values and any(map(_changes_by_itself, attribute.columns))
    ]
    for key in keys:
        known = session.identity_map.get(mapper.identity_key_from_primary_key(key))
        if known is None:
            continue
        if not plain:
            session.expire(known)
            continue
        unknown = [*(k for k in facts.values if k not in plain), *computed]
        if unknown:
            session.expire(known, unknown)
        for name, value in plain.items():
            set_committed_value(known, name, value)


def _changes_by_itself(column: Any) -> bool:
    """Whether an UPDATE changes it without naming it."""
    made = ("onupdate", "server_onupdate", "computed")
    return not isinstance(column, Column) or any(getattr(column, name) is not None for name in made)


def _judge(facts: Fenced, count: int, newest: int | None, rows: int | None) -> None:
    table, key, token = facts.target.name, facts.key, facts.token
    row = table if key is None else f"{table} {key!r}"
    if newest is not None:
        raise FencedOutError(
            f"token {token} is older than {newest}, which {row} carries: somebody newer has taken "
            "over; roll back and stop",
            resource=facts.resource,
            token=token,
            current=newest,
            table=table,
            key=key,
        )
    if facts.verb == "insert" and facts.most is not None and count < facts.most:
        raise RowExists(
            f"{row} is there already, with no newer token than {token}: update it, or roll back",
            table=table,
            key=key,
            token=token,
        )
    if count == 0 or (rows is not None and count < rows):
        expected = "" if rows is None or not count else f" of {rows}"
        raise RowMissing(
            f"{'no row' if not count else f'{count}'}{expected} of {row} was there to be "
            f"written under token {token}: check its key, or insert it",
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
