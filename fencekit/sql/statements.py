"""Statements that refuse a row whose fence is newer than the writer's token. No I/O.

Rules this module obeys:

* The check is a part of the statement that writes (S1), whoever executes it.
* A fence is set by the token alone, and only forward (S3).
* What it means is an attribute of the statement (`fencekit.sql._fenced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    ClauseElement,
    Column,
    ColumnElement,
    Delete,
    Insert,
    Update,
    and_,
    case,
    literal,
    tuple_,
)

from fencekit import FenceToken
from fencekit.fencing import token_value
from fencekit.sql._fenced import Fenced, FencedDelete, FencedInsert, FencedUpdate
from fencekit.sql._target import FENCE, Target

Values = Mapping[Any, Any]
Row = dict[Column[Any], Any]
S = TypeVar("S", FencedUpdate, FencedDelete, FencedInsert)


def _fenced(
    verb: str,
    target: Target,
    token: FenceToken | int,
    where: Any,
    most: int | None = None,
    least: int = 1,
) -> Fenced:
    resource = token.resource if isinstance(token, FenceToken) else ""
    return Fenced(verb, target, token_value(token), resource, where, most, least)


def fenced_update(
    target: Any, token: FenceToken | int, *, where: Any, values: Values, fence: Any = FENCE
) -> Update:
    """Return an UPDATE that also sets the fence, and passes over rows whose fence is newer.

    ``target`` is a table, a mapped class or an alias of one; ``where`` a condition on it; the keys
    of ``values`` are columns, attributes or their names. ``fence`` is the fence column, or its
    name. Run it with `execute_fenced`, which raises if a row was refused; run otherwise, a refused
    row is one that its ``rowcount`` lacks.

    Raises ``TypeError`` or ``ValueError`` for a token, condition or column that cannot be meant,
    such as a condition that does not mention the target (for all rows pass ``sqlalchemy.true()``).

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Text
    >>> from fencekit.sql import fence_token, fenced_update
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("status", Text), fence_token())
    >>> print(fenced_update(jobs, 41, where=jobs.c.id == 7, values={"status": "done"}))
    UPDATE jobs SET status=:status, fence_token=:fence_token
    WHERE jobs.id = :id_1 AND jobs.fence_token <= :fence_token
    """
    found = Target(target, fence)
    setting = found.columns(values, "values")
    facts = _fenced("update", found, token, found.condition(where))
    return _update(target, facts, setting)


def fenced_update_many(
    target: Any,
    token: FenceToken | int,
    rows: Iterable[Values],
    *,
    key: Sequence[Any] | None = None,
    fence: Any = FENCE,
) -> Update:
    """Return one UPDATE that sets other values in each of many rows, all with one token.

    Each of ``rows`` maps the columns of ``key`` (the primary key unless given) and the columns to
    set; all have the same columns. ``key`` has to be unique. Each row has to be there:
    `execute_fenced` raises ``RowMissing`` for less. Otherwise as `fenced_update`.

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Text
    >>> from fencekit.sql import fence_token, fenced_update_many
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("status", Text), fence_token())
    >>> rows = [{"id": 1, "status": "done"}, {"id": 2, "status": "failed"}]
    >>> statement = fenced_update_many(jobs, 41, rows)
    """
    found = Target(target, fence)
    table = _rows_of(found, rows)
    keys = _key_columns(found, key, table)
    if not found.is_unique(keys):
        raise ValueError(
            f"{', '.join(column.name for column in keys)} is no unique key of {found.name}: a row "
            "that is refused could not be told from one that is not there"
        )
    changed = [column for column in table[0] if column not in keys]
    if not changed:
        raise ValueError("rows have nothing but their key: name the columns to set")
    where = _any_of(found, keys, table)
    values = {
        column: case(
            *((_is(found, keys, row), _expression(row[column], column)) for row in table),
            else_=found.at(column),
        )
        for column in changed
    }
    facts = _fenced("update", found, token, where, len(table), len(table))
    return _update(target, facts, values)


def fenced_delete(
    target: Any,
    token: FenceToken | int,
    *,
    where: Any,
    tombstone: Values | None = None,
    fence: Any = FENCE,
) -> Delete | Update:
    """Return a DELETE that passes over rows whose fence is newer.

    A row that is gone has no fence, so a stale insert could bring it back. With ``tombstone``, the
    columns that mark a row as deleted, it becomes an UPDATE that keeps the row and its fence.
    (`fenced_transaction` keeps the fence beside the table instead.) Otherwise as `fenced_update`.

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Boolean
    >>> from fencekit.sql import fence_token, fenced_delete
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("gone", Boolean), fence_token())
    >>> print(fenced_delete(jobs, 41, where=jobs.c.id == 7))
    DELETE FROM jobs WHERE jobs.id = :id_1 AND jobs.fence_token <= :fence_token_1
    >>> kept = fenced_delete(jobs, 41, where=jobs.c.id == 7, tombstone={"gone": True})
    """
    if tombstone is not None:
        return fenced_update(target, token, where=where, values=tombstone, fence=fence)
    found = Target(target, fence)
    facts = _fenced("delete", found, token, found.condition(where))
    fresh = found.fresh(found.bound(facts.token))
    return _with(FencedDelete(target).where(facts.where, fresh), facts)


def fenced_insert(
    target: Any,
    token: FenceToken | int,
    *,
    values: Values | Iterable[Values],
    key: Sequence[Any] | None = None,
    fence: Any = FENCE,
) -> Insert:
    """Return an INSERT of one row or many, with the token as their fence.

    A row that is there already, by ``key`` (the primary key unless given), stays as it is and the
    transaction stays usable; `execute_fenced` raises ``FencedOutError`` if its fence is newer,
    ``RowExists`` if not. Rows without their key, which the database numbers, are always new.

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Text
    >>> from fencekit.sql import fence_token, fenced_insert
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("status", Text), fence_token())
    >>> statement = fenced_insert(jobs, 41, values={"id": 7, "status": "new"})
    """
    found = _inserted(target, fence)
    rows = _rows_of(found, values)
    if key is None and not all(column in rows[0] for column in found.table.primary_key):
        where = found.fence.is_(None) & found.fence.is_not(None)  # none can be there
        plain = FencedInsert(found.table).values(_full(found, rows, token))
        return _with(plain, _fenced("insert", found, token, where, len(rows)))
    keys = _key_columns(found, key, rows)
    rows = _in_key_order(rows, keys)
    statement = FencedInsert(found.table)
    statement = statement.values(_full(found, rows, token))
    statement = statement.on_conflict_do_nothing(index_elements=keys)
    return _with(statement, _fenced("insert", found, token, _any_of(found, keys, rows), len(rows)))


def fenced_upsert(
    target: Any,
    token: FenceToken | int,
    *,
    values: Values | Iterable[Values],
    key: Sequence[Any] | None = None,
    update: Sequence[Any] | None = None,
    fence: Any = FENCE,
) -> Insert:
    """Return an INSERT that updates a row which is there already, unless its fence is newer.

    ``key`` are the columns of the unique key, the primary key unless given; ``update`` those that
    an existing row takes over from ``values``, all others than the key unless given; an
    ``onupdate`` of other columns does not run. A row that was deleted comes back: see
    `fenced_delete`.

    >>> from sqlalchemy import Column, Integer, MetaData, Table, Text
    >>> from fencekit.sql import fence_token, fenced_upsert
    >>> jobs = Table("jobs", MetaData(), Column("id", Integer, primary_key=True),
    ...     Column("status", Text), fence_token())
    >>> statement = fenced_upsert(jobs, 41, values={"id": 7, "status": "done"})
    """
    found = _inserted(target, fence)
    rows = _rows_of(found, values)
    keys = _key_columns(found, key, rows)
    rows = _in_key_order(rows, keys)
    if update is None:
        taken = [column for column in rows[0] if column not in keys]
    else:
        taken = _columns(found, update, "update")
        if found.own in taken:
            raise ValueError(f"update names {found.own.name}, which the token sets: leave it out")
        strange = [column.name for column in taken if column not in rows[0]]
        if strange:
            raise ValueError(f"update names {', '.join(strange)}, which values does not have")
    statement = FencedInsert(found.table)
    statement = statement.values(_full(found, rows, token))
    statement = statement.on_conflict_do_update(
        index_elements=keys,
        set_={column: statement.excluded[column.key] for column in (*taken, found.own)},
        where=and_(found.fresh(found.bound(token_value(token))), *found.own_rows()),
    )
    return _with(statement, _fenced("upsert", found, token, _any_of(found, keys, rows), len(rows)))


def _update(target: Any, facts: Fenced, setting: Row) -> Update:
    """The UPDATE of what the caller gave."""
    found = facts.target
    token = found.bound(facts.token)
    values = {found.key_of(column): value for column, value in setting.items()}
    values[found.key_of(found.own)] = token
    where = (facts.where, found.fresh(token))
    return _with(FencedUpdate(target).where(*where).values(values), facts)


def _with(statement: S, facts: Fenced) -> S:
    facts.made = type(statement).parts(statement)
    statement.fenced = facts
    return statement


def _full(target: Target, rows: list[Row], token: FenceToken | int) -> Any:
    """The rows with the fence, and what tells a class from others of its table."""
    more: Row = {target.own: token_value(token)}
    mapper = target.mapper
    if mapper is not None and isinstance(mapper.polymorphic_on, Column):
        kind = mapper.polymorphic_on
        if kind.table is target.table and mapper.polymorphic_identity is not None:
            more = {kind: mapper.polymorphic_identity, **more}
    full = [{**more, **row} for row in rows]
    # SQLAlchemy keeps the compiled form of an INSERT of one row, but not that of a list.
    return full[0] if len(full) == 1 else full


def _inserted(target: Any, fence: Any) -> Target:
    found = Target(target, fence)
    if found.source is not found.table:
        raise TypeError("an INSERT has no alias: pass the table or the class itself")
    return found


def _rows_of(target: Target, given: Any) -> list[Row]:
    """The rows by column; all have the same."""
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
        raise TypeError(f"rows are mappings of columns, not {type(given).__name__}")
    rows = [given] if isinstance(given, Mapping) else list(given)
    if not rows:
        raise ValueError("there are no rows to write")
    table = [target.columns(row, "a row") for row in rows]
    if any(row.keys() != table[0].keys() for row in table):
        raise ValueError("all rows have the same columns")
    return table


def _columns(target: Target, given: Any, what: str) -> list[Column[Any]]:
    """Columns that are named one by one."""
    if isinstance(given, str):
        raise TypeError(f"{what} is a sequence of columns, not {given!r}: add a comma")
    if not isinstance(given, Iterable):
        raise TypeError(f"{what} is a sequence of columns, not {type(given).__name__}")
    columns = [target.column(column, f"one of {what}") for column in given]
    if len(set(columns)) < len(columns):
        raise ValueError(f"{what} names a column twice")
    return columns


def _key_columns(target: Target, key: Any, rows: list[Row]) -> list[Column[Any]]:
    keys = list(target.table.primary_key) if key is None else _columns(target, key, "key")
    if not keys:
        lacks = f"table {target.name} has no primary key" if key is None else "key names no column"
        raise ValueError(f"{lacks}: pass the columns of a unique key as key=")
    for column in keys:
        if column not in rows[0]:
            raise ValueError(f"the rows do not say {column.name}, which is a part of their key")
        for value in (row[column] for row in rows):
            if is_expression(value):
                raise TypeError(
                    f"{column.name} is a part of the key: give its value, not an expression"
                )
            if value is None:
                raise ValueError(f"{column.name} is a part of the key, and None is no value of one")
    try:
        different = len({tuple(row[column] for column in keys) for row in rows})
    except TypeError:  # a value that has no hash, such as JSON: the database will see
        return keys
    if different < len(rows):
        raise ValueError("rows has one key twice: which of them is meant?")
    return keys


def _in_key_order(rows: list[Row], keys: list[Column[Any]]) -> list[Row]:
    """In one order for everybody, so that two writers of the same rows do not deadlock."""
    try:
        return sorted(rows, key=lambda row: tuple(row[column] for column in keys))
    except TypeError:  # values without an order
        return rows


def is_expression(value: object) -> bool:
    return isinstance(value, ClauseElement) or hasattr(value, "__clause_element__")


def _expression(value: Any, column: Column[Any]) -> Any:
    return value if is_expression(value) else literal(value, column.type)


def _is(target: Target, keys: list[Column[Any]], row: Row) -> ColumnElement[bool]:
    return and_(*(target.at(column) == row[column] for column in keys))


def _any_of(target: Target, keys: list[Column[Any]], rows: list[Row]) -> ColumnElement[bool]:
    """The rows that have one of those keys."""
    if len(rows) == 1:
        return _is(target, keys, rows[0])
    columns = [target.at(column) for column in keys]
    found: ColumnElement[bool]
    if len(columns) == 1:
        found = columns[0].in_([row[keys[0]] for row in rows])
    else:
        found = tuple_(*columns).in_([tuple(row[column] for column in keys) for row in rows])
    return found
