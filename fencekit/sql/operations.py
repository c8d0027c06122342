"""Effects that are applied once per key, in the transaction that makes them.

Rules this module obeys:

* The operation's row commits or rolls back with the effect (S6).
* A caller that comes at the same time waits for the other's end; the database does the waiting.
* No statement relies on failing: the caller's transaction goes on (S7).
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

from sqlalchemy import Connection, Table, bindparam, delete, func, literal_column, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from fencekit import Codec, IdempotencyConflict, JsonCodec
from fencekit.fencing import as_text, check_fingerprint, in_order, stored
from fencekit.sql._block import Block, C, transactions
from fencekit.sql._running import AnyAsyncConnection, AnyConnection, connection_of, run
from fencekit.sql.tables import FENCES, OPERATIONS
from fencekit.sql.transaction import Tokens, held, take

TRIES = 5
"""Claims of a key that somebody purges between our looks."""


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
    tokens = () if token is None else tuple(in_order(token))
    return _Request(
        stored(key, "key"),
        tokens,
        check_fingerprint(fingerprint),
        codec or JsonCodec(),
        table,
        fences,
    )


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


class operation(Block[C]):
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
        super().__init__(connection)
        self._wanted = _request(operation_key, token, fingerprint, codec, table, fences)
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
        self._blocking()
        return self

    async def __aenter__(self) -> operation[C]:
        await self._waiting()
        return self

    def _enter(self, given: Any) -> None:
        self._known = _claim(given, self._wanted, None)
        if self._known is None and self._joined is not None:
            self._savepoint = given.begin_nested()
            self._joined = transactions(given)

    def _finish(self, given: Any, kind: Any, error: Any, traceback: Any) -> None:
        if self._savepoint is not None and not self._savepoint.is_active:
            self._savepoint = None  # the body ended it, or all of the transaction
        super()._finish(given, kind, error, traceback)

    def _leave(self, given: Any, *, failed: bool) -> None:
        if self._known is not None:
            return
        try:
            if not failed:
                self._remember(given)
                if self._savepoint is not None:
                    self._savepoint.commit()
                return
        except BaseException:
            self._undo(given)
            raise
        self._undo(given)

    def _remember(self, given: Any) -> None:
        """Sent also without a result: a transaction that has failed unnoticed says so here."""
        text = _encoded(self._result, self._wanted)
        if isinstance(given, Session):
            given.flush()
        table = self._wanted.table
        statement = update(table).where(table.c.key == self._wanted.key).values(result=text)
        connection_of(given, table=table).execute(statement)

    def _undo(self, given: Any) -> None:
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is not None:
            savepoint.rollback()
            table = self._wanted.table
            statement = delete(table).where(table.c.key == self._wanted.key)
            connection_of(given, table=table).execute(statement)


def _encoded(result: Any, wanted: _Request) -> str | None:
    return None if result is None else as_text(wanted.codec.encode(result))


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
    for _ in range(TRIES):
        if connection.execute(claim, row).all():
            return None
        known = connection.execute(look, {"wanted": wanted.key}).one_or_none()
        if known is not None:  # else it was purged in between
            break
    else:
        raise RuntimeError(
            f"operation {wanted.key!r} can neither be written nor read: a trigger or row level "
            f"security of {wanted.table.fullname} hides it"
        )
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
