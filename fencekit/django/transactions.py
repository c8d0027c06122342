"""A token for a whole transaction, and effects applied once, on Django's connections.

Django has no transactions with ``await``: call these inside a function that `sync_to_async` runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.models.functions import Now

from fencekit import Codec, FenceToken, IdempotencyConflict, JsonCodec
from fencekit.fencing import check_sequence, in_order, refusal, stored

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
    connection = _connection(using)
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
    known = _claim(operation_key, token, result, fingerprint, codec or JsonCodec(), using)
    return Applied(True, result) if known is None else known


class _Block:
    """What ``with operation(...)`` gives."""

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
) -> Iterator[_Block]:
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
    chosen = codec or JsonCodec()
    with transaction.atomic(using=using):
        known = _claim(operation_key, token, None, fingerprint, chosen, using)
        block = _Block(known, operation_key)
        yield block
        if block.first and block.result is not None:
            text = chosen.encode(block.result).decode()
            with connections[using].cursor() as cursor:
                key = stored(operation_key, "key")
                sql = "UPDATE fencekit_operations SET result = %s WHERE key = %s"
                cursor.execute(sql, [text, key])


def purge_operations(older_than: timedelta, *, batch: int = 1000, using: str = "default") -> int:
    """Delete up to ``batch`` operations that are older, and return how many; repeat until 0.

    >>> from datetime import timedelta
    >>> from fencekit.django import purge_operations
    >>> def nightly():
    ...     while purge_operations(timedelta(days=30)):
    ...         pass
    """
    from fencekit.django.models import Operation

    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch is a number of rows, 1 or more, not {batch!r}")
    rows = Operation.objects.using(using)
    old = rows.annotate(now=Now()).filter(at__lt=F("now") - older_than).order_by("at")
    keys = list(old.values_list("pk", flat=True)[:batch])
    number: int = rows.filter(pk__in=keys).delete()[0]
    return number


def _connection(using: str) -> BaseDatabaseWrapper:
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
                current, at = cursor.fetchone()
                raise refusal(token, sequence, "fencekit_fences", current, at)


def _claim(
    operation_key: str,
    token: Tokens | None,
    result: Any,
    fingerprint: str | None,
    codec: Codec,
    using: str,
) -> Applied | None:
    """None if the operation is the caller's to apply, else what became of it before."""
    key = stored(operation_key, "key")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint is text, not {type(fingerprint).__name__}")
    tokens = [] if token is None else in_order(token)
    text = None if result is None else codec.encode(result).decode()
    connection = _connection(using)
    if not connection.in_atomic_block:
        raise ValueError("there is no open transaction, so nothing would be held: use atomic()")
    if tokens:
        _take(connection, tokens, None)
    with connection.cursor() as cursor:
        while True:
            number = tokens[0].value if tokens else None
            cursor.execute(_CLAIM, [key, number, fingerprint, text])
            if cursor.fetchone():
                return None
            known = "SELECT fingerprint, result FROM fencekit_operations WHERE key = %s"
            cursor.execute(known, [key])
            row = cursor.fetchone()
            if row is not None:  # else it was purged in between
                break
    if fingerprint is not None and row[0] not in (None, fingerprint):
        raise IdempotencyConflict(
            f"operation {operation_key!r} is known with another fingerprint: the same key was used "
            "for different input",
            key=operation_key,
            fingerprint=fingerprint,
            known=row[0],
        )
    return Applied(False, None if row[1] is None else codec.decode(row[1].encode()))
