"""Updates of querysets that pass over rows whose fence is newer, in one statement.

Rules this module obeys:

* The token is compared on the updated rows themselves, never in a subquery: a database that waited
  for a row looks at the row anew, and at no more than that.
* What Django would write as several statements is refused before the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, router, transaction
from django.db.models import Field, Max, Model, Q, QuerySet

from fencekit import FencedOutError, FenceToken
from fencekit.fencing import token_value


def fenced_update(
    queryset: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None = None,
    *,
    fence_field: str = "fence_token",
    raise_on_stale: bool = False,
) -> bool:
    """Update the rows of a queryset that are not newer, and return whether any was written.

    The field is a ``BigIntegerField(default=0)``; it becomes the token. NULL is "never fenced".
    With ``raise_on_stale`` a row that is newer raises ``FencedOutError``, and none is written.
    Without it a stale row and a missing one are both False, and of many rows some may have been
    passed over.

    Raises ``TypeError`` or ``ValueError`` for a token, queryset or field that cannot be meant, and
    ``NotImplementedError`` for a queryset with joins on MySQL.

    >>> from fencekit.django import fenced_update
    >>> def ship(orders, handle):  # Order.objects.filter(pk=7), a LockHandle
    ...     return fenced_update(orders, handle.token, {"status": "shipped"})
    """
    number = token_value(token)
    _check_queryset(queryset)
    fence = _fence(queryset.model, fence_field)
    setting = {**_checked(queryset.model, updates, fence), fence_field: number}
    fresh = Q(**{f"{fence_field}__lte": number})
    if fence.null:
        fresh |= Q(**{f"{fence_field}__isnull": True})
    # One database for both statements: a replica knows nothing of the row that was just refused.
    database = queryset._db or router.db_for_write(queryset.model, **queryset._hints)
    rows = _rows(queryset, database)
    if not raise_on_stale:
        return bool(rows.filter(fresh).update(**setting))
    with transaction.atomic(using=database):
        written = rows.filter(fresh).update(**setting)
        newer = rows.order_by().filter(**{f"{fence_field}__gt": number})
        newest = newer.aggregate(newest=Max(fence_field))["newest"]
        if newest is not None:
            raise _refusal(queryset.model._meta.db_table, token, newest)
    return bool(written)


async def afenced_update(
    queryset: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None = None,
    *,
    fence_field: str = "fence_token",
    raise_on_stale: bool = False,
) -> bool:
    """Do what `fenced_update` does, to be awaited.

    >>> from fencekit.django import afenced_update
    >>> async def ship(orders, handle):
    ...     return await afenced_update(orders, handle.token, {"status": "shipped"})
    """
    return await sync_to_async(fenced_update)(
        queryset, token, updates, fence_field=fence_field, raise_on_stale=raise_on_stale
    )


def _check_queryset(queryset: object) -> None:
    if not isinstance(queryset, QuerySet):
        given = queryset.__name__ if isinstance(queryset, type) else type(queryset).__name__
        raise TypeError(f"queryset is a QuerySet, not {given}: pass .filter(...) or .all() of it")
    query, again = queryset.query, 'pass Model.objects.filter(pk__in=that.values("pk"))'
    if query.combinator:
        raise TypeError(f"queryset is a {query.combinator}, which Django cannot update: {again}")
    if query.is_sliced:
        raise TypeError(f"queryset is a slice, which Django cannot update: {again}")
    if query.distinct_fields:
        raise TypeError(f"queryset is a distinct(*fields), which Django cannot update: {again}")


def _fence(model: type[Model], fence_field: str) -> Field[Any, Any]:
    field = model._meta.get_field(fence_field)
    if field.get_internal_type() not in ("BigIntegerField", "PositiveBigIntegerField"):
        raise TypeError(
            f"{model.__name__}.{fence_field} is a {field.get_internal_type()}, too small for a "
            "token: make it a BigIntegerField"
        )
    _check_own(model, field)
    return field


def _checked(
    model: type[Model], updates: Mapping[str, Any] | None, fence: Field[Any, Any]
) -> dict[str, Any]:
    if updates is not None and not isinstance(updates, Mapping):
        raise TypeError(f"updates is a mapping of fields, not {type(updates).__name__}")
    setting = dict(updates or {})
    if fence.name in setting or fence.attname in setting:
        raise ValueError(f"updates sets {fence.name}, which the token sets: leave it out")
    for name in setting:
        _check_own(model, model._meta.get_field(name))
    return setting


def _check_own(model: type[Model], field: Any) -> None:
    """Refuse the field of a parent: its table is updated by a statement of its own."""
    owner = field.model._meta.concrete_model
    if owner is not model._meta.concrete_model:
        raise TypeError(
            f"{field.name} is a field of {owner.__name__}, whose table is not {model.__name__}'s: "
            f"one statement cannot update both: update {owner.__name__} by itself"
        )


def _rows(queryset: QuerySet[Any], database: str) -> QuerySet[Any]:
    """The same rows, as a queryset whose further filters are conditions on the updated table."""
    queryset = queryset.using(database)
    if _is_plain(queryset):
        return queryset
    vendor = connections[database].vendor
    if vendor == "mysql":
        raise NotImplementedError(
            f"this queryset has joins or aggregates, whose rows Django looks up before it updates "
            f"them on {vendor}: filter by columns of {queryset.model.__name__} alone"
        )
    found = queryset.order_by().values("pk")
    found.query.select_for_update = False  # the update locks what it writes
    # Of the same class, for its update().
    rows = type(queryset)(model=queryset.model, using=database, hints=queryset._hints)
    rows = rows.filter(pk__in=found)
    if not _is_plain(rows):
        raise TypeError(f"every {type(queryset).__name__} has joins: use a plain QuerySet")
    return rows


def _is_plain(queryset: QuerySet[Any]) -> bool:
    """Whether Django writes the conditions into the UPDATE as they are.

    It does with one table; as soon as there is another, all of them go into ``pk IN (SELECT ...)``.
    """
    query = queryset.query
    return (
        query.count_active_tables() <= 1  # what its compiler asks
        and query.group_by is None
        and not (query.distinct or query.extra or query.extra_tables)
        and not any(
            getattr(annotation, "contains_aggregate", False)
            or getattr(annotation, "contains_over_clause", False)
            for annotation in query.annotations.values()
        )
    )


def _refusal(table: str, token: FenceToken | int, newest: int) -> FencedOutError:
    return FencedOutError(
        f"token {int(token)} is older than {newest}, which a row of {table} carries: somebody "
        "newer has taken over; roll back and stop",
        resource=token.resource if isinstance(token, FenceToken) else "",
        token=int(token),
        current=newest,
        table=table,
    )
