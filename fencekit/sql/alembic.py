"""An Alembic operation that adds a fence column to a table in use, and keeps nobody waiting long.

Import this module to have it as ``op.add_fence_column``.

PostgreSQL keeps a constant default in its catalogue, so no row is rewritten. What hurts is
waiting for the table's lock behind a long query, with everybody else behind us: so we wait briefly,
let everybody pass, and try again. Locks that the migration took before would be held all that
time: then we do not wait at all.
"""

from __future__ import annotations

import time
from typing import Any

from alembic.migration import MigrationContext
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import DropColumnOp
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from fencekit.sql._target import FENCE
from fencekit.sql.columns import check_name, fence_token

LOCK_NOT_AVAILABLE = "55P03"
SHORTEST_WAIT, LONGEST_WAIT = 0.001, 3600
"""In seconds. PostgreSQL counts in milliseconds, and 0 is no limit."""

# All but what a SELECT takes; those below 16384 are PostgreSQL's own. For Alembic's table waits
# nobody but another migration.
_LOCKED = text(
    "SELECT DISTINCT CASE WHEN c.oid IS NULL THEN 'what it has dropped' "
    "ELSE l.relation::regclass::text END "
    "FROM pg_locks l LEFT JOIN pg_class c ON c.oid = l.relation "
    "WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.relation >= 16384 "
    "AND l.mode <> 'AccessShareLock' AND c.relname IS DISTINCT FROM :versions "
    "AND coalesce(c.relkind, 'r') IN ('r', 'p', 'v', 'm', 'f') ORDER BY 1"
)
_LIMIT = text("SELECT set_config('lock_timeout', :limit, :local)")


@Operations.register_operation("add_fence_column")
class AddFenceColumn(MigrateOperation):
    """``op.add_fence_column("jobs")``: the column of `fencekit.sql.fence_token`, on a table in use.

    ``name`` is the column's, ``schema`` the table's. On PostgreSQL each of up to ``tries`` attempts
    waits for the table's lock for ``lock_timeout`` seconds (0.001 to 3600), and as long without it
    before the next; the last one's error is raised.

    The lock is kept until the transaction ends, so give it a migration of its own, in an
    ``op.get_context().autocommit_block()`` or with ``transaction_per_migration``. In a transaction
    that holds locks already it does not wait: if the table is in use, ``RuntimeError`` says which.

    Raises ``TypeError`` or ``ValueError`` for what cannot be meant, before anything is sent.
    """

    def __init__(
        self,
        table: str,
        name: str = FENCE,
        *,
        schema: str | None = None,
        lock_timeout: float = 2.0,
        tries: int = 20,
    ) -> None:
        check_name(table, "table")
        check_name(name)
        if schema is not None:
            check_name(schema, "schema")
        _check_waiting(lock_timeout, tries)
        self.table, self.name, self.schema = table, name, schema
        self.lock_timeout, self.tries = lock_timeout, tries

    @classmethod
    def add_fence_column(
        cls, operations: Operations, table: str, name: str = FENCE, **options: Any
    ) -> None:
        """Called as ``op.add_fence_column(...)``."""
        operations.invoke(cls(table, name, **options))

    def reverse(self) -> MigrateOperation:
        return DropColumnOp(self.table, self.name, schema=self.schema)


def _check_waiting(lock_timeout: object, tries: object) -> None:
    if isinstance(lock_timeout, bool) or not isinstance(lock_timeout, (int, float)):
        raise TypeError(f"lock_timeout is a number of seconds, not {type(lock_timeout).__name__}")
    if not SHORTEST_WAIT <= lock_timeout <= LONGEST_WAIT:  # nor is NaN
        raise ValueError(
            f"lock_timeout is between {SHORTEST_WAIT} and {LONGEST_WAIT} seconds, "
            f"not {lock_timeout}"
        )
    if isinstance(tries, bool) or not isinstance(tries, int):
        raise TypeError(f"tries is a number of attempts, not {type(tries).__name__}")
    if tries < 1:
        raise ValueError(f"tries is 1 or more, not {tries}: without one, nothing is added")


@Operations.implementation_for(AddFenceColumn)
def _add(operations: Operations, wanted: AddFenceColumn) -> None:
    context = operations.get_context()
    if context.dialect.name != "postgresql":
        _alter(operations, wanted)
    elif context.as_sql:  # a script cannot try again
        operations.execute(f"SET lock_timeout = '{_milliseconds(wanted.lock_timeout)}'")
        _alter(operations, wanted)
        operations.execute("RESET lock_timeout")
    else:
        _add_on_postgresql(operations, wanted, context)


def _add_on_postgresql(
    operations: Operations, wanted: AddFenceColumn, context: MigrationContext
) -> None:
    connection = operations.get_bind()
    # In an autocommit block each statement is a transaction, so that nothing is held.
    alone = getattr(connection.connection.dbapi_connection, "autocommit", None) is True
    locked = [] if alone else _locked(connection, context)
    tries, wait = (1, SHORTEST_WAIT) if locked else (wanted.tries, wanted.lock_timeout)
    for left in reversed(range(tries)):
        try:
            _try(operations, wanted, connection, wait, alone)
            return
        except DBAPIError as error:
            if _sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            if locked:
                raise _held(wanted, locked) from error
            if not left:
                raise
        time.sleep(wait)


def _try(
    operations: Operations,
    wanted: AddFenceColumn,
    connection: Connection,
    wait: float,
    alone: bool,
) -> None:
    """Add the column or raise; the limit is what it was before, either way."""
    before = connection.scalar(text("SHOW lock_timeout"))
    limit = {"limit": _milliseconds(wait), "local": not alone}
    usual = {"limit": before, "local": not alone}
    if not alone:
        with connection.begin_nested():  # its rollback takes the limit back
            connection.execute(_LIMIT, limit)
            _alter(operations, wanted)
            connection.execute(_LIMIT, usual)
        return
    connection.execute(_LIMIT, limit)
    try:
        _alter(operations, wanted)
    finally:
        connection.execute(_LIMIT, usual)


def _alter(operations: Operations, wanted: AddFenceColumn) -> None:
    operations.add_column(wanted.table, fence_token(wanted.name), schema=wanted.schema)


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _sqlstate(error: DBAPIError) -> Any:
    """The error's code, which psycopg2 has under another name."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def _locked(connection: Connection, context: MigrationContext) -> list[str]:
    """The tables that others may wait for until this transaction ends."""
    return list(connection.scalars(_LOCKED, {"versions": context.version_table}))


def _held(wanted: AddFenceColumn, locked: list[str]) -> RuntimeError:
    return RuntimeError(
        f"table {wanted.table} is in use, and this migration's transaction holds locks on "
        f"{', '.join(locked)}: whoever needs those would wait as well, so nothing was added. Give "
        "op.add_fence_column a migration of its own, in op.get_context().autocommit_block() or "
        "with transaction_per_migration"
    )
