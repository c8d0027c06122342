"""Updates of querysets that pass over rows whose fence is newer, in one statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Max, Q, QuerySet

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
    With ``raise_on_stale`` a row that is newer raises ``FencedOutError``, also if others were
    written: roll back. Without it a stale row and a missing one are both False, and of many rows
    some may have been passed over.

    Raises ``TypeError`` or ``ValueError`` for a token or field that cannot be meant.

    >>> from fencekit.django import fenced_update
    >>> def ship(orders, handle):  # Order.objects.filter(pk=7), a LockHandle
    ...     return fenced_update(orders, handle.token, {"status": "shipped"})
    """
    fresh, setting, number = _prepared(queryset, token, updates, fence_field)
    written: int = fresh.update(**setting)
    if raise_on_stale:
        newest = _newer(queryset, fence_field, number).aggregate(Max(fence_field))
        _refuse(queryset, token, newest[f"{fence_field}__max"])
    return written > 0


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
    fresh, setting, number = _prepared(queryset, token, updates, fence_field)
    written: int = await fresh.aupdate(**setting)
    if raise_on_stale:
        newest = await _newer(queryset, fence_field, number).aaggregate(Max(fence_field))
        _refuse(queryset, token, newest[f"{fence_field}__max"])
    return written > 0


def _prepared(
    queryset: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None,
    fence_field: str,
) -> tuple[QuerySet[Any], dict[str, Any], int]:
    number = token_value(token)
    if not isinstance(queryset, QuerySet):
        raise TypeError(f"queryset is a QuerySet, not {type(queryset).__name__}: use .filter(...)")
    if updates is not None and not isinstance(updates, Mapping):
        raise TypeError(f"updates is a mapping of fields, not {type(updates).__name__}")
    field = queryset.model._meta.get_field(fence_field)
    if field.get_internal_type() not in ("BigIntegerField", "PositiveBigIntegerField"):
        raise TypeError(
            f"{queryset.model.__name__}.{fence_field} is a {field.get_internal_type()}, too small "
            "for a token: make it a BigIntegerField"
        )
    setting = dict(updates or {})
    if fence_field in setting or field.attname in setting:
        raise ValueError(f"updates sets {fence_field}, which the token sets: leave it out")
    fresh = Q(**{f"{fence_field}__lte": number})
    if field.null:
        fresh |= Q(**{f"{fence_field}__isnull": True})
    return queryset.filter(fresh), {**setting, fence_field: number}, number


def _newer(queryset: QuerySet[Any], fence_field: str, number: int) -> QuerySet[Any]:
    return queryset.order_by().filter(**{f"{fence_field}__gt": number})


def _refuse(queryset: QuerySet[Any], token: FenceToken | int, newest: int | None) -> None:
    if newest is not None:
        table = queryset.model._meta.db_table
        raise FencedOutError(
            f"token {int(token)} is older than {newest}, which a row of {table} carries: somebody "
            "newer has taken over; roll back and stop",
            resource=token.resource if isinstance(token, FenceToken) else "",
            token=int(token),
            current=newest,
            table=table,
        )
