"""A token for a whole transaction, and effects applied once, on Django's connections.

Django has no transactions with ``await``: call these inside a function that `sync_to_async` runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from fencekit import Codec, FenceToken, IdempotencyConflict, JsonCodec
from fencekit.fencing import (
    as_text,
    check_fingerprint,
    check_sequence,
    in_order,
    refusal,
    stored,
)

Tokens = FenceToken | Iterable[FenceToken]

TRIES = 5
"""Claims of a key that somebody purges between our looks."""

_TAKE = """\
INSERT INTO fencekit_fences AS known (kind, resource, token, sequence, at) VALUES {rows}
ON CONFLICT (kind, resource)
DO UPDATE SET token = excluded.token, sequence = {position}, at = excluded.at
WHERE known.token < excluded.token OR (known.token = excluded.token{later})
RETURNING kind, resource"""
_ROW = "(%s, %s, %s, %s, CURRENT_TIMESTAMP)"
_KEEP = "CASE WHEN known.token = excluded.token THEN known.sequence ELSE 0 END"
_LATER = " AND known.sequence < excluded.sequence"
_CLAIM = """\
INSERT INTO fencekit_operations (key, token, fingerprint, result, at)
VALUES (%s, %s, %s, %s, CURRENT_TIMESTAMP) ON CONFLICT (key) DO NOTHING RETURNING 1"""


@contextmanager
def fenced_transaction(
    token: Tokens, *, sequence: int | None = None, using: str = "default"
) -> Iterator[None]:
    """Fence everything that a transaction does: nothing in it commits under an older token.

    ``transaction.atomic`` with the resources' rows taken first; inside an open ``atomic`` it is a
    savepoint, and the rows are held until the outermost one ends. As
    `fencekit.sql.fenced_transaction`.

    Raises ``FencedOutError`` before the body starts.

    >>> from fencekit.django import fenced_transaction
    >>> def ship(order, handle):
    ...     with fenced_transaction(handle.token):
    ...         order.save()
    """
    tokens, position = in_order(token), check_sequence(sequence)
    connection = connection_of(using)
    with transaction.atomic(using=using):
        _take(connection, tokens, position)
        yield


@dataclass(frozen=True)
class Applied:
    """What became of an operation."""

    first: bool
    """Whether this call is the one that applies it."""
    result: Any
    """The remembered result; the given one if `first`."""


def apply_once(
    operation_key: str,
    token: Tokens | None = None,
    *,
    result: Any = None,
    fingerprint: str | None = None,
    codec: Codec | None = None,
    using: str = "default",
) -> Applied:
    """Claim an operation in the open ``atomic``: ``first`` for one caller ever, if it commits.

    As `fencekit.sql.apply_once`. Raises ``ValueError`` outside of ``atomic``, where nothing would
    be held together; ``IdempotencyConflict`` and ``FencedOutError``.

    >>> from fencekit.django import apply_once
    >>> def charge(order):  # under transaction.atomic()
    ...     return apply_once(f"charge:{order.pk}", result={"receipt": 1}).first
    """
    wanted = _request(operation_key, token, fingerprint, codec, using)
    text = None if result is None else as_text(wanted.codec.encode(result))
    known = _claim(wanted, text)
    return Applied(True, result) if known is None else known


class OperationBlock:
    """What ``with operation(...)`` gives: whether to apply the effect, and its result."""

    def __init__(self, known: Applied | None, key: str) -> None:
        self._known, self._key, self._result = known, key, None

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
                f"operation {self._key!r} was applied before, so its result stands: set it only "
                "where first is true"
            )
        self._result = value


@contextmanager
def operation(
    operation_key: str,
    token: Tokens | None = None,
    *,
    fingerprint: str | None = None,
    codec: Codec | None = None,
    using: str = "default",
) -> Iterator[OperationBlock]:
    """Apply an effect once per key, as a block: do it if ``first``, and set ``result``.

    A block of ``transaction.atomic``: if the body raises, neither its writes nor the operation's
    row stay. As `fencekit.sql.operation`.

    >>> from fencekit.django import operation
    >>> def charge(order):
    ...     with operation(f"charge:{order.pk}") as charge:
    ...         if charge.first:
    ...             charge.result = {"receipt": 1}
    ...     return charge.result
    """
    wanted = _request(operation_key, token, fingerprint, codec, using)
    with transaction.atomic(using=using):
        block = OperationBlock(_claim(wanted, None), operation_key)
        yield block
        if block.first and block.result is not None:
            text = as_text(wanted.codec.encode(block.result))
            with wanted.connection.cursor() as cursor:
                sql = "UPDATE fencekit_operations SET result = %s WHERE key = %s"
                cursor.execute(sql, [text, wanted.key])


def connection_of(using: str) -> BaseDatabaseWrapper:
    """Return the connection; ``NotImplementedError`` where the tables cannot be used."""
    connection = connections[using]
    if connection.vendor not in ("postgresql", "sqlite"):
        raise NotImplementedError(
            f"this needs INSERT ... ON CONFLICT, which {connection.vendor} does not have: use "
            "fenced_update"
        )
    return connection


def _take(connection: BaseDatabaseWrapper, tokens: list[FenceToken], sequence: int | None) -> None:
    rows = [(t.kind, stored(t.resource), t.value, sequence or 0) for t in tokens]
    sql = _TAKE.format(
        rows=", ".join([_ROW] * len(rows)),
        position=_KEEP if sequence is None else "excluded.sequence",
        later="" if sequence is None else _LATER,
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [value for row in rows for value in row])
        taken = set(map(tuple, cursor.fetchall()))
        for token, (kind, resource, _, _) in zip(tokens, rows, strict=True):
            if (kind, resource) not in taken:
                where = "WHERE kind = %s AND resource = %s"
                cursor.execute(
                    f"SELECT token, sequence FROM fencekit_fences {where}", [kind, resource]
                )
                row = cursor.fetchone()
                if row is None:
                    raise _lost(f"the fence of {token.resource!r}", "fencekit_fences")
                raise refusal(token, sequence, "fencekit_fences", *row)


def _lost(what: str, table: str) -> RuntimeError:
    return RuntimeError(
        f"{what} can be neither inserted into {table} nor read from it: look for a trigger, a rule "
        "or row level security on that table"
    )


@dataclass(frozen=True)
class _Request:
    """An operation, checked before anything is sent."""

    name: str
    key: str
    tokens: list[FenceToken]
    fingerprint: str | None
    codec: Codec
    connection: BaseDatabaseWrapper


def _request(
    operation_key: str,
    token: Tokens | None,
    fingerprint: str | None,
    codec: Codec | None,
    using: str,
) -> _Request:
    return _Request(
        name=operation_key,
        key=stored(operation_key, "key"),
        tokens=[] if token is None else in_order(token),
        fingerprint=check_fingerprint(fingerprint),
        codec=codec or JsonCodec(),
        connection=connection_of(using),
    )


def _claim(wanted: _Request, text: str | None) -> Applied | None:
    """None if the operation is the caller's to apply, else what became of it before."""
    connection, tokens, fingerprint = wanted.connection, wanted.tokens, wanted.fingerprint
    if not connection.in_atomic_block:
        raise ValueError("there is no open transaction, so nothing would be held: use atomic()")
    if tokens:
        _take(connection, tokens, None)
    with connection.cursor() as cursor:
        number = tokens[0].value if tokens else None
        for _ in range(TRIES):
            cursor.execute(_CLAIM, [wanted.key, number, fingerprint, text])
            if cursor.fetchone():
                return None
            known = "SELECT fingerprint, result FROM fencekit_operations WHERE key = %s"
            cursor.execute(known, [wanted.key])
            row = cursor.fetchone()
            if row is not None:  # else it was purged in between
                break
        else:
            raise _lost(f"operation {wanted.name!r}", "fencekit_operations")
    if fingerprint is not None and row[0] not in (None, fingerprint):
        raise IdempotencyConflict(
            f"operation {wanted.name!r} is known with another fingerprint: the same key was used "
            "for different input",
            key=wanted.name,
            fingerprint=fingerprint,
            known=row[0],
        )
    return Applied(False, None if row[1] is None else wanted.codec.decode(row[1].encode()))
