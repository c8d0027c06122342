"""An Alembic operation that adds a fence column without making everybody wait.

Import this module to have it as ``op.add_fence_column``.

PostgreSQL keeps a constant default in its catalogue, so no row is rewritten. What hurts is
waiting for the lock behind a long query, with everybody else behind us: so we wait briefly, and
try again.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import DropColumnOp
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from fencekit.sql._target import FENCE
from fencekit.sql.columns import fence_token

_NOT_AVAILABLE = "55P03"


@Operations.register_operation("add_fence_column")
class AddFenceColumn(MigrateOperation):
    """``op.add_fence_column("jobs")``: the column of `fencekit.sql.fence_token`, on a table in use.

    ``name`` is the column's, ``schema`` the table's. On PostgreSQL each of up to ``tries`` attempts
    waits for the table's lock for ``lock_timeout`` seconds, and for as long before the next; the
    last one's error is raised.
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


@Operations.implementation_for(AddFenceColumn)
def _add(operations: Operations, wanted: AddFenceColumn) -> None:
    connection = operations.get_bind()
    column = fence_token(wanted.name)
    context = operations.get_context()
    waiting = f"{max(1, round(wanted.lock_timeout * 1000))}ms"
    if context.dialect.name == "postgresql" and context.as_sql:  # a script cannot try again
        operations.execute(f"SET lock_timeout = '{waiting}'")
    if context.dialect.name != "postgresql" or context.as_sql:
        operations.add_column(wanted.table, column, schema=wanted.schema)
        return
    before = connection.scalar(text("SHOW lock_timeout"))
    # In an autocommit block there is no transaction that a failure could spoil.
    alone = getattr(connection.connection.dbapi_connection, "autocommit", None) is True
    setting = text("SELECT set_config('lock_timeout', :limit, :local)")
    for left in reversed(range(wanted.tries)):
        try:
            with nullcontext() if alone else connection.begin_nested():
                connection.execute(setting, {"limit": waiting, "local": not alone})
                operations.add_column(wanted.table, column, schema=wanted.schema)
                connection.execute(setting, {"limit": before, "local": not alone})
            return
        except DBAPIError as error:
            if alone:
                connection.execute(setting, {"limit": before, "local": False})
            if not left or getattr(error.orig, "sqlstate", None) != _NOT_AVAILABLE:
                raise
        time.sleep(wanted.lock_timeout)
