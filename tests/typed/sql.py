"""What a strict type checker says of a user's code: checked by the session `types`, not run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Delete, Insert, Table, Update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from typing_extensions import assert_type

import fencekit
from fencekit import FenceToken, LockHandle
from fencekit.sql import (
    Applied,
    FencedMixin,
    Written,
    apply_once,
    execute_fenced,
    fenced_delete,
    fenced_insert,
    fenced_transaction,
    fenced_update,
    fenced_upsert,
    operation,
    purge_operations,
)


class Base(DeclarativeBase):
    pass


class Job(FencedMixin, Base):
    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


def statements(table: Table, handle: LockHandle) -> None:
    update = fenced_update(Job, handle.token, where=Job.id == 7, values={Job.state: "x"})
    assert_type(update, Update)
    assert_type(fencekit.fenced_update(table, 7, where=table.c.id == 7, values={}), Update)
    assert_type(fenced_delete(table, 7, where=table.c.id == 7), Delete | Update)
    assert_type(fenced_insert(Job, 7, values={"id": 7}), Insert)
    assert_type(fenced_upsert(Job, 7, values=[{"id": 7}]), Insert)


def blocking(connection: Connection, session: Session, update: Update, token: FenceToken) -> None:
    assert_type(execute_fenced(connection, update), Written)
    assert_type(execute_fenced(session, update, rows=1).count, int)
    with fenced_transaction(connection, token) as same:
        assert_type(same, Connection)
    assert_type(apply_once(session, "a", token, result=1), Applied)
    with operation(connection, "a") as block:
        assert_type(block.first, bool)
        block.result = {"a": 1}
    assert_type(purge_operations(connection, timedelta(1)), int)


async def waiting(
    connection: AsyncConnection, session: AsyncSession, update: Update, token: FenceToken
) -> None:
    assert_type(await execute_fenced(connection, update), Written)
    async with fenced_transaction(session, [token], sequence=1) as same:
        assert_type(same, AsyncSession)
    assert_type(await apply_once(connection, "a"), Applied)
    async with operation(session, "a", token) as block:
        result: Any = block.result
    assert_type(await purge_operations(connection, timedelta(1)), int)
    print(result)
