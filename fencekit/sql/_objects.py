"""A fenced statement on a mapped class in a session, and what the session's objects know of it.

Rules this module obeys:

* An UPDATE or DELETE is SQLAlchemy's to run: with its events and criteria, and with its own
  synchronization, by the keys that the database returned.
* An upsert has none: its objects are expired, but for what the caller has changed in them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from fencekit.sql._fenced import Fenced, Statement

OURS: dict[str, Any] = {"synchronize_session": False}
"""All objects of the class are expired."""


def write_on(session: Session, statement: Statement, facts: Fenced) -> tuple[int, Sequence[Any]]:
    """The number of rows written, and those that it returns."""
    mapper = facts.target.mapper
    keys = _keys(facts)
    if facts.verb in ("update", "delete"):
        how = {"synchronize_session": "fetch"} if _in_order(keys, facts) else OURS
        if "synchronize_session" in statement.get_execution_options():
            how = {}
        result: Any = session.execute(statement, execution_options=how)
        rows = result.all() if statement._returning else ()
        if how is OURS:
            _expire(session, _known(session, mapper, None))
        return len(rows) if statement._returning else result.rowcount, rows
    sent = statement if statement._returning or not keys else statement.returning(*keys)
    result = session.execute(sent, bind_arguments={"mapper": mapper})
    rows = result.all() if result.returns_rows else ()
    _expire(session, _known(session, mapper, None if sent is statement else rows))
    return (len(rows) if result.returns_rows else result.rowcount), (
        rows if sent is statement else ()
    )


def _in_order(keys: list[Any], facts: Fenced) -> bool:
    """Whether the table has its key in the mapper's order: SQLAlchemy's "fetch" takes it so."""
    own = list(facts.target.table.primary_key)
    return len(keys) == len(own) and all(map(operator.is_, keys, own))


def _keys(facts: Fenced) -> list[Any]:
    """What identifies an object, in the mapper's order; nothing if this table does not have it."""
    mapper = facts.target.mapper
    assert mapper is not None
    found = [
        facts.target.column_of(mapper.get_property_by_column(column))
        for column in mapper.primary_key
    ]
    return [] if any(column is None for column in found) else found


def _known(session: Session, mapper: Any, keys: Iterable[Any] | None) -> list[Any]:
    """The session's objects that have one of those keys, or all of the class."""
    if keys is None:
        return [
            known for known in session.identity_map.values() if isinstance(known, mapper.class_)
        ]
    identities = (mapper.identity_key_from_primary_key(tuple(key)) for key in keys)
    found = (session.identity_map.get(identity) for identity in identities)
    return [known for known in found if known is not None]


def _expire(session: Session, objects: list[Any]) -> None:
    for known in objects:
        unchanged = inspect(known).unmodified
        if unchanged:
            session.expire(known, list(unchanged))
    # As SQLAlchemy's own synchronization does: a savepoint's rollback expires them once more.
    session._register_altered([inspect(known) for known in objects])
