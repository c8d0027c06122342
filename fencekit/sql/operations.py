"""Effects that are applied once per key, in the transaction that makes them.

Rules this module obeys:

* The operation's row commits or rolls back with the effect (S6).
* A caller that comes at the same time waits for the other's end; the database does the waiting.
* No statement relies on failing: the caller's transaction goes on (S7).
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from sqlalchemy import Connection, Table, bindparam, delete, func, literal_column, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from fencekit import Codec, IdempotencyConflict, JsonCodec
from fencekit.fencing import in_order, stored
from fencekit.sql._running import AnyAsyncConnection, AnyConnection, connection_of, is_async, run
from fencekit.sql.tables import FENCES, OPERATIONS
from fencekit.sql.transaction import Own, Tokens, check_held, held, take

C = TypeVar("C")


@dataclass(frozen=True)
class Applied:
    """What became of an operation."""

    first: bool
    """Whether this call is the one that applies it."""
    result: Any
    """The remembered result; the given one if `first`."""


@dataclass(frozen=True)
class _Request:
    """An operation, checked and ready to be sent."""

    key: str
    tokens: tuple[Any, ...]
    fingerprint: str | None
    codec: Codec
    table: Table
    fences: Table


def _request(
    key: str,
    token: Tokens | None,
    fingerprint: str | None,
    codec: Codec | None,
    table: Table,
    fences: Table,
) -> _Request:
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint is text, not {type(fingerprint).__name__}")
    tokens = () if token is None else tuple(in_order(token))
    return _Request(stored(key, "key"), tokens, fingerprint, codec or JsonCodec(), table, fences)


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
) -> Awaitable[Applied]: ...


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
) -> Applied | Awaitable[Applied]:
    """Claim an operation in the open transaction: ``first`` for one caller ever, if it commits.

    Apply the effect in the same transaction if ``first``; else ``result`` is what the first call
    remembered. Who comes at the same time waits: if the first rolls back, one of them is ``first``.
    With a ``token`` the resource's fence is taken too, as in `fenced_transaction`. If the body can
    fail and the transaction commits all the same, use `operation`. With an asyncio connection or
    session the result is to be awaited.

    Raises ``IdempotencyConflict`` for a key that is known with another ``fingerprint``,
    ``FencedOutError`` for an old token, ``CanonicalizeError`` for a result that the codec cannot
    say.

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
    wanted = _request(operation_key, token, fingerprint, codec, table, fences)
    text = _encoded(result, wanted)

    def work(given: Any) -> Applied:
        known = _claim(given, wanted, text)
        return Applied(True, result) if known is None else known

    return run(connection, work)  # type: ignore[no-any-return]


class operation(Generic[C]):
    """Apply an effect once per key, as a block: do it if ``first``, and set ``result``.

    ``with`` (or ``async with``) begins a transaction and ends it, or joins the one that is open. If
    the body raises, neither its writes nor the operation's row stay, also when the caller goes on
    and commits. Otherwise as `apply_once`.

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
        self._async = is_async(connection)
        self._connection = connection
        self._wanted = _request(operation_key, token, fingerprint, codec, table, fences)
        self._own = Own()
        self._savepoint: Any = None
        self._known: Applied | None = None
        self._result: Any = None

    @property
    def first(self) -> bool:
        """Whether this block is the one that applies the effect."""
        return self._known is None

    @property
    def result(self) -> Any:
        """The remembered result. Set it where ``first``; elsewhere it stands."""
        return self._result if self._known is None else self._known.result

    @result.setter
    def result(self, value: Any) -> None:
        if self._known is not None:
            raise RuntimeError(
                f"operation {self._wanted.key!r} was applied before, so its result stands: set it "
                "only where first is true"
            )
        self._result = value

    def __enter__(self) -> operation[C]:
        if self._async:
            raise TypeError("this connection is asyncio's: use 'async with'")
        self._enter(self._connection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit(self._connection, kind, error, traceback)

    async def __aenter__(self) -> operation[C]:
        if not self._async:
            raise TypeError("this connection is a blocking one: use 'with'")
        await run(self._connection, self._enter)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run(self._connection, lambda given: self._exit(given, kind, error, traceback))

    def _enter(self, given: Any) -> None:
        with self._own.begun(given):
            self._known = _claim(given, self._wanted, None)
            if self._known is None and not self._own.open:
                self._savepoint = given.begin_nested()

    def _exit(self, given: Any, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None and self._known is None:
            try:
                self._remember(given)
            except BaseException as failure:
                self._undo(given, type(failure), failure, failure.__traceback__)
                raise
        if kind is not None:
            self._undo(given, kind, error, traceback)
            return
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is not None:
            savepoint.commit()
        self._own.end(kind, error, traceback)

    def _remember(self, given: Any) -> None:
        text = _encoded(self._result, self._wanted)
        if text is not None:
            table = self._wanted.table
            statement = update(table).where(table.c.key == self._wanted.key).values(result=text)
            connection_of(given, table=table).execute(statement)

    def _undo(self, given: Any, kind: Any, error: Any, traceback: Any) -> None:
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is not None:
            savepoint.rollback()
            table = self._wanted.table
            connection_of(given, table=table).execute(
                delete(table).where(table.c.key == self._wanted.key)
            )
        self._own.end(kind, error, traceback)


def _encoded(result: Any, wanted: _Request) -> str | None:
    return None if result is None else wanted.codec.encode(result).decode()


@lru_cache(maxsize=16)
def _claiming(table: Table) -> tuple[Any, Any]:
    """The statements that claim an operation and that look at it, made once."""
    claim = postgresql.insert(table).values(at=func.now())  # SQLite compiles it as well
    claim = claim.on_conflict_do_nothing(index_elements=[table.c.key])
    look = select(table.c.fingerprint, table.c.result).where(table.c.key == bindparam("wanted"))
    return claim.returning(literal_column("1")), look


def _claim(given: Connection | Session, wanted: _Request, text: str | None) -> Applied | None:
    """None if the operation is the caller's to apply, else what became of it before."""
    connection = held(given, wanted.table)
    if wanted.tokens:
        take(given, list(wanted.tokens), None, wanted.fences)
    claim, look = _claiming(wanted.table)
    row = {
        "key": wanted.key,
        "token": wanted.tokens[0].value if wanted.tokens else None,
        "fingerprint": wanted.fingerprint,
        "result": text,
    }
    while True:
        first = connection.execute(claim, row).all()
        check_held(connection)
        if first:
            return None
        known = connection.execute(look, {"wanted": wanted.key}).one_or_none()
        if known is not None:  # else it was purged in between
            break
    if wanted.fingerprint is not None and known.fingerprint not in (None, wanted.fingerprint):
        raise IdempotencyConflict(
            f"operation {wanted.key!r} is known with another fingerprint: the same key was used "
            "for different input",
            key=wanted.key,
            fingerprint=wanted.fingerprint,
            known=known.fingerprint,
        )
    if known.result is None:
        return Applied(False, None)
    return Applied(False, wanted.codec.decode(known.result.encode()))
