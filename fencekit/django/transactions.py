"""A token for a whole transaction, and effects applied once, on Django's connections.

Django has no transactions with ``await``: call these inside a function that `sync_to_async` runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from fencekit import Codec, FenceToken
from fencekit.django._databases import check_database
from fencekit.fencing import (
    Applied,
    OperationBlock,
    OperationRequest,
    check_sequence,
    hidden_row,
    in_order,
    operation_request,
    refusal,
    stored,
)

__all__ = ["Applied", "OperationBlock", "apply_once", "fenced_transaction", "operation"]

Tokens = FenceToken | Iterable[FenceToken]

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
_KNOWN = "SELECT fingerprint, result FROM fencekit_operations WHERE key = %s"
_REMEMBER = "UPDATE fencekit_operations SET result = %s WHERE key = %s"


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
        _take_fences(connection, tokens, position)
        yield


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
    be held together; ``FencedOutError`` for an old token; ``IdempotencyConflict`` for a key that is
    known with another ``fingerprint`` (one without is compared with none: neither a key that was
    first applied without, nor a call without).

    >>> from fencekit.django import apply_once
    >>> def charge(order):  # under transaction.atomic()
    ...     return apply_once(f"charge:{order.pk}", result={"receipt": 1}).first
    """
    request = operation_request(operation_key, token, fingerprint, codec)
    encoded = request.encoded(result)
    applied = _claim(connection_of(using), request, encoded)
    return Applied(True, result) if applied.first else applied


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
    request = operation_request(operation_key, token, fingerprint, codec)
    connection = connection_of(using)
    with transaction.atomic(using=using):
        block = OperationBlock(request, _claim(connection, request, None))
        yield block
        if block.first:
            # Also without a result: a transaction that has failed unnoticed says so here.
            encoded = request.encoded(block.result)
            with connection.cursor() as cursor:
                cursor.execute(_REMEMBER, [encoded, request.stored_key])


def connection_of(using: str) -> BaseDatabaseWrapper:
    """Return the connection; ``NotImplementedError`` where the tables cannot be used."""
    connection = connections[check_database(using)]
    if connection.vendor not in ("postgresql", "sqlite"):
        raise NotImplementedError(
            f"this needs INSERT ... ON CONFLICT, which {connection.vendor} does not have: use "
            "fenced_update"
        )
    return connection


def _take_fences(
    connection: BaseDatabaseWrapper, tokens: Sequence[FenceToken], sequence: int | None
) -> None:
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
                    raise hidden_row(f"the fence of {token.resource!r}", "fencekit_fences")
                raise refusal(token, sequence, "fencekit_fences", *row)


def _claim(
    connection: BaseDatabaseWrapper, request: OperationRequest, encoded: str | None
) -> Applied:
    """What became of the operation, whose fence is taken first."""
    if not connection.in_atomic_block:
        raise ValueError("there is no open transaction, so nothing would be held: use atomic()")
    if request.tokens:
        _take_fences(connection, request.tokens, None)
    row = [request.stored_key, request.token, request.fingerprint, encoded]
    with connection.cursor() as cursor:

        def ask(sql: str, values: list[Any]) -> Any:
            cursor.execute(sql, values)
            return cursor.fetchone()

        return request.claim(
            lambda: ask(_CLAIM, row) is not None,
            lambda: ask(_KNOWN, [request.stored_key]),
            "fencekit_operations",
        )
