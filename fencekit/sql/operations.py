"""Effects that are applied once per key, in the transaction that makes them.

Rules this module obeys:

* The operation's row commits or rolls back with the effect (S6).
* A caller that comes at the same time waits for the other's end; the database does the waiting.
* No statement relies on failing: the caller's transaction goes on (S7).
* A row never stays without its effect: what cannot be taken back rolls the transaction back.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, overload

from sqlalchemy import Connection, Table, bindparam, delete, func, literal_column, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from fencekit import Codec
from fencekit.fencing import Applied, OperationBlock, OperationRequest, operation_request
from fencekit.sql._block import Block, C, unless_told
from fencekit.sql._running import (
    AnyAsyncConnection,
    AnyConnection,
    connection_of,
    run,
)
from fencekit.sql.tables import FENCES, OPERATIONS
from fencekit.sql.transaction import Tokens, check_table, holding_connection, take_fences

__all__ = ["Applied", "apply_once", "operation"]


@overload
def apply_once(
    connection: AnyConnection,
    operation_key: str,
    token: Tokens | None = None,
    *,
    result: Any = None,
    fingerprint: str | None = None,
    codec: Codec | None = None,
    table: Table = OPERATIONS,
    fences: Table = FENCES,
) -> Applied: ...


@overload
def apply_once(
    connection: AnyAsyncConnection,
    operation_key: str,
    token: Tokens | None = None,
    *,
    result: Any = None,
    fingerprint: str | None = None,
    codec: Codec | None = None,
    table: Table = OPERATIONS,
    fences: Table = FENCES,
) -> Coroutine[Any, Any, Applied]: ...


def apply_once(
    connection: Any,
    operation_key: str,
    token: Tokens | None = None,
    *,
    result: Any = None,
    fingerprint: str | None = None,
    codec: Codec | None = None,
    table: Table = OPERATIONS,
    fences: Table = FENCES,
) -> Applied | Coroutine[Any, Any, Applied]:
    """Claim an operation in the open transaction: ``first`` for one caller ever, if it commits.

    Apply the effect in the same transaction if ``first``; else ``result`` is what the first call
    remembered. Who comes at the same time waits: if the first rolls back, one of them is ``first``.
    With a ``token`` the resource's fence is taken too, as in `fenced_transaction`. If the body can
    fail and the transaction commits all the same, use `operation`. With an asyncio connection or
    session the result is to be awaited. What a session has pending is sent after the key.

    Raises ``IdempotencyConflict`` for a key that is known with another ``fingerprint`` (one without
    is compared with none: neither a key that was first applied without, nor a call without),
    ``FencedOutError`` for an old token, ``CanonicalizeError`` for a result that the codec cannot
    say, ``ValueError`` if a session's binds put ``table`` and ``fences`` into two databases.

    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import apply_once, metadata
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> for attempt in range(2):
    ...     with engine.begin() as connection:
    ...         apply_once(connection, "charge:7", result={"receipt": attempt})
    Applied(first=True, result={'receipt': 0})
    Applied(first=False, result={'receipt': 0})
    """
    request = operation_request(operation_key, token, fingerprint, codec)
    tables = _tables(table, fences)
    encoded = request.encoded(result)

    def work(given: Any) -> Applied:
        applied = _claim(given, request, tables, encoded)
        return Applied(True, result) if applied.first else applied

    return run(connection, work)  # type: ignore[no-any-return]


class operation(Block[C], OperationBlock):
    """Apply an effect once per key, as a block: do it if ``first``, and set ``result``.

    ``with`` (or ``async with``) begins a transaction and ends it, or joins the one that is open. If
    the body raises, neither its writes nor the operation's row stay, also when the caller goes on
    and commits: a savepoint around the body sees to that. A body that ends this savepoint itself
    has to answer for its writes; the row does not stay then either. Each block is entered once.
    Otherwise as `apply_once`.

    Raises ``RuntimeError`` at the end of a body that ended the transaction or the savepoint, or
    left one of its own open.

    >>> from sqlalchemy import create_engine
    >>> from fencekit.sql import metadata, operation
    >>> engine = create_engine("sqlite://")
    >>> metadata.create_all(engine)
    >>> for attempt in range(2):
    ...     with engine.connect() as connection, operation(connection, "charge:7") as charge:
    ...         if charge.first:
    ...             charge.result = {"receipt": attempt}
    ...     charge.result
    {'receipt': 0}
    {'receipt': 0}
    """

    def __init__(
        self,
        connection: C,
        operation_key: str,
        token: Tokens | None = None,
        *,
        fingerprint: str | None = None,
        codec: Codec | None = None,
        table: Table = OPERATIONS,
        fences: Table = FENCES,
    ) -> None:
        Block.__init__(self, connection)
        request = operation_request(operation_key, token, fingerprint, codec)
        OperationBlock.__init__(self, request)
        self._tables = _tables(table, fences)
        self._savepoint: Any = None

    def __enter__(self) -> operation[C]:
        self._enter_blocking()
        return self

    async def __aenter__(self) -> operation[C]:
        await self._enter_asyncio()
        return self

    def _prepare(self, given: Any) -> None:
        outcome = _claim(given, self._request, self._tables, None)
        if outcome.first and self._begun is None:
            try:
                self._savepoint = given.begin_nested()
            except BaseException as error:
                with unless_told(error):
                    self._undo(given)
                raise
        self._outcome = outcome

    def _intact(self, given: Any) -> bool:
        return super()._intact(given) and (self._savepoint is None or self._savepoint.is_active)

    def _complete(self, given: Any, *, failed: bool) -> None:
        if not self.first:
            return
        try:
            if not failed:
                self._remember(given)
                self._release(given)
                return
        except BaseException as error:
            with unless_told(error):
                self._undo(given)
            raise
        self._undo(given)

    def _remember(self, given: Any) -> None:
        """Sent also without a result: a transaction that has failed unnoticed says so here."""
        encoded = self._request.encoded(self.result)
        if isinstance(given, Session):
            given.flush()
        table = self._tables[0]
        statement = update(table).where(table.c.key == self._request.stored_key)
        connection = connection_of(given, table)
        connection.execute(statement.values(result=encoded))

    def _release(self, given: Any) -> None:
        if self._savepoint is None:
            return
        if given.get_nested_transaction() is not self._savepoint:
            raise RuntimeError(
                f"a savepoint that was begun inside operation {self._request.key!r} is still open: "
                "release it or roll it back before the block ends"
            )
        self._savepoint.commit()

    def _undo(self, given: Any) -> None:
        """Take back what was done in the caller's transaction, or all of the transaction."""
        if self._begun is not None or not self._goes_on(given):
            return  # it is rolled back as a whole, or ended already
        callers = self._callers_savepoint
        try:
            if callers is None or callers.is_active:
                _roll_back_to(given, callers)
            elif isinstance(given, Session) and given.get_nested_transaction() is callers:
                return  # a flush that failed has rolled it back, and the row with it
            table = self._tables[0]
            statement = delete(table).where(table.c.key == self._request.stored_key)
            connection_of(given, table).execute(statement)
        except BaseException:
            self._transaction.rollback()
            raise


def _roll_back_to(given: Any, savepoint: Any) -> None:
    """Roll back the savepoints inside of it, from the innermost: only so do their objects agree."""
    while (inner := given.get_nested_transaction()) is not savepoint:
        inner.rollback()


def _tables(operations: Table, fences: Table) -> tuple[Table, Table]:
    """The tables of operations and of fences, checked."""
    return (
        check_table(operations, OPERATIONS, "operations_table"),
        check_table(fences, FENCES, "fences_table"),
    )


@lru_cache(maxsize=16)
def _claiming(table: Table) -> tuple[Any, Any]:
    """The statements that claim an operation and that look at it, made once."""
    claim = postgresql.insert(table).values(at=func.now())  # SQLite compiles it as well
    claim = claim.on_conflict_do_nothing(index_elements=[table.c.key])
    look = select(table.c.fingerprint, table.c.result).where(table.c.key == bindparam("wanted"))
    return claim.returning(literal_column("1")), look


def _claim(
    given: Connection | Session,
    request: OperationRequest,
    tables: tuple[Table, Table],
    encoded: str | None,
) -> Applied:
    """What became of the operation, whose fence is taken first."""
    operations, fences = tables
    connection = holding_connection(given, operations)
    if request.tokens:
        if connection_of(given, fences) is not connection:
            raise ValueError(
                f"the session's binds put {operations.fullname} and {fences.fullname} into two "
                "databases, where nothing holds them together: bind both to the database of the "
                "effect"
            )
        take_fences(given, request.tokens, None, fences)
    claim, look = _claiming(operations)
    row = {
        "key": request.stored_key,
        "token": request.token,
        "fingerprint": request.fingerprint,
        "result": encoded,
    }
    return request.claim(
        lambda: bool(connection.execute(claim, row).all()),
        lambda: connection.execute(look, {"wanted": request.stored_key}).one_or_none(),
        operations.fullname,
    )
